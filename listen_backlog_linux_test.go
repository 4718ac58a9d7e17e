package san

import (
	"context"
	"errors"
	"math"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/backlog"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/provider/shm"
	"github.com/sanconn/san/session"
)

func TestListenerSlowDialerDelaysNobody(t *testing.T) {
	f := useFake(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	f.silent.Store(true)
	go (&Dialer{}).Dial("tcp", l.Addr().String())
	<-f.connected
	f.silent.Store(false)
	wantProvider(t, mustDial(t, &Dialer{Policy: Require}, l.Addr().String()), fakeName)
}

func TestListenerBacklogFullIsRefusedAtOnce(t *testing.T) {
	useFake(t)
	const places = 3
	d := new(Dialer)
	d.Options.AttemptTimeout = testTimeout // no TCP on a busy machine
	l := mustListen(t, &ListenConfig{Backlog: places}, "tcp", "127.0.0.1:0")
	conns := make(map[string]net.Conn)
	for range places {
		c := mustDial(t, d, l.Addr().String())
		conns[c.LocalAddr().String()] = c
	}
	_, err := d.Dial("tcp", l.Addr().String())
	wantOpError(t, err, "dial", syscall.ECONNREFUSED)
	for range conns {
		s := mustAccept(t, l) // in the order in which they have negotiated
		send(t, conns[s.RemoteAddr().String()], s, "still served")
	}
	wantProvider(t, mustDial(t, d, l.Addr().String()), fakeName)
}

// A huge Backlog is cut to the largest that there is.
func TestListenerBacklogHasALimit(t *testing.T) {
	f := useFake(t)
	mustListen(t, &ListenConfig{Backlog: math.MaxInt}, "tcp", "127.0.0.1:0")
	if got := f.listened.backlog; got != maxBacklog {
		t.Errorf("the provider has a backlog of %d, want %d", got, maxBacklog)
	}
}

// A connection that is never negotiated loses its place in the backlog.
func TestFailedNegotiationGivesItsPlaceBack(t *testing.T) {
	f := useFake(t)
	l := mustListen(t, &ListenConfig{Backlog: 1}, "tcp", "127.0.0.1:0")
	f.silent.Store(true)
	d := &Dialer{Policy: Require}
	d.Options.AttemptTimeout = 10 * time.Millisecond
	if _, err := d.Dial("tcp", l.Addr().String()); reasonOf(err) != ReasonTimeout {
		t.Fatalf("a dialer that does not negotiate: %v", err)
	}
	f.silent.Store(false)
	testenv.Eventually(t, testTimeout, func() error {
		c, err := (&Dialer{Policy: Require}).Dial("tcp", l.Addr().String())
		if err == nil {
			wantProvider(t, c, fakeName)
			c.Close()
		}
		return err
	})
}

// Dialers that connect and do not negotiate do not keep others out of the backlog until their
// time is up.
func TestBacklogOfTheSilentIsGivenToOthers(t *testing.T) {
	f := useFake(t)
	const places = 2
	l := mustListen(t, &ListenConfig{Backlog: places}, "tcp", "127.0.0.1:0")
	f.silent.Store(true)
	ctx, cancel := context.WithCancel(t.Context())
	var silent sync.WaitGroup
	defer silent.Wait()
	defer cancel()
	for range places {
		silent.Go(func() {
			d := &Dialer{Policy: Require}
			d.Options.AttemptTimeout = 2 * testTimeout // longer than negotiateTimeout
			d.DialContext(ctx, "tcp", l.Addr().String())
		})
		<-f.connected
	}
	f.silent.Store(false)
	began := time.Now()
	for range places {
		testenv.Eventually(t, testTimeout, func() error {
			c, err := (&Dialer{Policy: Require}).Dial("tcp", l.Addr().String())
			if err == nil {
				wantProvider(t, c, fakeName)
				t.Cleanup(func() { c.Close() })
			}
			return err
		})
	}
	if took := time.Since(began); took < backlog.Slow/2 || took > negotiateTimeout/2 {
		t.Errorf("it took %v", took)
	}
	// A connection that is negotiated keeps its place.
	if _, err := (&Dialer{Policy: Require}).Dial("tcp", l.Addr().String()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("beyond the backlog: %v", err)
	}
	for range places {
		wantProvider(t, mustAccept(t, l), fakeName)
	}
}

// silentDialers are dialers over shared memory that connect and do not negotiate.
func silentDialers(t *testing.T, l net.Listener, n int) {
	t.Helper()
	to := l.Addr().(*net.TCPAddr)
	for range n {
		s, err := bind(t.Context(), request{remote: to.AddrPort()})
		if err != nil {
			t.Fatal(err)
		}
		ep, err := shm.Dial(t.Context(), s.fd, to, shm.Config{Timeout: testTimeout})
		if err != nil {
			s.Close()
			t.Fatal(err)
		}
		t.Cleanup(func() { ep.Close(); ep.Retire() })
	}
}

// A backlog full of dialers over shared memory that do not negotiate refuses nobody: the
// others are served by TCP, whose backlog has room, until some places are free.
func TestBacklogOfTheSilentSendsOthersToTCP(t *testing.T) {
	useProviders(t, shmProvider{})
	const places = 4
	l := mustListen(t, &ListenConfig{Backlog: places}, "tcp", "127.0.0.1:0")
	silentDialers(t, l, places)
	_, err := (&Dialer{Policy: Require}).Dial("tcp", l.Addr().String())
	if reasonOf(err) != ReasonResources {
		t.Errorf("with Require: %v, want %v", err, ReasonResources)
	}
	wantFallback(t, mustDial(t, &Dialer{}, l.Addr().String()), ReasonResources)
	plain, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	plain.Close()
	// Each time the oldest of the silent has been there for long, it loses its place.
	for range places {
		testenv.Eventually(t, testTimeout, func() error {
			c, err := (&Dialer{Policy: Require}).Dial("tcp", l.Addr().String())
			if err == nil {
				wantProvider(t, c, shm.Name)
				t.Cleanup(func() { c.Close() })
			}
			return err
		})
	}
}

// A dialer that loses its place before it negotiates is told to do without a SAN, not that
// it is connected, or refused.
func TestDialerThatLosesItsPlaceGoesToTCP(t *testing.T) {
	useProviders(t, shmProvider{})
	l := mustListen(t, &ListenConfig{Backlog: 1}, "tcp", "127.0.0.1:0")
	to := l.Addr().(*net.TCPAddr)
	s, err := bind(t.Context(), request{remote: to.AddrPort()})
	if err != nil {
		t.Fatal(err)
	}
	ep, err := shm.Dial(t.Context(), s.fd, to, shm.Config{Timeout: testTimeout})
	if err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, testTimeout, func() error { // once it has lost its place
		c, err := (&Dialer{Policy: Require}).Dial("tcp", l.Addr().String())
		if err == nil {
			c.Close()
		}
		return err
	})
	_, err = negotiate(t.Context(), transport{endpoint: ep}, session.Config{})
	if reasonOf(err) != ReasonResources {
		t.Errorf("the late dialer: %v, want %v", err, ReasonResources)
	}
}
