package san

import (
	"errors"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"
)

func TestAcceptAfterDeadlineAndClose(t *testing.T) {
	useFake(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	l.SetDeadline(time.Now().Add(time.Millisecond))
	_, err := l.Accept()
	oe := wantOpError(t, err, "accept", os.ErrDeadlineExceeded)
	if !oe.Timeout() || oe.Addr.String() != l.Addr().String() {
		t.Errorf("%+v", oe)
	}

	mustDial(t, &Dialer{}, l.Addr().String()) // ready, and yet:
	l.SetDeadline(time.Now().Add(-1))
	_, err = l.Accept()
	wantOpError(t, err, "accept", os.ErrDeadlineExceeded)
	l.SetDeadline(time.Time{})
	mustAccept(t, l)

	const waiters = 4
	errs := make(chan error, waiters)
	for range waiters {
		go func() {
			_, err := l.Accept()
			errs <- err
		}()
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	for range waiters {
		wantOpError(t, <-errs, "accept", net.ErrClosed)
	}
	_, err = l.Accept()
	wantOpError(t, err, "accept", net.ErrClosed)

	late := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	late.SetDeadline(time.Now().Add(-1))
	late.Close()
	for range 20 { // not the one or the other
		_, err = late.Accept()
		wantOpError(t, err, "accept", net.ErrClosed)
	}
	wantOpError(t, l.Close(), "close", net.ErrClosed)
	wantOpError(t, l.SetDeadline(time.Now()), "set", net.ErrClosed)
	if _, err := new(Dialer).Dial("tcp", l.Addr().String()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dial after Close: %v", err)
	}
}

// TCP's listener fails while nobody is in Accept, as for lack of descriptors. The error is
// forgotten when the next connection comes.
func TestAcceptForgetsErrorsThatAreOver(t *testing.T) {
	useFake(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	plain := &Dialer{Policy: Never}
	mustDial(t, plain, l.Addr().String())
	wantFallback(t, mustAccept(t, l), ReasonPeerPlain)
	l.tcp.SetDeadline(time.Now().Add(-1))
	l.tcp.Accept() // comes after the listener's own call, which has failed then
	l.tcp.SetDeadline(time.Time{})
	mustDial(t, plain, l.Addr().String())
	wantFallback(t, mustAccept(t, l), ReasonPeerPlain)

	l.tcp.SetDeadline(time.Now().Add(-1)) // an error that is not over is returned
	_, err := l.Accept()
	wantOpError(t, err, "accept", os.ErrDeadlineExceeded)
}

// A TCP connection that the listener has taken but nobody accepts is reset at Close, as
// those in the kernel's backlog are: an orderly end would look like an answer.
func TestListenerResetsWhatNobodyAccepts(t *testing.T) {
	useFake(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	var conns []net.Conn
	for range 3 { // accepted, taken, in the kernel's backlog
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		conns = append(conns, c)
	}
	wantProvider(t, mustAccept(t, l), "tcp")
	l.Close()
	for _, c := range conns[1:] {
		c.SetDeadline(time.Now().Add(testTimeout))
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("Read: %v", err)
		}
	}
}

// What nobody accepted is reset; what was accepted lives on.
func TestListenerCloseResetsWhatWaits(t *testing.T) {
	useFake(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	kept := mustDial(t, &Dialer{}, l.Addr().String())
	s := mustAccept(t, l)
	lost := mustDial(t, &Dialer{}, l.Addr().String())
	l.Close()
	lost.SetDeadline(time.Now().Add(testTimeout))
	if _, err := lost.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read %v, want a reset", err)
	}
	send(t, kept, s, "alive")
}

func TestListenerOpensAndClosesUnderLoad(t *testing.T) {
	useFake(t)
	for range 20 {
		l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				d := &Dialer{Policy: []Policy{Prefer, Never}[i%2]}
				if c, err := d.Dial("tcp", l.Addr().String()); err == nil {
					c.Close()
				}
			})
		}
		wg.Go(func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				c.Close()
			}
		})
		l.Close()
		wg.Wait()
	}
	waitFor(t, "all connections closed", func() bool { return Stats().Open[fakeName] == 0 })
}
