package san

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptrace"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sanconn/san/internal/hello"
	"github.com/sanconn/san/internal/moving"
	"github.com/sanconn/san/provider/shm"
	"github.com/sanconn/san/sanconn"
)

// httptrace reports the connect of each dial, because it is net's own.
func TestDialsAreTraced(t *testing.T) {
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	server := &http.Server{Handler: http.NotFoundHandler()}
	go server.Serve(l)
	defer server.Close()
	var events []string
	trace := &httptrace.ClientTrace{
		ConnectStart: func(network, address string) { events = append(events, "start "+network+" "+address) },
		ConnectDone: func(network, address string, err error) {
			events = append(events, "done "+network+" "+address)
			if err != nil {
				t.Error(err)
			}
		},
		GotConn: func(c httptrace.GotConnInfo) {
			if _, ours := c.Conn.(*sanconn.Conn); !ours {
				t.Errorf("a %T", c.Conn)
			}
		},
	}
	client := http.Client{Transport: &http.Transport{DialContext: new(Dialer).DialContext}}
	defer client.CloseIdleConnections()
	req, err := http.NewRequestWithContext(httptrace.WithClientTrace(t.Context(), trace), "GET", "http://"+l.Addr().String(), nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	at := " tcp " + l.Addr().String()
	if len(events) != 2 || events[0] != "start"+at || events[1] != "done"+at {
		t.Errorf("seen: %q", events)
	}
}

// WriteUrgent makes a connection move. While attempts fail because the other end's process has not
// accepted the connection yet, and are repeated, it waits, and begins no others.
func TestUrgentDataBesideAttempts(t *testing.T) {
	onlyShm(t)
	tcp := plainListen(t, "127.0.0.1:0")
	mustAdopt(t, &ListenConfig{}, tcp)
	c := mustDial(t, atOnce(), tcp.Addr().String()).(*sanconn.Conn)
	mustAccept(t, tcp)
	waitFor(t, "an attempt fails", func() bool { return strings.Contains(c.Debug(), "the last move") })
	began := time.Now()
	if n, err := c.WriteUrgent([]byte("!")); n != 0 || !errors.Is(err, errors.ErrUnsupported) {
		t.Error(n, err)
	}
	if took := time.Since(began); took < time.Second {
		t.Errorf("it gave up after %v", took)
	}
	if info := InfoOf(c); info.Provider != providerTCP || info.Fallback != ReasonUnused {
		t.Errorf("by %s: %v; the attempt is not over", info.Provider, info.Fallback)
	}
}

// However often urgent data has tried to move a connection in vain, as to a process that is stopped, the
// connection later moves after no more use than otherwise, and urgent data can move it, too.
func TestUrgentDataInVain(t *testing.T) {
	f := useFake(t)
	attempts := make(chan error)
	f.fail = func(context.Context) error { return <-attempts }
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	for _, by := range []string{"use", "urgent data"} {
		c := mustDial(t, new(Dialer), l.Addr().String()).(*sanconn.Conn)
		s := mustAccept(t, l)
		const many = 30 // if each multiplied the use by four, the number would overflow
		for range many {
			c.SetWriteDeadline(time.Unix(1, 0))
			if _, err := c.WriteUrgent([]byte("!")); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatal(err)
			}
			select {
			case attempts <- &Unavailable{Reason: ReasonUnreachable}:
			case <-time.After(testTimeout):
				t.Fatal("it is not tried")
			}
			wantTried(t, c, ReasonUnreachable)
		}
		c.SetWriteDeadline(time.Now().Add(testTimeout))
		go func() { attempts <- nil }()
		if by == "use" {
			sendZeros(t, c, s, moving.FirstUse)
		} else if _, err := c.WriteUrgent([]byte("!")); err != nil && !errors.Is(err, errors.ErrUnsupported) { // it took longer than the attempt
			t.Error(err)
		}
		wantMoved(t, c, fakeName)
		wantMoved(t, s, fakeName)
	}
}

// WriteUrgent waits until the other end has been accepted.
func TestUrgentDataWaitsForTheAccept(t *testing.T) {
	f := useFake(t)
	var attempts atomic.Int32
	f.fail = func(context.Context) error {
		if attempts.Add(1) < 3 {
			return &Unavailable{Reason: ReasonNoListener, Err: hello.ErrNotAccepted}
		}
		return nil
	}
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	c := mustDial(t, new(Dialer), l.Addr().String()).(*sanconn.Conn)
	s := mustAccept(t, l)
	if _, err := c.WriteUrgent([]byte("!")); err != nil && !errors.Is(err, errors.ErrUnsupported) { // it took longer than the attempt
		t.Error(err)
	}
	wantMoved(t, c, fakeName)
	wantMoved(t, s, fakeName)
	if n := attempts.Load(); n != 3 {
		t.Errorf("%d attempts", n)
	}
}

// Urgent data moves a connection that has not been used, and one that Control has taken back to TCP. If
// the program has taken the descriptor, or the other end is plain, WriteUrgent fails.
func TestUrgentDataMovesTheConnection(t *testing.T) {
	onlyShm(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	c := mustDial(t, new(Dialer), l.Addr().String()).(*sanconn.Conn)
	server := mustAccept(t, l).(*sanconn.Conn)
	waitFor(t, "urgent data moves it", func() bool { // it takes more than one if an attempt times out
		n, err := c.WriteUrgent([]byte("!"))
		if err == nil && n == 1 {
			return true
		}
		if n != 0 || !errors.Is(err, errors.ErrUnsupported) {
			t.Fatal(n, err)
		}
		return false
	})
	wantMoved(t, c, shm.Name)
	b := make([]byte, sanconn.MaxUrgent)
	waitFor(t, "urgent data comes", func() bool {
		n, err := server.ReadUrgent(b)
		return err == nil && string(b[:n]) == "!"
	})

	raw, err := c.SyscallConn()
	if err == nil {
		err = raw.Control(func(uintptr) {})
	}
	if err != nil || c.Provider() != providerTCP {
		t.Fatal(err, c.Provider())
	}
	waitFor(t, "urgent data moves it again", func() bool {
		began := time.Now()
		n, err := c.WriteUrgent([]byte("!"))
		if took := time.Since(began); err != nil && took < time.Second {
			t.Fatalf("behind a look: %d, %v, after %v", n, err, took)
		}
		return err == nil
	})
	file, err := c.File()
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	began := time.Now()
	n, err := c.WriteUrgent([]byte("!"))
	if took := time.Since(began); n != 0 || !errors.Is(err, errors.ErrUnsupported) || took >= time.Second {
		t.Errorf("where the program has the descriptor: %d, %v, after %v", n, err, took)
	}

	plain := plainListen(t, "127.0.0.1:0")
	c = mustDial(t, new(Dialer), plain.Addr().String()).(*sanconn.Conn)
	n, err = c.WriteUrgent([]byte("!"))
	var oe *net.OpError
	if n != 0 || !errors.Is(err, errors.ErrUnsupported) || !errors.As(err, &oe) || oe.Op != "write" {
		t.Errorf("to a plain end: %d, %v", n, err)
	}
	send(t, c, mustAccept(t, plain), "the stream goes on")
}
