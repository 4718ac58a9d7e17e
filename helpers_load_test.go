package san

import (
	"cmp"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sanconn/san/internal/testenv"
)

// loadDialers is how many goroutines dial at the same time.
const loadDialers = 4

// load dials without pause. Each connection has to be made, and answered by one byte: the name of the
// listener that has accepted it.
type load struct {
	done    atomic.Bool
	dialing sync.WaitGroup

	mu       sync.Mutex // guards what follows
	answered map[answeredBy]int
	stayed   map[string]int // number of connections on TCP, by reason
	failed   error          // the first error
}

type answeredBy struct {
	provider string
	name     byte
	why      string // the reason if it is on TCP; not used in load's map
}

func startLoad(t *testing.T, d *Dialer, address string) *load {
	l := &load{answered: make(map[answeredBy]int), stayed: make(map[string]int)}
	for range loadDialers {
		l.dialing.Go(func() {
			for !l.done.Load() {
				by, err := exchange(d, address)
				l.mu.Lock()
				if err == nil {
					why := by.why
					by.why = ""
					if l.answered[by]++; why != "" {
						l.stayed[why]++
					}
				} else if l.failed == nil {
					l.failed = err
				}
				l.mu.Unlock()
				if err != nil {
					return
				}
			}
		})
	}
	t.Cleanup(func() {
		l.end()
		if l.failed != nil {
			t.Error(l.failed)
		}
	})
	return l
}

// exchange makes one connection. It returns the listener that answers, and the provider once the
// connection has moved, or will not move. Both ends must have that provider.
func exchange(d *Dialer, address string) (by answeredBy, err error) {
	c, err := d.Dial("tcp", address)
	if err != nil {
		return by, err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(testTimeout))
	if by.name, err = ask(c); err != nil {
		return by, err
	}
	if d.Options.MoveAtOnce {
		if err := decided(c); err != nil {
			return by, err
		}
	}
	info, err := carriedAtBothEnds(c)
	if err != nil {
		return by, err
	}
	if by.provider = info.Provider; info.Fallback != ReasonNone {
		by.why = fmt.Sprint(info.Fallback, ": ", info.Cause)
	}
	again, err := ask(c)
	if err == nil && again != by.name {
		err = fmt.Errorf("a connection to %d was answered by %d after its move", by.name, again)
	}
	return by, err
}

// isUndecided reports whether a connection has not moved, and has no reason to stay on TCP yet.
func isUndecided(c net.Conn) bool {
	info := InfoOf(c)
	return info.Provider == providerTCP && info.Fallback == ReasonUnused
}

// decided waits until a connection is no longer undecided.
func decided(c net.Conn) error {
	return testenv.Await(testTimeout, func() error {
		if isUndecided(c) {
			return fmt.Errorf("a connection that does not move: %+v", InfoOf(c))
		}
		return nil
	})
}

// ask sends a byte, and returns the answer.
func ask(c net.Conn) (name byte, err error) { return turn(c, 0) }

func turn(c net.Conn, question byte) (answer byte, err error) {
	b := []byte{question}
	if _, err = c.Write(b); err == nil {
		_, err = c.Read(b)
	}
	if err != nil {
		err = fmt.Errorf("a connection by %+v that was not answered: %w", InfoOf(c), err)
	}
	return b[0], err
}

// askCarrier asks for the provider of the acceptor's end.
const askCarrier = '?'

// carriedAtBothEnds waits until both ends of a connection that reply serves have the same provider, as
// one end may finish its move later, and returns this end's Info.
func carriedAtBothEnds(c net.Conn) (info Info, err error) {
	var failed error
	err = testenv.Await(testTimeout/2, func() error {
		info = InfoOf(c)
		var theirs byte
		if theirs, failed = turn(c, askCarrier); failed != nil || theirs == info.Provider[0] {
			return nil
		}
		return fmt.Errorf("the dialer's end goes by %+v, and the acceptor's by %c", info, theirs)
	})
	return info, cmp.Or(failed, err)
}

// wantCarried checks that a provider carries both ends of such a connection.
func wantCarried(t testing.TB, c net.Conn, provider string) {
	t.Helper()
	if info, err := carriedAtBothEnds(c); err != nil || info.Provider != provider {
		t.Errorf("by %+v, want %s: %v", info, provider, err)
	}
}

// count returns how many connections one listener has answered over a provider.
func (l *load) count(provider string, name byte) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.answered[answeredBy{provider: provider, name: name}]
}

// wantMore waits until a listener has answered some more connections over a provider.
func (l *load) wantMore(t *testing.T, provider string, name byte) {
	t.Helper()
	const some = 10
	before := l.count(provider, name)
	waitFor(t, fmt.Sprintf("answers of %d by %s", name, provider), func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.failed != nil || l.answered[answeredBy{provider: provider, name: name}] >= before+some
	})
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.failed != nil {
		t.Fatal(l.failed)
	}
}

// end ends the load.
func (l *load) end() {
	l.done.Store(true)
	l.dialing.Wait()
}

// reply serves connections until Accept fails, and waits for their end. It answers each byte by one:
// askCarrier by the first letter of the provider, all others by its name.
func reply(l net.Listener, name byte) {
	var serving sync.WaitGroup
	defer serving.Wait()
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		serving.Go(func() {
			defer c.Close()
			for b := make([]byte, 1); ; {
				c.SetDeadline(time.Now().Add(testTimeout))
				if _, err := c.Read(b); err != nil {
					return
				}
				if b[0] == askCarrier {
					b[0] = InfoOf(c).Provider[0]
				} else {
					b[0] = name
				}
				if _, err := c.Write(b); err != nil {
					return
				}
			}
		})
	}
}
