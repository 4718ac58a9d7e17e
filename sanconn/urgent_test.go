package sanconn_test

import (
	"context"
	"errors"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

// On TCP a WriteUrgent waits until the connection has moved, at most until the write deadline, or for a
// second if there is none.
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
	if err := sanconn.AwaitUrgent(time.Now(), a); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("its own time is over as well: %v", err)
	}
	if err := within(t, awaitUrgent(a)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("it has an hour: %v", err)
	}
}

// A WriteUrgent begins only one move: if an attempt fails meanwhile, the next one is due only after more
// use of the connection.
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

// failing is using in which each attempt has failed at once.
type failing struct{ using }

func (f failing) Used(h newconn.Handle, urgent bool) {
	f.using.Used(h, urgent)
	h.CallUse(1 << 20)
}

// Urgent data that is to be sent while the connection goes back to TCP makes it move again.
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
	if _, err := a.Peek(); err != nil { // the way back waits for the end of this loan
		t.Fatal(err)
	}
	sanconn.Starve(b)
	awaitLeaving(t, a)
	testenv.Eventually(t, patience, func() error { // before that, urgent data would go by the session
		if a.Provider() != "tcp" {
			return errors.New("its Writes have not been taken from the session")
		}
		return nil
	})
	before := used.Load()
	urgent := make(chan error, 1)
	go func() {
		_, err := a.WriteUrgent([]byte("!"))
		urgent <- err
	}()
	a.Discard(1)
	if err := <-urgent; !errors.Is(err, errors.ErrUnsupported) { // nothing moves the connection
		t.Error(err)
	}
	if used.Load() == before {
		t.Error("no move has begun")
	}
}

// Urgent data that has come can be read even after either end has gone back to TCP.
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
		awaitLeft(t, b)
		select {
		case <-b.Urgent(): // even on TCP, where no urgent data comes
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

// awaitUrgent waits as WriteUrgent does, but for up to an hour, in the background.
func awaitUrgent(a *sanconn.Conn) <-chan error {
	done := make(chan error, 1)
	go func() { done <- sanconn.AwaitUrgent(time.Now().Add(time.Hour), a) }()
	return done
}

func within(t *testing.T, done <-chan error) error {
	t.Helper()
	select {
	case err := <-done:
		return err
	case <-time.After(patience):
		t.Fatal("it waits")
		return nil
	}
}

// A WriteUrgent waits after both ends have agreed until all bytes of TCP have been read, but not longer
// than until the session has ended or Close is called.
func TestWhatUrgentDataWaitsFor(t *testing.T) {
	for _, what := range []string{"read", "killed", "closed"} {
		a, b, err := newPair(newconn.Config{}, newconn.Config{})
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		defer b.Close()
		if _, err := b.Write([]byte("by TCP")); err != nil {
			t.Fatal(err)
		}
		ea, eb := twin.Pair(twin.Config{})
		if err := movePair(t.Context(), a, b, ea, eb, sessions{}); err != nil {
			t.Fatal(err)
		}
		done := awaitUrgent(a)
		switch what {
		case "read":
			if _, err := a.Read(make([]byte, 100)); err != nil {
				t.Fatal(err)
			}
			if err := within(t, done); err != nil {
				t.Errorf("%s: %v", what, err)
			}
		case "killed":
			eb.Kill()
			if err := within(t, done); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("%s: %v", what, err)
			}
		case "closed":
			a.Close()
			if err := within(t, done); !errors.Is(err, net.ErrClosed) {
				t.Errorf("%s: %v", what, err)
			}
		}
	}
	a, b, err := newPair(newconn.Config{}, newconn.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	done := awaitUrgent(a) // on TCP
	a.Close()
	if err := within(t, done); !errors.Is(err, net.ErrClosed) {
		t.Errorf("closed on TCP: %v", err)
	}
}

// WriteUrgent returns the error of a session that cannot send urgent data any more.
func TestUrgentDataOnASessionThatHasEnded(t *testing.T) {
	a, _ := pipe(t, session.Limits{}, nil)
	if err := a.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { _, err := a.WriteUrgent([]byte("!")); done <- err }()
	if err := within(t, done); !errors.Is(err, syscall.EPIPE) || errors.Is(err, errors.ErrUnsupported) {
		t.Error(err)
	}
}

// Urgent data that comes after another move replaces what was kept from before.
func TestUrgentDataBehindAnotherMove(t *testing.T) {
	a, b := pipe(t, session.Limits{}, nil)
	if _, err := a.WriteUrgent([]byte("old")); err != nil {
		t.Fatal(err)
	}
	if err := sanconn.LeaveSAN(a); err != nil {
		t.Fatal(err)
	}
	awaitLeft(t, b)
	ea, eb := twin.Pair(twin.Config{})
	if err := movePair(t.Context(), a, b, ea, eb, sessions{}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := newconn.HandleOf(a).Moved(ctx); err != nil { // otherwise the move might take longer than WriteUrgent waits
		t.Fatal(err)
	}
	if _, err := a.WriteUrgent([]byte("new")); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Write([]byte("behind it")); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Read(make([]byte, 100)); err != nil {
		t.Fatal(err)
	}
	p := make([]byte, sanconn.MaxUrgent)
	if n, err := b.ReadUrgent(p); string(p[:n]) != "new" || err != nil {
		t.Errorf("%q, %v", p[:n], err)
	}
	if n, err := b.ReadUrgent(p); err != sanconn.ErrNoUrgent {
		t.Errorf("%q, %v", p[:n], err)
	}
}
