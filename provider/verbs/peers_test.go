package verbs

import (
	"testing"
	"time"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
)

// Endpoints that only poll, for tests of what one of them, the peer a, does to
// the other, b.

// pair makes a connection whose ends only poll. b exposes, a is the peer.
func pair(t testing.TB, l *Listener, cfg Config) (a, b *Endpoint) {
	t.Helper()
	a, b, err := connect(l, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.Abort)
	t.Cleanup(b.Abort)
	a.Start(never{})
	b.Start(never{})
	mustHave(t, a, cfg)
	mustHave(t, b, cfg)
	return a, b
}

// breathe lets the emulated device have the processor between two looks.
func breathe() { time.Sleep(50 * time.Microsecond) }

// event polls for the next event.
func event(t testing.TB, e *Endpoint) (ev session.Event) {
	t.Helper()
	for began := time.Now(); !e.Poll(&ev); breathe() {
		if e.Err() != nil || time.Since(began) > patience {
			t.Fatalf("no event: %v", e.Err())
		}
	}
	return ev
}

// say sends a message and receives it.
func say(t testing.TB, from, to *Endpoint) {
	t.Helper()
	from.Commit(len(from.Reserve(16, 16, true)))
	if ev := event(t, to); ev.Kind != session.Message {
		t.Fatalf("event of kind %d", ev.Kind)
	}
	to.Drop()
}

// expose gives a access to memory of b.
func expose(t testing.TB, a, b *Endpoint, mem []byte, rights session.Rights) session.Descriptor {
	t.Helper()
	d, err := b.Expose(mem, rights)
	if err != nil {
		t.Fatal(err)
	}
	say(t, b, a)
	return d
}

// read reads by a descriptor, as a peer may that thinks nothing of its length.
func read(t testing.TB, a *Endpoint, into []byte, d session.Descriptor) error {
	t.Helper()
	d.Len = max(d.Len, uint64(len(into)))
	if err := a.Read(into, d, 0, 1); err != nil {
		t.Fatal(err)
	}
	return event(t, a).Err
}

func write(t testing.TB, a *Endpoint, from []byte, d session.Descriptor) error {
	t.Helper()
	d.Len = max(d.Len, uint64(len(from)))
	if err := a.Write(from, d, 0, 1); err != nil {
		t.Fatal(err)
	}
	err := event(t, a).Err
	if err == nil && testenv.Device() == "siw" { // complete when TCP has it
		err = endOf(t, a)
	}
	return err
}

// endOf waits for the end of a connection.
func endOf(t testing.TB, e *Endpoint) error {
	t.Helper()
	for began := time.Now(); e.Err() == nil; breathe() {
		e.Poll(new(session.Event))
		if time.Since(began) > patience {
			t.Fatal("the connection does not end")
		}
	}
	return e.Err()
}
