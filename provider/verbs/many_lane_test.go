//go:build linux

package verbs

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
	"github.com/sanconn/san/test/hwsim"
)

var connections = flag.Int("connections", 200, "connections that TestManyConnectionsLeaveNothing opens and closes")

// comeAndGo makes a connection, reads from and into memory of this process, and closes it in a state
// that depends on the number.
func comeAndGo(l *listener, number int, from []byte) error {
	a, b, err := connect(l, Config{})
	if err != nil {
		return err
	}
	defer a.discard()
	defer b.discard()
	begin(a)
	begin(b)
	into := make([]byte, len(from))
	for round := range 2 { // the second round finds the first one's registrations in the cache
		d, err := a.mem.Expose(from, session.RemoteRead)
		if err != nil {
			return err
		}
		// A window is certain to be open only after a later message.
		a.CommitControl(len(a.ReserveControl(16)))
		if _, err := next(b, session.Message); err != nil {
			return err
		}
		b.Drop()
		if err := b.mem.Read(into, d, 0, uint32(round)); err != nil {
			return err
		}
		if number%10 == 9 {
			return nil // in the middle of the transfer
		}
		if ev, err := next(b, session.ReadDone); err != nil || ev.Err != nil {
			return cmp.Or(err, ev.Err)
		}
		if number%10 == 8 {
			break // still exposed
		}
		a.mem.Revoke(d)
	}
	if number%2 == 0 {
		a.mem.Alloc(4096) // is not freed
	}
	a.Close()
	b.Close()
	return nil
}

// next waits for an event, which must be of the kind.
func next(e *Endpoint, kind session.EventKind) (ev session.Event, err error) {
	for began := time.Now(); !e.Poll(&ev); runtime.Gosched() {
		if e.Err() != nil || time.Since(began) > patience {
			return ev, fmt.Errorf("no event: %w", e.Err())
		}
	}
	if ev.Kind != kind {
		err = fmt.Errorf("event of kind %d, want %d", ev.Kind, kind)
	}
	return ev, err
}

// Connections come and go, with registered memory in all states. They leave no descriptor and no
// goroutine and, after their listeners, nothing registered.
func TestManyConnectionsLeaveNothing(t *testing.T) {
	buffers := make([][]byte, 8) // shared by all, as a program's pool is
	for i := range buffers {
		buffers[i] = make([]byte, 64<<10)
	}
	listeners := make([]*listener, 4)
	for i := range listeners {
		listeners[i] = listen(t, Config{})
		if err := comeAndGo(listeners[i], 0, buffers[0]); err != nil { // for what is set up only once
			t.Fatal(err)
		}
	}
	descriptors, goroutines := openDescriptors(t), runtime.NumGoroutine()
	began := time.Now()
	var number atomic.Int64
	var all sync.WaitGroup
	for _, l := range listeners {
		all.Go(func() {
			for !t.Failed() {
				n := int(number.Add(1))
				if n > *connections {
					return
				}
				if err := comeAndGo(l, n, buffers[n%len(buffers)]); err != nil {
					t.Errorf("connection %d: %v", n, err)
				}
			}
		})
	}
	all.Wait()
	t.Logf("%d connections in %v", *connections, time.Since(began).Round(time.Millisecond))
	goroutinesGone(t, goroutines, patience) // iWARP closes connections in the background
	testenv.Eventually(t, patience, func() error {
		if d := openDescriptors(t); d > descriptors {
			return fmt.Errorf("%d descriptors, %d before", d, descriptors)
		}
		return nil
	})
	for _, l := range listeners {
		l.Close()
	}
	expectNothingPinned(t)
}

// discardAll ends each connection that a listener accepts, until the listener is closed.
func discardAll(l *listener) {
	for {
		e, err := l.Accept()
		if err != nil {
			return
		}
		e.discard()
	}
}

// Dials are given up at random moments, also just when the peer answers. At that moment librdmacm
// changes the state of a queue pair that may be about to be destroyed.
func TestDialsGivenUpLeaveNothing(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		withoutReady(t) // their memory would stay pinned for the listeners' next connections
	}
	const dials = 60 // by each dialer
	var all sync.WaitGroup
	var connected, late atomic.Int64
	for seed := range uint64(4) {
		l := listen(t, Config{})
		began := time.Now()
		a, b, err := connect(l, Config{})
		if err != nil {
			t.Fatal(err)
		}
		usual := time.Since(began)
		a.discard()
		b.discard()
		go discardAll(l)
		all.Go(func() {
			random := rand.New(rand.NewPCG(seed, 5))
			for range dials {
				ctx, cancel := context.WithTimeout(context.Background(), time.Duration(random.Int64N(int64(2*usual))))
				e, err := Dial(ctx, netip.Addr{}, l.addrs()[0], Config{})
				switch {
				case err == nil:
					connected.Add(1)
					e.discard()
				case ctx.Err() == nil:
					t.Errorf("a dial that was not given up: %v", err)
				default:
					late.Add(1)
				}
				cancel()
			}
		})
	}
	all.Wait()
	t.Logf("%d connected, %d given up", connected.Load(), late.Load())
	if late.Load() == 0 {
		t.Error("no dial was given up")
	}
	// The acceptors notice the end by themselves.
	testenv.Eventually(t, patience, func() error { return stillPinned(t) })
}

func openDescriptors(t testing.TB) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}
