package san

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/provider/shm"
)

// Tests with a program without this package at the other end: it sees only the application's bytes, and
// the reason for TCP is that it is plain.

// Plain servers: one writes first, the other counts what it receives.
func TestPlainServer(t *testing.T) {
	for _, policy := range []Policy{Prefer, Never} {
		t.Run(policy.String(), func(t *testing.T) {
			l := plainListen(t, "127.0.0.1:0")
			d := atOnce()
			d.Policy = policy
			c := mustDial(t, d, l.Addr().String())
			s := mustAccept(t, l)
			send(t, s, c, "220 ready\r\n")
			send(t, c, s, "EHLO\r\n")
			want := map[Policy]Reason{Prefer: ReasonNoListener, Never: ReasonPolicy}[policy]
			wantStays(t, c, want)
			send(t, s, c, "250 hello\r\n")
			if _, ok := c.(*net.TCPConn); ok != (policy == Never) {
				t.Errorf("the dialer has a %T", c)
			}
			c.Close()
			rest, err := io.ReadAll(s)
			if err != nil || len(rest) != 0 {
				t.Errorf("%d more bytes: %q, %v", len(rest), rest, err)
			}
		})
	}
}

// A plain client of a server that writes first, and of one that reads first.
func TestPlainClient(t *testing.T) {
	for _, policy := range []Policy{Prefer, Never} {
		t.Run(policy.String(), func(t *testing.T) {
			l := mustListen(t, &ListenConfig{Policy: policy}, "tcp", "127.0.0.1:0")
			p, err := net.Dial("tcp", l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer p.Close()
			s := mustAccept(t, l)
			send(t, s, p, "220 ready\r\n")
			send(t, p, s, "EHLO\r\n")
			want := map[Policy]Reason{Prefer: ReasonPeerPlain, Never: ReasonPolicy}[policy]
			wantFallback(t, s, want)
			if _, ok := s.(*net.TCPConn); ok != (policy == Never) {
				t.Errorf("Accept has returned a %T", s)
			}
			s.Close()
			if rest, err := io.ReadAll(p); len(rest) != 0 || err != nil {
				t.Errorf("%d more bytes: %q, %v", len(rest), rest, err)
			}
		})
	}
}

// Large streams in both directions at the same time, between a plain end and one of this package.
func TestPlainStream(t *testing.T) {
	const total = 8 << 20
	stream := func(t *testing.T, a, b net.Conn) {
		var streaming sync.WaitGroup
		ends := []*streamEnd{{conn: a, seed: 1}, {conn: b, seed: 2}}
		for _, e := range ends {
			streaming.Go(func() { e.both(t, total) })
		}
		streaming.Wait()
		for i, e := range ends {
			if other := ends[1-i]; !bytes.Equal(e.sum(), other.gotSum()) {
				t.Errorf("end %d sent %d bytes, %d arrived, checksums differ", i, total, other.got)
			}
		}
	}
	t.Run("plain server", func(t *testing.T) {
		l := plainListen(t, "127.0.0.1:0")
		c := mustDial(t, unhurried(), l.Addr().String())
		s := mustAccept(t, l)
		newconn.HandleOf(c).CallUse(0) // begins the first attempt, which would come too late in the stream
		send(t, c, s, "a use")
		wantStays(t, c, ReasonNoListener)
		stream(t, c, s)
		wantStays(t, c, ReasonNoListener)
	})
	t.Run("plain client", func(t *testing.T) {
		l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		s := mustAccept(t, l)
		stream(t, c, s)
		wantFallback(t, s, ReasonPeerPlain)
	})
}

// With Require, a dial to a plain server fails, and the error has the reason.
func TestRequireOfAPlainServer(t *testing.T) {
	l := plainListen(t, "127.0.0.1:0")
	accepted := make(chan net.Conn, 1)
	go func() {
		c, _ := l.Accept()
		accepted <- c
	}()
	before := Stats().Fallbacks[ReasonNoListener]
	_, err := (&Dialer{Policy: Require}).Dial("tcp", l.Addr().String())
	why := new(Unavailable)
	if !errors.As(err, &why) || why.Reason != ReasonNoListener {
		t.Errorf("the error is %v", err)
	}
	oe := wantOpError(t, err, "dial", why)
	if oe.Addr.String() != l.Addr().String() {
		t.Errorf("the error names %v", oe.Addr)
	}
	if n := Stats().Fallbacks[ReasonNoListener] - before; n != 1 {
		t.Errorf("counted %d times", n)
	}
	c := <-accepted
	defer c.Close()
	c.SetDeadline(time.Now().Add(testTimeout))
	if n, err := c.Read(make([]byte, 1)); n != 0 || !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the server reads %d, %v", n, err)
	}
}

// SAN_MOVE, which an operator may set, makes connections move at once.
func TestMoveNowByTheEnvironment(t *testing.T) {
	tcp := plainListen(t, "127.0.0.1:0")
	startServer(t, tcp, 3)
	run := func(value string) string {
		return startProcess(t, "default", moves, tcp.Addr().String(), func(c *exec.Cmd) {
			c.Env = append(c.Env, "SAN_MOVE="+value)
		}).line(t)
	}
	if got := run("now"); got != shm.Name {
		t.Errorf("now: %s", got)
	}
	if got := run(""); got != "tcp, not used enough yet" {
		t.Errorf("not set: %s", got)
	}
	if got := run("later"); got != "san: SAN_MOVE=later is not now" {
		t.Errorf("later: %s", got)
	}
}

func init() { roles["default"] = roleDefault }

// roleDefault dials with default settings, and prints the result.
func roleDefault(l lane) error {
	c, err := Dial("tcp", os.Getenv(envAddr))
	if oe := (*net.OpError)(nil); errors.As(err, &oe) {
		fmt.Println(oe.Err)
		return nil
	} else if err != nil {
		return err
	}
	if _, err := ask(c); err != nil {
		return err
	}
	if os.Getenv("SAN_MOVE") != "" {
		if err := decided(c); err != nil {
			return err
		}
		if InfoOf(c).Fallback == ReasonTimeout { // as may happen by default under load
			return roleDefault(l)
		}
	}
	if info := InfoOf(c); info.Fallback != ReasonNone {
		fmt.Printf("%s, %v\n", info.Provider, info.Fallback)
	} else {
		fmt.Println(info.Provider)
	}
	return nil
}

// The counters for a connection that moves, goes back, and ends.
func TestStatsOfAMove(t *testing.T) {
	f := useFake(t)
	waitFor(t, "the attempts of other tests' connections to end", func() bool { return !isTrying() })
	before := Stats()
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	c := mustDial(t, unhurried(), l.Addr().String())
	s := mustAccept(t, l)
	want := func(when string, tcp, san uint64, open int) {
		t.Helper()
		after := Stats()
		for name, n := range map[string]uint64{
			"dialed by tcp":   after.Dialed[providerTCP] - before.Dialed[providerTCP] - tcp,
			"accepted by tcp": after.Accepted[providerTCP] - before.Accepted[providerTCP] - tcp,
			"dialed by san":   after.Dialed[f.Name()] - before.Dialed[f.Name()] - san,
			"accepted by san": after.Accepted[f.Name()] - before.Accepted[f.Name()] - san,
		} {
			if n != 0 {
				t.Errorf("%s: %s: %d too many", when, name, int64(n))
			}
		}
		waitFor(t, fmt.Sprintf("%s: %d open by the SAN", when, open), func() bool {
			return Stats().Open[f.Name()]-before.Open[f.Name()] == open
		})
	}
	want("before it is used", 1, 0, 0)
	newconn.HandleOf(c).CallUse(0)
	send(t, c, s, "a use")
	wantMoved(t, c, f.Name())
	wantMoved(t, s, f.Name())
	send(t, c, s, "by the SAN")
	want("moved", 1, 1, 2)
	file, err := c.(interface{ File() (*os.File, error) }).File()
	if err != nil {
		t.Fatal(err)
	}
	file.Close()
	want("gone back", 1, 1, 0)
	c.Close()
	s.Close()
	want("closed", 1, 1, 0)
	after := Stats()
	for why, n := range after.Fallbacks {
		if n != before.Fallbacks[why] {
			t.Errorf("%d fallbacks for %v", n-before.Fallbacks[why], why)
		}
	}
}

// Many connections at the same time, all of which move.
func TestManyConnectionsMove(t *testing.T) {
	tcp := plainListen(t, "127.0.0.1:0")
	startServer(t, tcp, 9)
	conns := make([]net.Conn, amount(manyConns, manyConns/10))
	var dialing sync.WaitGroup
	const dialers = 50
	for d := range dialers {
		dialing.Go(func() {
			for i := d; i < len(conns); i += dialers {
				c, err := atOnce().Dial("tcp", tcp.Addr().String())
				if err != nil {
					t.Error(err)
					return
				}
				conns[i] = c
				c.SetDeadline(time.Now().Add(testTimeout))
				if name, err := ask(c); name != 9 || err != nil {
					t.Errorf("%d: %d has answered, %v", i, name, err)
				}
			}
		})
	}
	dialing.Wait()
	for i, c := range conns {
		if c == nil {
			continue
		}
		defer c.Close()
		wantMoved(t, c, shm.Name)
		c.SetDeadline(time.Now().Add(testTimeout))
		if name, err := ask(c); name != 9 || err != nil {
			t.Fatalf("%d: %d has answered, %v", i, name, err)
		}
	}
}
