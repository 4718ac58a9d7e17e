//go:build unix

package sanconn_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

// eachEndpoint runs a test on each carrier.
func eachEndpoint(t *testing.T, f func(*testing.T, session.Limits)) {
	for _, e := range carriers {
		t.Run(e.name, func(t *testing.T) { f(t, e.limits) })
	}
}

// After its deadline Peek fails, even if there are bytes that it has returned before.
func TestPeekBehindTheDeadline(t *testing.T) {
	eachEndpoint(t, func(t *testing.T, l session.Limits) {
		a, b := pipe(t, l, nil)
		a.Write([]byte("lent"))
		if got, err := b.Peek(); string(got) != "lent" || err != nil {
			t.Fatalf("%q, %v", got, err)
		}
		b.SetReadDeadline(time.Unix(1, 0))
		if got, err := b.Peek(); got != nil || !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("behind the deadline: %q, %v", got, err)
		}
		b.SetReadDeadline(time.Time{})
		if got, err := b.Peek(); string(got) != "lent" || err != nil {
			t.Errorf("%q, %v", got, err)
		}
	})
}

// Reserved room is filled at one end, and the bytes are lent at the other.
func TestReserveAndPeek(t *testing.T) {
	eachEndpoint(t, func(t *testing.T, l session.Limits) {
		a, b := pipe(t, l, nil)
		room, err := a.Reserve(100)
		if err != nil || len(room) == 0 || len(room) > 100 {
			t.Fatal(len(room), err)
		}
		copy(room, "lent")
		if err := a.Commit(4); err != nil {
			t.Fatal(err)
		}
		b.SetDeadline(time.Now().Add(patience))
		p, err := b.Peek()
		if string(p) != "lent" || err != nil {
			t.Errorf("%q, %v", p, err)
		}
		if err := b.Discard(len(p)); err != nil {
			t.Error(err)
		}
		a.CloseWrite()
		if p, err := b.Peek(); p != nil || err != io.EOF {
			t.Errorf("at the end: %q, %v", p, err)
		}
		if byTCP(a) {
			return
		}
		if st := a.Stats(); st.LentBytesSent != 4 || st.BytesSent != 4 {
			t.Errorf("sent: %+v", st)
		}
		if st := b.Stats(); st.LentBytesReceived != 4 || st.BytesReceived != 4 {
			t.Errorf("received: %+v", st)
		}
	})
}

// Errors of lent memory are like those of Read and Write.
func TestErrorsOfLentMemory(t *testing.T) {
	onSession, _ := pipe(t, session.Limits{}, nil)
	onTCP, peer, _ := onTCPPair(t, newconn.Config{})
	t.Run("session", func(t *testing.T) { wantErrorsOfLentMemory(t, onSession) })
	t.Run("TCP", func(t *testing.T) {
		sendUnread(t, peer, onTCP)
		lent, err := onTCP.Peek()
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range []int{-1, len(lent) + 1} {
			if err := onTCP.Discard(n); !errors.Is(err, sanconn.ErrTooMuch) {
				t.Errorf("Discard of %d of %d: %v", n, len(lent), err)
			}
		}
		if err := onTCP.Discard(len(lent)); err != nil {
			t.Fatal(err)
		}
		wantErrorsOfLentMemory(t, onTCP)
	})
}

func wantErrorsOfLentMemory(t *testing.T, a *sanconn.Conn) {
	if err := a.Commit(1); !errors.Is(err, sanconn.ErrNotReserved) {
		t.Errorf("Commit without Reserve: %v", err)
	}
	if err := a.Discard(1); !errors.Is(err, sanconn.ErrNotReserved) {
		t.Errorf("Discard without Peek: %v", err)
	}
	if err := a.Discard(0); err != nil {
		t.Errorf("Discard of nothing: %v", err)
	}
	for _, sign := range []int{1, -1} {
		room, err := a.Reserve(5)
		if err != nil {
			t.Fatal(err)
		}
		if n := sign * (len(room) + 1); !errors.Is(a.Commit(n), sanconn.ErrTooMuch) {
			t.Errorf("Commit of %d of %d: no error", n, len(room))
		}
	}
	past := time.Now().Add(-time.Second)
	a.SetDeadline(past)
	wantOp := func(what string, err error, op string, want error) {
		t.Helper()
		var e *net.OpError
		if !errors.Is(err, want) || !errors.As(err, &e) || e.Op != op {
			t.Errorf("%s: %v", what, err)
		}
	}
	_, err := a.Reserve(1)
	wantOp("Reserve behind its deadline", err, "write", os.ErrDeadlineExceeded)
	_, err = a.Peek()
	wantOp("Peek behind its deadline", err, "read", os.ErrDeadlineExceeded)
	a.SetDeadline(time.Time{})
	if _, err := a.Reserve(5); err != nil {
		t.Fatal(err)
	}
	a.Close()
	wantOp("Commit after Close", a.Commit(1), "write", net.ErrClosed)
	_, err = a.Reserve(1)
	wantOp("Reserve after Close", err, "write", net.ErrClosed)
	_, err = a.Peek()
	wantOp("Peek after Close", err, "read", net.ErrClosed)
}

// The bytes of a Write, or of another Reserve, follow those of an open loan, and a deadline ends the
// wait for it.
func TestAWriteWaitsForCommit(t *testing.T) {
	eachEndpoint(t, func(t *testing.T, l session.Limits) {
		a, b := pipe(t, l, nil)
		wantAWriteToWaitForCommit(t, a, b)
	})
	t.Run("TCP", func(t *testing.T) {
		a, b, _ := onTCPPair(t, newconn.Config{})
		wantAWriteToWaitForCommit(t, a, b)
	})
}

func wantAWriteToWaitForCommit(t *testing.T, a, b *sanconn.Conn) {
	room, err := a.Reserve(3)
	if err != nil {
		t.Fatal(err)
	}
	a.SetWriteDeadline(time.Now().Add(10 * time.Millisecond))
	if n, err := a.Write([]byte("late")); n != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Write during a loan: %d, %v", n, err)
	}
	if _, err := a.Reserve(3); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Reserve during a loan: %v", err)
	}
	a.SetWriteDeadline(time.Time{})
	time.AfterFunc(10*time.Millisecond, func() { a.SetWriteDeadline(time.Unix(1, 0)) })
	if n, err := a.Write([]byte("late")); n != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Write whose deadline comes while it waits: %d, %v", n, err)
	}
	a.SetWriteDeadline(time.Now().Add(patience))
	done := make(chan error, 1)
	go func() {
		_, err := a.Write([]byte(" behind"))
		a.CloseWrite()
		done <- err
	}()
	if err := a.Commit(copy(room, "it ")); err != nil {
		t.Fatal(err)
	}
	b.SetDeadline(time.Now().Add(patience))
	got, err := io.ReadAll(b)
	if err := errors.Join(err, <-done); err != nil || !bytes.Equal(got, []byte("it  behind")) {
		t.Errorf("%q, %v", got, err)
	}
}

// Reserve after CloseWrite fails as a Write does, on each carrier.
func TestReserveBehindCloseWrite(t *testing.T) {
	eachEndpoint(t, func(t *testing.T, l session.Limits) {
		a, _ := pipe(t, l, nil)
		if err := a.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if _, err := a.Reserve(100); !errors.Is(err, syscall.EPIPE) {
			t.Errorf("%v, want EPIPE", err)
		}
		a.SetWriteDeadline(time.Unix(1, 0))
		if _, err := a.Reserve(100); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("behind its deadline: %v", err)
		}
	})
}

// Room that was reserved on the session is committed there, or the Commit fails, even if CloseWrite is
// called in between and the connection goes back to TCP. Nothing waits for ever.
func TestCommitBehindCloseWriteWhileItLeaves(t *testing.T) {
	for _, leavesFirst := range []bool{false, true} {
		a, b := pipe(t, session.Limits{}, nil)
		room, err := b.Reserve(5)
		if err != nil {
			t.Fatal(err)
		}
		var ends sync.WaitGroup
		shut := func() { ends.Go(func() { b.CloseWrite() }) }
		if !leavesFirst {
			shut()
			ends.Wait()
		}
		back := make(chan error, 1)
		go func() { back <- sanconn.LeaveSAN(b) }()
		awaitLeaving(t, b)
		if leavesFirst {
			shut()
			testenv.Eventually(t, patience, func() error {
				if !newconn.HandleOf(b).Shut() {
					return errors.New("CloseWrite has not begun")
				}
				return nil
			})
		}
		b.Commit(copy(room, "room")) // CloseWrite may have made it fail
		if err := <-back; err != nil {
			t.Errorf("leaves first: %v: %v", leavesFirst, err)
		}
		ends.Wait()
		a.SetReadDeadline(time.Now().Add(patience))
		if got, err := io.ReadAll(a); err != nil || len(got) > 0 && string(got) != "room" {
			t.Errorf("%q, %v", got, err)
		}
	}
}

// A Commit that its deadline ends on TCP counts the bytes that have been sent. Copies from files and
// sockets that a move or the way back has made commit on TCP do so, too.
func TestCommitCountsWhatWentByTCP(t *testing.T) {
	a, b, err := newPair(newconn.Config{}, newconn.Config{})
	if err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, a, b)
	a.SetWriteBuffer(4 << 10)
	b.SetReadBuffer(4 << 10)
	room, err := a.Reserve(64 << 10) // a little more than the window has room for
	if err != nil {
		t.Fatal(err)
	}
	sent, ended := 0, make(chan error, 1)
	go func() {
		var err error
		sent, err = sanconn.CommitSent(a, len(room))
		ended <- err
	}()
	b.SetReadDeadline(time.Now().Add(patience))
	if _, err := b.Read(make([]byte, 1)); err != nil { // a part has gone, and the rest waits
		t.Fatal(err)
	}
	a.SetWriteDeadline(time.Unix(1, 0))
	if err := <-ended; !errors.Is(err, os.ErrDeadlineExceeded) || sent == 0 || sent == len(room) {
		t.Errorf("%d of %d bytes were sent: not a part; %v", sent, len(room), err)
	}
	if err := a.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if n, err := io.Copy(io.Discard, b); err != nil || 1+n != int64(sent) {
		t.Errorf("%d bytes came, %v; %d were counted", 1+n, err, sent)
	}
}

// Close closes TCP even if the program never ends what it was lent.
func TestCloseWithLentMemory(t *testing.T) {
	for name, lend := range map[string]func(*sanconn.Conn) ([]byte, error){
		"Peek":    (*sanconn.Conn).Peek,
		"Reserve": func(c *sanconn.Conn) ([]byte, error) { return c.Reserve(100) },
	} {
		t.Run(name, func(t *testing.T) {
			eachEndpoint(t, func(t *testing.T, l session.Limits) {
				a, b := pipe(t, l, nil)
				a.Write([]byte("lent"))
				b.SetDeadline(time.Now().Add(patience))
				if _, err := lend(b); err != nil {
					t.Fatal(err)
				}
				b.Close()
				testenv.Eventually(t, patience, func() error {
					if err := newconn.HandleOf(b).TCP().SetNoDelay(true); !errors.Is(err, net.ErrClosed) {
						return fmt.Errorf("TCP is open: %v", err)
					}
					return nil
				})
			})
		})
	}
}
