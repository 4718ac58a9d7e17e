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
	l := mustListen(t, &ListenConfig{Backlog: places}, "tcp", "127.0.0.1:0")
	conns := make(map[string]net.Conn)
	for range places {
		c := mustDial(t, &Dialer{}, l.Addr().String())
		conns[c.LocalAddr().String()] = c
	}
	_, err := new(Dialer).Dial("tcp", l.Addr().String())
	wantOpError(t, err, "dial", syscall.ECONNREFUSED)
	for range conns {
		s := mustAccept(t, l) // in the order in which they have negotiated
		send(t, conns[s.RemoteAddr().String()], s, "still served")
	}
	wantProvider(t, mustDial(t, &Dialer{}, l.Addr().String()), fakeName)
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
