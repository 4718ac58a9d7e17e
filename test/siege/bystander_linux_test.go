package siege

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/sanconn/san"
	"github.com/sanconn/san/internal/testenv"
)

func init() { roles["bystander"] = bystanderRole }

// experience is what the bystander has met in one phase.
type experience struct {
	Dials     map[string]int // dials that succeeded, by provider; those by net are "plain"
	Fallbacks map[string]int // connections that stayed on TCP, by reason
	Echoes    int
	Rounds    int
	Failed    []string      // what went wrong
	Failures  int           // how many things went wrong
	Dial      time.Duration // the median
	Echo      time.Duration // the median
}

func (e *experience) fail(format string, args ...any) {
	e.Failures++
	if len(e.Failed) < 5 {
		e.Failed = append(e.Failed, fmt.Sprintf(format, args...))
	}
}

// bystanderRole is a well-behaved client of another user. Each command is the duration of a phase.
func bystanderRole(r *roleIO) error {
	var address string
	if err := r.args(&address); err != nil {
		return err
	}
	kept, err := dialMoved("tcp", address)
	if err != nil {
		return err
	}
	kept.Write([]byte{modeEcho})
	if err := echoOnce(kept, 0); err != nil {
		return err
	}
	r.say("ready", san.InfoOf(kept).Provider)
	for {
		limit, err := time.ParseDuration(r.command())
		if err != nil {
			return nil
		}
		r.say("met", clientPhase(address, kept, limit))
	}
}

// clientPhase dials, echoes and closes, by san and by net alternately, and echoes on a connection that
// it keeps.
func clientPhase(address string, kept net.Conn, limit time.Duration) *experience {
	e := &experience{Dials: map[string]int{}, Fallbacks: map[string]int{}}
	var dials, echoes []time.Duration
	for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(time.Millisecond) { // its pace
		e.Rounds++
		for range 5 {
			begun := time.Now()
			if err := echoOnce(kept, e.Echoes); err != nil {
				e.fail("echo on the kept connection: %v", err)
			}
			echoes = append(echoes, time.Since(begun))
			e.Echoes++
		}
		begun := time.Now()
		if provider := visit(e, address, dialMoved); provider != "" {
			e.Dials[provider]++
			dials = append(dials, time.Since(begun))
		}
		if visit(e, address, net.Dial) != "" {
			e.Dials["plain"]++
		}
		if e.Failures > 100 {
			break
		}
	}
	e.Dial, e.Echo = median(dials), median(echoes)
	return e
}

// dialMoved dials, and waits until the connection has moved, or will not move.
func dialMoved(network, address string) (net.Conn, error) {
	var d san.Dialer
	d.Options.AttemptTimeout = 8 * time.Second // a busy machine stops processes for seconds; a dial that hangs still shows
	d.Options.MoveAtOnce = true
	return dialMovedBy(&d, network, address)
}

func dialMovedBy(d *san.Dialer, network, address string) (net.Conn, error) {
	c, err := d.Dial(network, address)
	if err != nil {
		return nil, err
	}
	testenv.Await(10*time.Second, func() error {
		if san.InfoOf(c).Fallback == san.ReasonUnused {
			return errors.New("nothing has become of its move yet")
		}
		return nil
	})
	return c, nil
}

// visit makes a connection for one echo, and returns its provider.
func visit(e *experience, address string, dial func(network, address string) (net.Conn, error)) string {
	c, err := dial("tcp", address)
	if err != nil {
		e.fail("dial: %v", err)
		return ""
	}
	defer c.Close()
	info := san.InfoOf(c)
	if info.Fallback != san.ReasonNone {
		e.Fallbacks[info.Fallback.String()]++
	}
	c.Write([]byte{modeEcho})
	if err := echoOnce(c, e.Echoes); err != nil {
		e.fail("echo by %s: %v", info.Provider, err)
		return ""
	}
	e.Echoes++
	return info.Provider
}

// echoOnce sends a message that differs from all others, and reads it back.
func echoOnce(c net.Conn, number int) error {
	var sent, got [64]byte
	for i := 0; i < len(sent); i += 8 {
		binary.LittleEndian.PutUint64(sent[i:], uint64(number)*0x9e3779b97f4a7c15+uint64(i))
	}
	c.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := c.Write(sent[:]); err != nil {
		return err
	}
	for n := 0; n < len(got); {
		k, err := c.Read(got[n:])
		if err != nil {
			return err
		}
		n += k
	}
	if got != sent {
		return fmt.Errorf("wrong bytes")
	}
	return nil
}

func median(d []time.Duration) time.Duration {
	if len(d) == 0 {
		return 0
	}
	slices.Sort(d)
	return d[len(d)/2]
}
