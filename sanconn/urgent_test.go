package sanconn_test

import (
	"context"
	"errors"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

// On TCP a WriteUrgent waits for the connection to move until the write deadline at most, and
// without one for a second.
func TestUrgentDeadlineOnTCP(t *testing.T) {
	a, _, _ := onTCPPair(t, newconn.Config{})
	if a.Provider() != "tcp" {
		t.Fatalf("it is on %s", a.Provider())
	}
	a.SetWriteDeadline(time.Time{})
	if n, err := a.WriteUrgent([]byte("!")); n != 0 || !errors.Is(err, errors.ErrUnsupported) || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("without a deadline: %d, %v", n, err)
	}
	for _, within := range []time.Duration{-time.Second, time.Millisecond} {
		a.SetWriteDeadline(time.Now().Add(within))
		n, err := a.WriteUrgent([]byte("!"))
		var oe *net.OpError
		if n != 0 || !errors.As(err, &oe) || oe.Op != "write" || !oe.Timeout() || !errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("deadline within %v: %d, %v", within, n, err)
		}
	}
	for name, end := range map[string]time.Time{"its own time is over as well": time.Now(), "it has all of its own time": time.Now().Add(time.Hour)} {
		late := make(chan error, 1)
		go func() { late <- sanconn.AwaitUrgent(end, a) }()
		select {
		case err := <-late:
			if !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("%s: %v", name, err)
			}
		case <-time.After(patience):
			t.Fatalf("%s: the deadline does not end it", name)
		}
	}
}

// A WriteUrgent begins one move: an attempt that fails meanwhile, and is to be made again behind more use, is
// not made again by it.
func TestUrgentDataBeginsOneMove(t *testing.T) {
	var used atomic.Int32
	life := failing{using{ending{nil, false}, func() { used.Add(1) }}}
	a, b, err := newPair(newconn.Config{Threshold: 1 << 20, Life: life}, newconn.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	defer b.Close()
	if err := sanconn.AwaitUrgent(time.Now().Add(10*time.Millisecond), a); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	if n := used.Load(); n != 1 {
		t.Errorf("%d moves have begun", n)
	}
}

// failing is using where each attempt has failed at once.
type failing struct{ using }

func (f failing) Used(h newconn.Handle, urgent bool) {
	f.using.Used(h, urgent)
	h.CallUse(1 << 20)
}

// Urgent data that is to be sent while the connection goes back to TCP has it move again.
func TestUrgentDataWhileItGoesBack(t *testing.T) {
	var used atomic.Int32
	life := using{ending{nil, false}, func() { used.Add(1) }}
	a, b, err := newPair(newconn.Config{Threshold: 1, Life: life}, newconn.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	defer b.Close()
	a.Write([]byte("12"))
	b.Read(make([]byte, 2))
	ea, eb := twin.Pair(twin.Config{})
	if err := movePair(t.Context(), a, b, ea, eb, sessions{}); err != nil {
		t.Fatal(err)
	}
	b.Write([]byte("x"))
	if _, err := a.Peek(); err != nil { // which the way back waits for
		t.Fatal(err)
	}
	sanconn.Starve(b)
	awaitLeaving(t, a)
	before := used.Load()
	urgent := make(chan error, 1)
	go func() {
		_, err := a.WriteUrgent([]byte("!"))
		urgent <- err
	}()
	a.Discard(1)
	if err := <-urgent; !errors.Is(err, errors.ErrUnsupported) { // nobody moves it
		t.Error(err)
	}
	if used.Load() == before {
		t.Error("no move has begun")
	}
}

// Urgent data that has come can be read when either end has gone back to TCP.
func TestUrgentDataBehindTheWayBack(t *testing.T) {
	for _, l := range []session.Limits{{}, {Window: 32}} {
		a, b := pipe(t, l, nil)
		for _, text := range []string{"lost", "kept"} {
			if _, err := a.WriteUrgent([]byte(text)); err != nil {
				t.Fatal(err)
			}
		}
		if err := sanconn.LeaveSAN(a); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, patience, func() error {
			if sanconn.Leaving(b) {
				return errors.New("it leaves")
			}
			return nil
		})
		select {
		case <-b.Urgent(): // though on TCP, where else nothing comes
		default:
			t.Error("not told of urgent data")
		}
		p := make([]byte, sanconn.MaxUrgent)
		if n, err := b.ReadUrgent(p); string(p[:n]) != "kept" || err != nil {
			t.Errorf("%q, %v", p[:n], err)
		}
		if _, err := b.ReadUrgent(p); err != sanconn.ErrNoUrgent {
			t.Error(err)
		}
		if b.Urgent() != nil {
			t.Error("told of urgent data on TCP")
		}
	}
}
