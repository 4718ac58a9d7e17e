package verbs

import (
	"sync"
	"testing"
	"time"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
)

// Endpoints without sessions, for tests of what one of them, the peer a, does to the other, b.

// pair makes a connection, in which b exposes memory and a is the peer.
func pair(t testing.TB, l *listener, cfg Config) (a, b *Endpoint) {
	t.Helper()
	a, b, err := connect(l, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.discard)
	t.Cleanup(b.discard)
	begin(a)
	begin(b)
	mustHave(t, a, cfg, l.windows)
	mustHave(t, b, cfg, l.windows)
	return a, b
}

// crowd makes n connections. all has both endpoints of each, one after the other.
func crowd(t testing.TB, l *listener, n int) (all []*Endpoint) {
	t.Helper()
	for range n {
		a, b := pair(t, l, l.cfg)
		all = append(all, a, b)
	}
	return all
}

// woken is a Waker that holds a token after Wake.
type woken chan struct{}

func (w woken) Wake(session.Events) {
	select {
	case w <- struct{}{}:
	default:
	}
}

// begin starts an endpoint, so that until can wait for it.
func begin(e *Endpoint) { e.Start(make(woken, 1)) }

// until calls done each time that something has happened to the endpoint, until done returns true or the
// connection has ended. It returns the last result of done.
func until(e *Endpoint, done func() bool) bool {
	late := time.NewTimer(patience)
	defer late.Stop()
	for armed := false; !done(); {
		switch {
		case e.Err() != nil:
			return done() // the event may have come between the call and the end
		case !armed:
			armed = true
			e.Arm(session.RecvReady | session.SendReady)
			continue
		}
		armed = false
		select {
		case <-(*e.q.waker.Load()).(woken):
		case <-late.C:
			return false
		}
	}
	return true
}

// event waits for the next event.
func event(t testing.TB, e *Endpoint) (ev session.Event) {
	t.Helper()
	if !until(e, func() bool { return e.Poll(&ev) }) {
		t.Fatalf("no event: %v", e.Err())
	}
	return ev
}

// say sends a message, and receives it.
func say(t testing.TB, from, to *Endpoint) {
	t.Helper()
	from.CommitControl(len(from.ReserveControl(16)))
	if ev := event(t, to); ev.Kind != session.Message {
		t.Fatalf("event of kind %d", ev.Kind)
	}
	to.Drop()
}

// chat sends messages in both directions on all connections of a crowd at the same time.
func chat(t testing.TB, all []*Endpoint, count int) {
	t.Helper()
	var wg sync.WaitGroup
	for i, e := range all {
		peer := all[i^1]
		wg.Go(func() {
			for n := range count {
				// At most one message ahead: a session's credits ensure as much.
				var room []byte
				if !until(e, func() bool { room = e.ReserveControl(64); return room != nil }) {
					t.Errorf("connection %d, no room for message %d: %v", i/2, n, e.Err())
					return
				}
				room[0] = byte(n)
				e.CommitControl(64)
				var ev session.Event
				if !until(e, func() bool { return e.Poll(&ev) }) {
					t.Errorf("connection %d, message %d: %v, the peer %v", i/2, n, e.Err(), peer.Err())
					return
				}
				if ev.Msg[0] != byte(n) {
					t.Errorf("connection %d: message %d came instead of %d", i/2, ev.Msg[0], n)
				}
				e.Drop()
			}
		})
	}
	wg.Wait()
}

// expose exposes memory of b to a.
func expose(t testing.TB, a, b *Endpoint, mem []byte, rights session.Rights) session.Descriptor {
	t.Helper()
	d, err := b.mem.Expose(mem, rights)
	if err != nil {
		t.Fatal(err)
	}
	say(t, b, a)
	return d
}

// read reads by a descriptor as a hostile peer may, without regard to its length.
func read(t testing.TB, a *Endpoint, into []byte, d session.Descriptor) error {
	t.Helper()
	d.Len = max(d.Len, uint64(len(into)))
	if err := a.mem.Read(into, d, 0, 1); err != nil {
		t.Fatal(err)
	}
	return event(t, a).Err
}

func write(t testing.TB, a *Endpoint, from []byte, d session.Descriptor) error {
	t.Helper()
	d.Len = max(d.Len, uint64(len(from)))
	if err := a.mem.Write(from, d, 0, 1); err != nil {
		t.Fatal(err)
	}
	err := event(t, a).Err
	if err == nil && testenv.Device() == "siw" { // siw completes it when TCP has the bytes
		err = endOf(t, a)
	}
	return err
}

// endOf waits for the end of a connection.
func endOf(t testing.TB, e *Endpoint) error {
	t.Helper()
	until(e, func() bool {
		for e.Poll(new(session.Event)) {
		}
		return false
	})
	if e.Err() == nil {
		t.Fatal("the connection does not end")
	}
	return e.Err()
}
