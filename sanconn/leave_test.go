//go:build unix

package sanconn_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/connpair"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

// leavesInVain returns an end that is on its way back to TCP, while the other end does not answer.
func leavesInVain(t *testing.T) (a *sanconn.Conn, file <-chan error) {
	t.Helper()
	ea, eb := twin.Pair(twin.Config{Limits: session.Limits{Window: 32}})
	a, _ = pipeOver(t, ea, eb, nil)
	ea.Cut()
	failed := make(chan error, 1)
	go func() {
		_, err := a.File()
		failed <- err
	}()
	awaitLeaving(t, a)
	return a, failed
}

// Close ends all waits for a peer that does not answer, and returns soon itself.
func TestCloseOnTheWayBack(t *testing.T) {
	a, file := leavesInVain(t)
	read, write := make(chan error, 1), make(chan error, 1)
	go func() { _, err := a.Read(make([]byte, 1)); read <- err }()
	go func() {
		var err error
		for err == nil { // the first ones may still go by the session
			_, err = a.Write(make([]byte, 1))
		}
		write <- err
	}()
	began := time.Now()
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if d := time.Since(began); d > 8*time.Second { // the session's end may take 10 s in all
		t.Errorf("Close took %v", d)
	}
	for _, c := range []<-chan error{read, write, file} {
		if err := <-c; !errors.Is(err, net.ErrClosed) {
			t.Error(err)
		}
	}
}

// A Peek or Read that has found the session, but reaches it only after a way back in vain, has to look
// again: bytes that were taken meanwhile come first, and nothing would end its loan.
func TestALateReadBehindAWayBackInVain(t *testing.T) {
	ea, eb := twin.Pair(twin.Config{Limits: session.Limits{Window: 32}})
	a, b := pipeOver(t, ea, eb, nil)
	sendUnread(t, b, a)
	if _, err := b.Reserve(1); err != nil { // so that b does not answer
		t.Fatal(err)
	}
	found := sanconn.SessionOf(a)
	failed := make(chan error, 1)
	go func() { _, err := a.File(); failed <- err }()
	testenv.Eventually(t, patience, func() error {
		if n := found.ReadPosition(); n != uint64(len("unread")) {
			return fmt.Errorf("the way back has read %d bytes", n)
		}
		return nil
	})
	eb.Kill()
	if err := <-failed; err == nil {
		t.Fatal("it has left")
	}
	if _, err := found.PeekExclusive(false); err != session.ErrTaken {
		t.Errorf("a late Peek: %v", err)
	}
	got, err := io.ReadAll(a)
	if string(got) != "unread" || !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%q, %v", got, err)
	}
}

// After a way back in vain Reads return the session's end, and not a deadline that was set before and
// has been cleared.
func TestADeadlineBehindAWayBackInVain(t *testing.T) {
	ea, eb := twin.Pair(twin.Config{Limits: session.Limits{Window: 32}})
	a, b := pipeOver(t, ea, eb, nil)
	sendUnread(t, b, a)
	if _, err := b.Reserve(1); err != nil { // so that b does not answer
		t.Fatal(err)
	}
	end := time.Now().Add(time.Second)
	a.SetReadDeadline(end)
	failed := make(chan error, 1)
	go func() { _, err := a.File(); failed <- err }()
	awaitLeaving(t, a)
	eb.Kill()
	if err := <-failed; err == nil {
		t.Fatal("it has left")
	}
	n, err := io.ReadFull(a, make([]byte, len("unread")))
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) { // on a slow machine
		t.Error(err)
	}
	a.SetReadDeadline(time.Time{})
	time.Sleep(time.Until(end.Add(50 * time.Millisecond)))
	if got, err := io.ReadAll(a); n+len(got) != len("unread") || !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%d bytes, and then %q, %v", n, got, err)
	}
}

// A connection that moves again directly after its way back moves in both directions, even if neither is
// used: the end of the way back may still hold them when both ends agree.
func TestAMoveRightBehindTheWayBack(t *testing.T) {
	a, b := pipe(t, session.Limits{}, nil)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	const times = 200                                                                 // about one in 200 runs showed the fault, with the race detector
	for began, n := time.Now(), 0; n < times && time.Since(began) < patience/6; n++ { // fewer on a slow machine
		if err := sanconn.LeaveSAN(a); err != nil {
			t.Fatal(err)
		}
		for sanconn.Leaving(b) && ctx.Err() == nil {
			runtime.Gosched()
		}
		ea, eb := twin.Pair(twin.Config{})
		if err := movePair(ctx, a, b, ea, eb, sessions{}); err != nil {
			t.Fatal(err)
		}
		for _, c := range []*sanconn.Conn{a, b} {
			if err := newconn.HandleOf(c).Moved(ctx); err != nil {
				t.Fatal(err, c.Debug())
			}
		}
	}
}

// File returns what its program has not read to the peer, even if the peer has begun to leave before, so
// that the descriptor has these bytes.
func TestFileOfAnEndThatLeavesAlready(t *testing.T) {
	a, b := pipe(t, session.Limits{}, nil)
	sendUnread(t, b, a)
	if _, err := a.Reserve(1); err != nil { // so that a does not answer yet
		t.Fatal(err)
	}
	left := make(chan error, 1)
	go func() { left <- sanconn.LeaveSAN(b) }()
	awaitLeaving(t, a)
	type result struct {
		f   *os.File
		err error
	}
	had := make(chan result, 1)
	go func() {
		f, err := a.File()
		had <- result{f, err}
	}()
	testenv.Eventually(t, patience, func() error {
		if sanconn.Users(a) == 0 {
			return errors.New("File has not begun")
		}
		return nil
	})
	a.Commit(0)
	r := <-had
	if err := errors.Join(r.err, <-left); err != nil {
		t.Fatal(err)
	}
	defer r.f.Close()
	c, err := net.FileConn(r.f)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(patience))
	got := make([]byte, len("unread"))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != "unread" {
		t.Errorf("%q, %v", got, err)
	}
}

// An operation that has found the session, but reaches it only after the way back, has to look again.
func TestALateOperationBehindAWayBack(t *testing.T) {
	for _, carrier := range carriers[2:] { // sessions from the beginning
		a, b := pipe(t, carrier.limits, nil)
		found := []*session.Session{sanconn.SessionOf(a), sanconn.SessionOf(b)}
		for _, c := range []*sanconn.Conn{a, b} {
			if err := sanconn.LeaveSAN(c); err != nil {
				t.Fatal(err)
			}
		}
		for _, s := range found {
			for name, late := range map[string]func() error{
				"Read":          func() error { _, err := s.Read(make([]byte, 1)); return err },
				"Peek":          func() error { _, err := s.Peek(); return err },
				"PeekExclusive": func() error { _, err := s.PeekExclusive(true); return err },
				"Write":         func() error { _, err := s.Write(make([]byte, 1)); return err },
				"WriteBuffers":  func() error { _, err := s.WriteBuffers([][]byte{{1}, {2}}); return err },
				"Reserve":       func() error { _, err := s.Reserve(1); return err },
				"WriteUrgent":   func() error { _, err := s.WriteUrgent([]byte{1}); return err },
			} {
				if err := late(); err != session.ErrTaken {
					t.Errorf("%s: %s: %v", carrier.name, name, err)
				}
			}
		}
		for i, c := range []*sanconn.Conn{a, b} {
			if sanconn.EndLate(c, found[i]) {
				t.Errorf("%s: CloseWrite has Writes go by the session that was left", carrier.name)
			}
		}
	}
}

// If the flush of what came back finds a reset, Reads after the way back return it.
func TestResetBehindAWayBack(t *testing.T) {
	a, b := pipe(t, session.Limits{Window: 32, CanWrite: true, MaxExpose: 16 << 20, Inbox: 8 << 10}, nil)
	newconn.HandleOf(a).TCP().SetWriteBuffer(1) // so that the flush takes long
	newconn.HandleOf(b).TCP().SetReadBuffer(1)
	a.SetDeadline(time.Now().Add(patience))
	if _, err := a.Write(make([]byte, 1<<20)); err != nil { // the send buffer and the peer's inbox have room for it
		t.Fatal(err)
	}
	if err := sanconn.LeaveSAN(b); err != nil {
		t.Fatal(err)
	}
	b.SetLinger(0)
	b.Close()
	if _, err := a.Write([]byte{1}); !errors.Is(err, syscall.EPIPE) { // after what came back
		t.Error(err)
	}
	if _, err := a.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Error(err)
	}
}

// The same for a Read that waits during the flush: the flush finds the reset, after which the Read finds
// only what looks like the end of the stream.
func TestResetWhileItFlushes(t *testing.T) {
	n := 100 // without the mend one in three to thirty runs failed
	if testing.Short() {
		n = 20
	}
	for range n {
		a, b := pipe(t, session.Limits{Window: 32, CanWrite: true, MaxExpose: 16 << 20, Inbox: 8 << 10}, nil)
		newconn.HandleOf(a).TCP().SetWriteBuffer(1)
		newconn.HandleOf(b).TCP().SetReadBuffer(1)
		a.SetDeadline(time.Now().Add(patience))
		if _, err := a.Write(make([]byte, 1<<20)); err != nil {
			t.Fatal(err)
		}
		read := make(chan error, 1)
		go func() {
			_, err := a.Read(make([]byte, 1))
			read <- err
		}()
		if err := sanconn.LeaveSAN(b); err != nil {
			t.Fatal(err)
		}
		b.SetLinger(0)
		b.Close()
		if err := <-read; !errors.Is(err, syscall.ECONNRESET) {
			t.Fatalf("Read: %v", err)
		}
		a.Close()
	}
}

// Close during a flush ends a Read, but not the flush: the peer gets what came back.
func TestCloseWhileItFlushes(t *testing.T) {
	a, b := pipe(t, session.Limits{Window: 32, CanWrite: true, MaxExpose: 16 << 20, Inbox: 8 << 10}, nil)
	newconn.HandleOf(a).TCP().SetWriteBuffer(64 << 10) // so that the flush lasts until the peer reads
	newconn.HandleOf(b).TCP().SetReadBuffer(64 << 10)
	b.SetDeadline(time.Now().Add(patience))
	sent := pattern(1 << 20)
	if _, err := a.Write(sent); err != nil {
		t.Fatal(err)
	}
	if err := sanconn.LeaveSAN(b); err != nil {
		t.Fatal(err)
	}
	read, closed := make(chan error, 1), make(chan error, 1)
	go func() { _, err := a.Read(make([]byte, 1)); read <- err }()
	testenv.Eventually(t, patience, func() error {
		if sanconn.SessionOf(a) != nil || !sanconn.Reading(a) {
			return errors.New("no Read waits in TCP")
		}
		return nil
	})
	if !sanconn.Leaving(a) {
		t.Fatal("nothing is under way")
	}
	go func() { closed <- a.Close() }()
	if err := <-read; !errors.Is(err, net.ErrClosed) {
		t.Errorf("Read: %v", err)
	}
	wantBytes(t, <-received(t, b), sent)
	if err := <-closed; err != nil {
		t.Error(err)
	}
}

// The flush of what came back has no deadline, because the program's Writes have returned. The next
// Write keeps the deadline that was set.
func TestADeadlineWhileItFlushes(t *testing.T) {
	for name, set := range map[string]bool{"set before": false, "set meanwhile": true} {
		t.Run(name, func(t *testing.T) {
			a, b := pipe(t, session.Limits{Window: 32, CanWrite: true, MaxExpose: 16 << 20, Inbox: 8 << 10}, nil)
			newconn.HandleOf(a).TCP().SetWriteBuffer(64 << 10) // so that the flush lasts until the peer reads
			newconn.HandleOf(b).TCP().SetReadBuffer(64 << 10)
			b.SetDeadline(time.Now().Add(patience))
			sent := pattern(1 << 20)
			if _, err := a.Write(sent); err != nil {
				t.Fatal(err)
			}
			if !set {
				a.SetWriteDeadline(time.Unix(1, 0))
			}
			if err := sanconn.LeaveSAN(b); err != nil {
				t.Fatal(err)
			}
			testenv.Eventually(t, patience, func() error {
				if !strings.Contains(a.Debug(), "flushing") {
					return errors.New(a.Debug())
				}
				return nil
			})
			if set {
				a.SetWriteDeadline(time.Unix(1, 0))
			}
			got := make([]byte, len(sent))
			if n, err := io.ReadFull(b, got); err != nil {
				t.Fatal(n, err)
			}
			wantBytes(t, got, sent)
			awaitLeft(t, a)
			if n, err := a.Write([]byte{1}); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("a Write behind it: %d, %v", n, err)
			}
			if n := a.Stats().BytesSent; n != uint64(len(sent)) {
				t.Errorf("%d bytes count as sent", n)
			}
		})
	}
}

// If a peer's stream ends before the position in its leave, bytes are missing, and the peer has not
// left.
func TestAPeerThatLeavesTooFew(t *testing.T) {
	p := movedByHand(t, session.Limits{}, 0, nil, func(p *byHand) {
		p.SendNote(noteAt(newconn.NoteLeave, 6))
		p.Write(make([]byte, 5))
		p.CloseWrite()
	})
	defer p.Abort()
	if err := moved(t, p.a); err != nil {
		t.Fatal(err)
	}
	if err := sanconn.LeaveSAN(p.a); err == nil {
		t.Error("it has left")
	}
	p.a.SetReadDeadline(time.Now().Add(patience))
	if got, err := io.ReadAll(p.a); len(got) > 5 || !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read %d bytes, %v", len(got), err)
	}
}

// A Read that waits in TCP for bytes that precede the session does not keep the connection from leaving
// the session.
func TestTheWayBackBesideARead(t *testing.T) {
	told := make(chan struct{})
	p := movedByHand(t, session.Limits{}, 5, nil, func(*byHand) { close(told) })
	go p.a.Read(make([]byte, 1))
	testenv.Eventually(t, patience, func() error {
		if !sanconn.Reading(p.a) {
			return errors.New("it does not read")
		}
		return nil
	})
	go sanconn.LeaveSAN(p.a)
	select {
	case <-told:
	case <-time.After(patience):
		t.Error("the peer is not told")
	}
	p.Abort()
}

// If an end that has called CloseWrite resets the connection before it has sent what came back, the
// peer's stream does not end with io.EOF. The peer's program, which has had the descriptor, finds the
// reset.
func TestResetOnTheWayBack(t *testing.T) {
	sent := pattern(3000)
	var back, cut bool
	end := time.Now().Add(patience)
	for i := 0; i < 300 || !(back && cut) && time.Now().Before(end); i++ { // some are reset at the wrong moment
		ea, eb := twin.Pair(twin.Config{MaxLatency: 100 * time.Microsecond})
		a, b := pipeOver(t, ea, eb, nil)
		b.SetDeadline(time.Now().Add(patience))
		if _, err := a.Write(sent); err != nil {
			t.Fatal(err)
		}
		a.CloseWrite()
		raw, err := b.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		var resetting sync.WaitGroup
		resetting.Go(func() {
			for !sanconn.Leaving(a) && b.Provider() != onTCP.Provider {
				runtime.Gosched()
			}
			time.Sleep(time.Duration(i%30*(1+i/30)) * 20 * time.Microsecond)
			a.SetLinger(0)
			a.Close()
		})
		back = raw.Control(func(uintptr) {}) == nil || back // fails if the reset comes first
		got, err := io.ReadAll(b)
		if err == nil && len(got) < len(sent) {
			t.Fatalf("%d bytes of %d, and io.EOF", len(got), len(sent))
		}
		cut = cut || err != nil
		resetting.Wait()
	}
	if !back || !cut {
		t.Errorf("some have gone back: %v, and some were cut: %v", back, cut)
	}
}

// A connection that was closed on its way back is not closed again when the program has forgotten it:
// Closed would be called twice.
func TestClosedOnTheWayBackIsForgotten(t *testing.T) {
	var closed, forgotten atomic.Int32
	func() {
		ea, eb := twin.Pair(twin.Config{Limits: session.Limits{Window: 32}})
		a, _, err := movedPair(t.Context(), ea, eb, sessions{}, newconn.Config{Life: ending{func() { closed.Add(1) }, false}})
		if err != nil {
			t.Fatal(err)
		}
		ea.Cut()
		failed := make(chan error, 1)
		go func() { _, err := a.File(); failed <- err }()
		awaitLeaving(t, a)
		a.SetLinger(0) // otherwise Close waits for what came back
		a.Close()
		<-failed
		runtime.AddCleanup(a, func(n *atomic.Int32) { n.Add(1) }, &forgotten)
	}()
	testenv.Eventually(t, patience, func() error {
		runtime.GC()
		if forgotten.Load() == 0 {
			return errors.New("it is held")
		}
		return nil
	})
	runtime.GC()
	if n := closed.Load(); n != 1 {
		t.Errorf("closed %d times", n)
	}
}

// Unread bytes that came back from the session make Close a reset, as unread bytes in the kernel do.
func TestCloseBehindWhatCameBack(t *testing.T) {
	for _, shut := range []bool{false, true} {
		ea, eb := twin.Pair(twin.Config{Limits: session.Limits{Window: 32}})
		a, b := pipeOver(t, ea, eb, nil)
		if _, err := a.Write([]byte("unread")); err != nil {
			t.Fatal(err)
		}
		if shut {
			b.CloseRead()
		}
		raw, err := a.SyscallConn()
		if err == nil {
			err = raw.Control(func(uintptr) {})
		}
		if err != nil {
			t.Fatal(err)
		}
		b.Close()
		if _, err := a.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("Read: %v; CloseRead before: %v", err, shut)
		}
	}
}

// Deadlines apply while the connection is on its way back.
func TestDeadlinesOnTheWayBack(t *testing.T) {
	a, _ := leavesInVain(t)
	a.SetDeadline(time.Now().Add(20 * time.Millisecond))
	if _, err := a.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Read: %v", err)
	}
	if _, err := a.Write(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Write: %v", err)
	}
	if _, err := a.Reserve(1); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Reserve: %v", err)
	}
	a.SetLinger(0) // otherwise Close waits
}

// Loans delay the way back, and nothing is lost.
func TestLoansOnTheWayBack(t *testing.T) {
	a, b := pipe(t, session.Limits{}, nil)
	a.Write([]byte("lent, unread"))
	lent, err := b.Peek()
	if err != nil {
		t.Fatal(err)
	}
	room, err := b.Reserve(5)
	if err != nil {
		t.Fatal(err)
	}
	back := make(chan error, 1)
	go func() { back <- sanconn.LeaveSAN(b) }()
	awaitLeaving(t, b)
	if err := b.Discard(len("lent,")); err != nil || string(lent) != "lent, unread" {
		t.Errorf("%q, %v", lent, err)
	}
	select {
	case err := <-back:
		t.Errorf("it did not wait for what is reserved: %v", err)
	case <-time.After(20 * time.Millisecond):
	}
	if err := b.Commit(copy(room, "room")); err != nil {
		t.Error(err)
	}
	if err := <-back; err != nil {
		t.Error(err)
	}
	a.CloseWrite()
	b.CloseWrite()
	wantBytes(t, <-received(t, b), []byte(" unread"))
	wantBytes(t, <-received(t, a), []byte("room"))
}

// Loans can be ended even if the peer has gone on the way back, and the bytes after them can be read.
func TestLoansOnTheWayBackFromAPeerThatHasGone(t *testing.T) {
	for _, reset := range []bool{false, true} {
		for _, l := range []session.Limits{{}, {Window: 32}} {
			a, b := pipeOn(t, l, nil)
			a.Write([]byte("lent, unread"))
			if _, err := b.Peek(); err != nil {
				t.Fatal(err)
			}
			room, err := b.Reserve(5)
			if err != nil {
				t.Fatal(err)
			}
			if reset {
				a.SetLinger(0)
			}
			a.Close()
			back := make(chan error, 1)
			go func() { back <- sanconn.LeaveSAN(b) }()
			awaitLeaving(t, b)
			if err := b.Commit(copy(room, "room")); errors.Is(err, sanconn.ErrNotReserved) {
				t.Error(err)
			}
			if err := b.Discard(len("lent,")); err != nil {
				t.Fatal(err)
			}
			if err := <-back; (err != nil) != reset {
				t.Errorf("reset: %v: %v", reset, err)
			}
			b.SetReadDeadline(time.Now().Add(patience))
			got, err := io.ReadAll(b)
			if string(got) != " unread" || errors.Is(err, syscall.ECONNRESET) != reset {
				t.Errorf("reset: %v: read %q, %v", reset, got, err)
			}
		}
	}
}

// Loans of a connection that is closed on its way back are given back to the session, which would never
// end otherwise.
func TestLoansOfAConnectionThatIsClosedOnTheWayBack(t *testing.T) {
	for name, lend := range map[string]func(c *sanconn.Conn) (giveBack func() error, err error){
		"Peek": func(c *sanconn.Conn) (func() error, error) {
			_, err := c.Peek()
			return func() error { return c.Discard(1) }, err
		},
		"Reserve": func(c *sanconn.Conn) (func() error, error) {
			_, err := c.Reserve(1)
			return func() error { return c.Commit(1) }, err
		},
	} {
		ea, eb := twin.Pair(twin.Config{})
		a, b := pipeOver(t, ea, eb, nil)
		a.Write([]byte("lent"))
		giveBack, err := lend(b)
		if err != nil {
			t.Fatal(err)
		}
		s := sanconn.SessionOf(b)
		go sanconn.LeaveSAN(b)
		awaitLeaving(t, b)
		b.SetLinger(0) // or Close waits
		b.Close()
		awaitLeft(t, b) // until nothing waits for the loan
		if err := giveBack(); errors.Is(err, sanconn.ErrNotReserved) {
			t.Errorf("%s: %v", name, err)
		}
		select {
		case <-s.Closed():
		case <-time.After(patience):
			t.Errorf("%s: the session does not end", name)
		}
	}
}

// The end whose peer leaves keeps what its program has not read. Its descriptor would lack these bytes,
// so File fails.
func TestTheAskedEndKeepsWhatIsUnread(t *testing.T) {
	a, b := pipe(t, session.Limits{}, nil)
	a.Write([]byte("unread"))
	if err := sanconn.LeaveSAN(a); err != nil {
		t.Fatal(err)
	}
	a.Write([]byte(" behind"))
	testenv.Eventually(t, patience, func() error {
		if sanconn.Leaving(b) {
			return errors.New("the other end is still leaving")
		}
		return nil
	})
	if _, err := b.File(); err == nil {
		t.Error("there is a descriptor that lacks bytes")
	}
	ea, eb := twin.Pair(twin.Config{})
	var stays *session.Unavailable
	if err := movePair(t.Context(), a, b, ea, eb, sessions{}); !errors.As(err, &stays) || stays.Reason != session.ReasonStays {
		t.Errorf("it moves, or has another reason: %v", err)
	}
	a.CloseWrite()
	wantBytes(t, <-received(t, b), []byte("unread behind"))
	f, err := b.File()
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
}

// A connection whose session lacks memory goes back to TCP, with all bytes in order, and may move again.
// One that has had no byte on TCP does not go back, nor one that is closed.
func TestAStarvingConnectionGoesBack(t *testing.T) {
	a, b, err := newPair(newconn.Config{}, newconn.Config{})
	if err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, a, b)
	read := func(c *sanconn.Conn, want string) {
		t.Helper()
		got := make([]byte, len(want))
		c.SetReadDeadline(time.Now().Add(patience))
		if _, err := io.ReadFull(c, got); err != nil || string(got) != want {
			t.Fatalf("read %q, %v, want %q", got, err, want)
		}
	}
	move := func() {
		t.Helper()
		ea, eb := twin.Pair(twin.Config{})
		if err := movePair(t.Context(), a, b, ea, eb, sessions{}); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, patience, func() error {
			if a.Provider() == "tcp" || b.Provider() == "tcp" {
				return errors.New("it has not moved")
			}
			return nil
		})
	}
	move()
	sanconn.Starve(a)
	if sanconn.Leaving(a) {
		t.Fatal("it leaves, and has had no byte on TCP")
	}
	if err := sanconn.LeaveSAN(a); err != nil {
		t.Fatal(err)
	}
	a.Write([]byte("by TCP, "))
	read(b, "by TCP, ")
	move()
	a.Write([]byte("by the session, "))
	b.Write([]byte("unread"))
	sanconn.Starve(a)
	for _, c := range []*sanconn.Conn{a, b} {
		testenv.Eventually(t, patience, func() error {
			if c.Provider() != "tcp" || sanconn.Leaving(c) {
				return errors.New("it has not left")
			}
			return nil
		})
	}
	a.Write([]byte("by TCP, "))
	read(b, "by the session, by TCP, ")
	read(a, "unread")
	move()
	a.Write([]byte("by a session"))
	read(b, "by a session")
	a.Close()
	sanconn.Starve(a)
	if sanconn.Leaving(a) {
		t.Error("it leaves, and is closed")
	}
}

// A peer that has closed does not answer, and may have bytes that wait until some were read here. File
// fails at once, and nothing is lost.
func TestTheWayBackFromAPeerThatHasClosed(t *testing.T) {
	ea, eb := twin.Pair(twin.Config{Limits: session.Limits{Window: 32, CanWrite: true, MaxExpose: 16 << 20, Inbox: 8 << 10}})
	a, b, err := movedPair(t.Context(), ea, eb, sessions{Acceptor: session.Config{ReceiveBudget: 64 << 10}})
	if err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, b)
	sent := bytes.Repeat([]byte("waiting "), 64<<10)
	if _, err := a.Write(sent); err != nil {
		t.Fatal(err)
	}
	closed := make(chan error, 1)
	go func() { closed <- a.Close() }()
	testenv.Eventually(t, patience, func() error {
		if _, err := a.Write(nil); !errors.Is(err, net.ErrClosed) {
			return errors.New("it is not closed")
		}
		return nil
	})
	left := sanconn.SessionOf(b)
	began := time.Now()
	if _, err := b.File(); err == nil || errors.Is(err, syscall.ETIMEDOUT) {
		t.Errorf("after %v: %v", time.Since(began), err)
	}
	wantBytes(t, <-received(t, b), sent)
	if err := <-closed; err != nil {
		t.Error(err)
	}
	f, err := b.File()
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	select {
	case <-left.Closed():
	case <-time.After(patience):
		t.Error("the session is not given back")
	}
}

// The end of a peer that has closed is found before its begin, which has the position in TCP's stream
// after which its bytes come.
func TestTheWayBackFromAPeerWhoseBeginIsLate(t *testing.T) {
	a, b, err := newPair(newconn.Config{}, newconn.Config{})
	if err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, a, b)
	ea, eb := twin.Pair(twin.Config{})
	ended := make(chan struct{})
	go takeLate(t, b, eb, ended)
	if _, err := a.Write([]byte("by TCP, ")); err != nil {
		t.Fatal(err)
	}
	if err := connpair.Propose(t.Context(), a, ea, session.Config{}, nil); err != nil {
		t.Fatal(err)
	}
	a.Write([]byte("and by the session"))
	a.Close()
	time.AfterFunc(50*time.Millisecond, func() { close(ended) })
	if _, err := b.File(); err == nil {
		t.Error("the descriptor has what came by the session")
	}
	<-ended
	wantBytes(t, <-received(t, b), []byte("by TCP, and by the session"))
}

// A peer that goes on writing before it finds that this end leaves gets no more room until then. With
// all the room that it needs it could close without an answer, and then wait in vain until the rest is
// read.
func TestTheWayBackFromAPeerThatWritesOn(t *testing.T) {
	defer sanconn.SetAnswerTime(time.Minute)()
	a, b, err := newPair(newconn.Config{}, newconn.Config{})
	if err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, a, b)
	ea, eb := twin.Pair(twin.Config{Limits: session.Limits{Window: 32, CanWrite: true, MaxExpose: 16 << 20, Inbox: 8 << 10}})
	found := make(chan struct{})
	go takeLate(t, b, eb, found)
	if err := connpair.Propose(t.Context(), a, ea, session.Config{ReceiveBudget: 64 << 10}, nil); err != nil {
		t.Fatal(err)
	}
	sent := pattern(7 << 20) // the room is a little more than 4 MiB, and as much again if that is read
	wrote := make(chan error, 1)
	go func() {
		_, err := b.Write(sent)
		wrote <- errors.Join(err, b.Close())
	}()
	go func() { // the peer gets this end's notes as soon as it has to wait
		defer close(found)
		awaitLeaving(t, a)
		var sent uint64
		var since time.Time
		if err := testenv.Await(patience, func() error {
			if n := b.Stats().BytesSent; n != sent {
				sent, since = n, time.Now()
			}
			if sent == 0 || time.Since(since) < time.Second/2 { // no event shows that it gets no room
				return fmt.Errorf("the peer still writes, %d bytes so far", sent)
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
	}()
	if err := sanconn.LeaveSAN(a); err != nil {
		t.Error(err)
	}
	wantBytes(t, <-received(t, a), sent)
	if err := <-wrote; err != nil {
		t.Error(err)
	}
}

// A peer that has closed, and has more to send than there is room for, can send the rest.
func TestTheWayBackFromAPeerThatHasClosedWithMoreToSend(t *testing.T) {
	a, b, err := newPair(newconn.Config{}, newconn.Config{})
	if err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, a, b)
	ea, eb := twin.Pair(twin.Config{Limits: session.Limits{Window: 32, CanWrite: true, MaxExpose: 16 << 20, Inbox: 8 << 10}})
	go connpair.Accept(t.Context(), eb, session.Config{}, func([]byte) *sanconn.Conn { return b })
	if err := connpair.Propose(t.Context(), a, ea, session.Config{ReceiveBudget: 64 << 10}, nil); err != nil {
		t.Fatal(err)
	}
	sent := pattern(4 << 20)
	b.SetWriteDeadline(time.Now().Add(patience))
	for p := sent; len(p) > 0; p = p[16<<10:] {
		if _, err := b.Write(p[:16<<10]); err != nil {
			t.Fatal(err)
		}
	}
	wrote := make(chan error, 1)
	go func() { wrote <- b.Close() }()
	testenv.Eventually(t, patience, func() error {
		if err := b.SetDeadline(time.Time{}); err == nil {
			return errors.New("it has not closed")
		}
		return nil
	})
	if f, err := a.File(); err == nil || errors.Is(err, syscall.ETIMEDOUT) { // bytes have not been read
		f.Close()
		t.Error(err)
	}
	wantBytes(t, <-received(t, a), sent)
	if err := <-wrote; err != nil {
		t.Error(err)
	}
	f, err := a.File()
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
}

// takeLate accepts the next proposal over ep for c, and passes further notes to c only after late is
// closed.
func takeLate(t *testing.T, c *sanconn.Conn, ep session.Endpoint, late <-chan struct{}) {
	h := newconn.HandleOf(c)
	notes := h.Notes()
	var s *session.Session
	s = session.New(ep, session.Config{Accepting: true, OnNote: func(note []byte) {
		if len(note) > 0 && note[0] == newconn.NoteProposal {
			if err := h.Accept(s, []byte{1}); err != nil {
				t.Error(err)
			}
			return
		}
		<-late
		notes(s, note)
	}})
	if err := s.Negotiate(t.Context()); err != nil {
		t.Error(err)
	}
}

// keeps returns a connection that has come back. It waits for late, which is to come by TCP from b, and
// keeps the bytes kept, which follow.
func keeps(t *testing.T, late, kept string) (a, b *sanconn.Conn) {
	p := movedByHand(t, session.Limits{}, uint64(len(late)), func(p *byHand) {
		go func() {
			p.Write([]byte(kept))
			p.SendNote(noteAt(newconn.NoteLeave, uint64(len(kept))))
			p.Close()
		}()
	}, nil)
	testenv.Eventually(t, patience, func() error {
		if !sanconn.Keeps(p.a) {
			return errors.New("it has not come back")
		}
		return nil
	})
	return p.a, p.b
}

// While a Read waits for TCP's last bytes before those that are kept, File fails: its descriptor would
// lack the kept bytes.
func TestFileBesideAReadAheadOfWhatIsKept(t *testing.T) {
	const late, kept = "by TCP, late; ", "kept"
	a, b := keeps(t, late, kept)
	got := make(chan []byte, 1)
	go func() {
		p := make([]byte, len(late+kept))
		n, err := io.ReadFull(a, p)
		if err != nil {
			t.Error(err)
		}
		got <- p[:n]
	}()
	defer sanconn.SetBackTimeout(10 * time.Millisecond)() // File waits for TCP's bytes, but not for ever
	for range 3 {                                         // by then the Read waits
		if f, err := a.File(); err == nil {
			f.Close()
			t.Error("there is a descriptor that lacks bytes")
		}
	}
	b.Write([]byte(late))
	wantBytes(t, <-got, []byte(late+kept))
}

// Close beside such a Read is a reset, so that the peer learns that the kept bytes were not read.
func TestCloseBesideAReadAheadOfWhatIsKept(t *testing.T) {
	a, b := keeps(t, "by TCP", "kept")
	read := make(chan error, 1)
	go func() { _, err := a.Read(make([]byte, 1)); read <- err }()
	testenv.Eventually(t, patience, func() error {
		if !sanconn.Reading(a) {
			return errors.New("no Read waits")
		}
		return nil
	})
	a.Close()
	if err := <-read; !errors.Is(err, net.ErrClosed) {
		t.Error(err)
	}
	b.SetReadDeadline(time.Now().Add(patience))
	if n, err := b.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the peer: %d bytes, %v", n, err)
	}
}

// What has come by TCP after the kept bytes is read after them, even by calls that take everything that
// has come by TCP.
func TestWhatIsKeptIsReadInItsPlace(t *testing.T) {
	const late, kept, behind = "by TCP, late; ", "kept; ", "and behind it"
	for name, readAll := range map[string]func(*sanconn.Conn) ([]byte, error){
		"Read": func(c *sanconn.Conn) ([]byte, error) { return io.ReadAll(struct{ io.Reader }{c}) },
		"Peek": func(c *sanconn.Conn) (all []byte, err error) {
			for err == nil {
				var b []byte
				if b, err = c.Peek(); err == nil {
					all = append(all, b...)
					err = c.Discard(len(b))
				}
			}
			if err == io.EOF {
				err = nil
			}
			return all, err
		},
		"a copy to a file": func(c *sanconn.Conn) ([]byte, error) {
			f := fileOf(t, nil)
			if _, err := io.Copy(f, c); err != nil {
				return nil, err
			}
			return os.ReadFile(f.Name())
		},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := keeps(t, late, kept)
			if _, err := b.Write([]byte(late + behind)); err != nil {
				t.Fatal(err)
			}
			if err := b.CloseWrite(); err != nil {
				t.Fatal(err)
			}
			a.SetReadDeadline(time.Now().Add(patience))
			got, err := readAll(a)
			if err != nil {
				t.Error(err)
			}
			wantBytes(t, got, []byte(late+kept+behind))
		})
	}
}

// CloseRead and CloseWrite have their effect before and after the way back.
func TestHalfClosedOnTheWayBack(t *testing.T) {
	for _, asker := range []int{0, 1} {
		a, b := pipe(t, session.Limits{}, nil)
		a.Write([]byte("unread"))
		b.Write([]byte("all"))
		if err := errors.Join(a.CloseWrite(), b.CloseRead()); err != nil {
			t.Fatal(err)
		}
		if err := sanconn.LeaveSAN([]*sanconn.Conn{a, b}[asker]); err != nil {
			t.Fatal(err)
		}
		if n, err := b.Read(make([]byte, 1)); n != 0 || err != io.EOF {
			t.Errorf("read %d, %v after CloseRead", n, err)
		}
		if _, err := a.Write([]byte("x")); !errors.Is(err, syscall.EPIPE) {
			t.Errorf("%v after CloseWrite", err)
		}
		b.Write([]byte(" of it"))
		b.CloseWrite()
		wantBytes(t, <-received(t, a), []byte("all of it"))
	}
}

// A peer that has sent more by TCP than the position in its begin violates the protocol.
func TestAMoveBehindWhatWasRead(t *testing.T) {
	a, b, err := newPair(newconn.Config{}, newconn.Config{})
	if err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, a, b)
	a.SetDeadline(time.Now().Add(patience))
	newconn.HandleOf(b).TCP().Write([]byte("not counted"))
	if _, err := a.Read(make([]byte, 3)); err != nil {
		t.Fatal(err)
	}
	ea, eb := twin.Pair(twin.Config{})
	movePair(t.Context(), a, b, ea, eb, sessions{})
	b.Write([]byte("at 0"))
	if got, err := io.ReadAll(a); !errors.Is(err, syscall.ECONNRESET) || strings.Contains(string(got), "at 0") {
		t.Errorf("read %q, %v", got, err)
	}
}

// A dialer whose proposal is refused stays on TCP, and TCP's end is the end of its stream.
func TestARefusedProposal(t *testing.T) {
	a, b, err := newPair(newconn.Config{}, newconn.Config{})
	if err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, a, b)
	if err := b.CloseWrite(); err != nil { // so that it does not move
		t.Fatal(err)
	}
	ea, eb := twin.Pair(twin.Config{})
	if err := movePair(t.Context(), a, b, ea, eb, sessions{}); !errors.Is(err, connpair.ErrRefused) {
		t.Errorf("it moves: %v", err)
	}
	a.SetDeadline(time.Now().Add(patience))
	if n, err := a.Read(make([]byte, 1)); n != 0 || err != io.EOF {
		t.Errorf("read %d, %v", n, err)
	}
	a.Write([]byte("by TCP"))
	a.CloseWrite()
	wantBytes(t, <-received(t, b), []byte("by TCP"))
	if p := a.Provider(); p != "tcp" {
		t.Errorf("it is on %s", p)
	}
}

// A process that ends the session before it has negotiated, as one of another version does, has sent no
// byte of its stream there: TCP has all of the stream and its end.
func TestAPeerThatDoesNotNegotiate(t *testing.T) {
	for name, end := range map[string]func(s *session.Session, e *twin.Endpoint){
		"it aborts": func(s *session.Session, e *twin.Endpoint) { s.Abort() },
		"it closes": func(s *session.Session, e *twin.Endpoint) { s.Close() },
		"it dies":   func(s *session.Session, e *twin.Endpoint) { e.Kill() },
	} {
		a, b, err := newPair(newconn.Config{}, newconn.Config{})
		if err != nil {
			t.Fatal(err)
		}
		closeAtEnd(t, a, b)
		ea, eb := twin.Pair(twin.Config{})
		s := session.New(eb, session.Config{Accepting: true})
		go end(s, eb)
		if err := connpair.Propose(t.Context(), a, ea, session.Config{}, nil); err == nil {
			t.Errorf("%s: it moves", name)
		}
		a.SetDeadline(time.Now().Add(patience))
		b.Write([]byte("by TCP"))
		b.CloseWrite()
		if got, err := io.ReadAll(a); string(got) != "by TCP" || err != nil {
			t.Errorf("%s: read %q, %v", name, got, err)
		}
		if p := a.Provider(); p != "tcp" {
			t.Errorf("%s: it is on %s", name, p)
		}
		s.Abort()
	}
}

// If the session fails at this end, the peer may have negotiated and sent some of its stream there:
// TCP's end is a cut.
func TestASessionThatFailsBeforeItNegotiates(t *testing.T) {
	a, b, err := newPair(newconn.Config{}, newconn.Config{})
	if err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, a, b)
	ea, eb := twin.Pair(twin.Config{})
	s := session.New(eb, session.Config{Accepting: true})
	defer s.Abort()
	fails := time.AfterFunc(10*time.Millisecond, ea.Kill)
	defer fails.Stop()
	if err := connpair.Propose(t.Context(), a, ea, session.Config{}, nil); err == nil {
		t.Error("it moves")
	}
	a.SetDeadline(time.Now().Add(patience))
	b.Write([]byte("by TCP"))
	b.CloseWrite()
	if got, err := io.ReadAll(a); string(got) != "by TCP" || !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read %q, %v", got, err)
	}
}

// A peer that has left reads TCP's end as the end of the stream. So if the session fails at this end
// after that, this end resets TCP.
func TestASessionThatFailsWhenThePeerHasLeft(t *testing.T) {
	for _, linger := range []bool{false, true} {
		sessionFailsWhenThePeerHasLeft(t, linger)
	}
}

func sessionFailsWhenThePeerHasLeft(t *testing.T, linger bool) {
	t.Helper()
	p := movedByHand(t, session.Limits{}, 0, nil, func(p *byHand) {
		p.SendNote(noteAt(newconn.NoteLeave, 0))
		go func() {
			io.Copy(io.Discard, p.Session) // up to the end of a's stream there, after which the peer may leave
			p.ea.Kill()
		}()
	})
	if _, err := p.a.Write([]byte("by the SAN")); err != nil {
		t.Fatal(err)
	}
	if err := sanconn.LeaveSAN(p.a); err == nil {
		t.Error("it has left")
	}
	if _, err := p.a.Write([]byte("more")); err == nil {
		t.Error("it writes on")
	}
	p.a.SetReadDeadline(time.Now().Add(patience))
	if _, err := p.a.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("it reads %v", err)
	}
	if linger { // a program may set it before each Close
		p.a.SetLinger(5)
	}
	p.a.Close()
	p.b.SetReadDeadline(time.Now().Add(patience))
	if n, err := p.b.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the peer reads %d bytes, %v", n, err)
	}
}

// A peer that leaves ends its stream on the session and continues by TCP. If its process ends before
// this end has left as well, the stream was cut, possibly in a Write, unless the peer's program had
// ended it before.
func TestAPeerThatDiesOnTheWayBack(t *testing.T) {
	for name, tt := range map[string]struct {
		limits session.Limits
		ended  bool // by its program, which this end finds only when it leaves
		want   error
	}{
		"ring":        {session.Limits{}, false, syscall.ECONNRESET},
		"window":      {session.Limits{Window: 32}, false, syscall.ECONNRESET}, // bytes in flight are lost
		"ring, ended": {session.Limits{}, true, nil},
	} {
		p := movedByHand(t, tt.limits, 0, func(p *byHand) {
			p.Write([]byte("half of it"))
		}, func(p *byHand) {
			p.ea.Hold(twin.HoldMessages) // until the process has ended, so that this end cannot be faster
			if tt.ended {
				p.CloseWrite()
			}
			p.SendNote(noteAt(newconn.NoteLeave, 10))
			p.CloseWrite()
			p.eb.Kill()
			p.b.Close()
			p.ea.Hold(0)
		})
		a := p.a
		a.SetDeadline(time.Now().Add(patience))
		if _, err := io.ReadFull(a, make([]byte, 4)); err != nil {
			t.Error(err)
		}
		for range 2 { // the second one changes nothing
			if _, err := a.File(); err == nil { // the peer has not taken what was returned to it
				t.Errorf("%s: the descriptor", name)
			}
		}
		if got, err := io.ReadAll(a); string(got) != " of it" && tt.limits.Ring() || !errors.Is(err, tt.want) {
			t.Errorf("%s: %q, %v", name, got, err)
		}
		p.Abort()
	}
}

// Bytes that a peer sends by the session without a begin are not read before those that come by TCP.
func TestAPeerThatLeavesWithoutABegin(t *testing.T) {
	defer sanconn.SetAnswerTime(0)()
	p := movedByHand(t, session.Limits{Window: 32}, noBegin, func(p *byHand) {
		p.Write([]byte("by the session"))
	}, func(p *byHand) {
		if err := testenv.Await(patience, func() error {
			if p.a.Stats().BytesReceived == 0 {
				return errors.New("it has not taken what came")
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
		p.Abort()
	})
	if err := sanconn.LeaveSAN(p.a); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("it leaves: %v", err)
	}
	p.b.Write([]byte("by TCP"))
	p.b.Close()
	p.a.SetDeadline(time.Now().Add(patience))
	if got, err := io.ReadAll(p.a); string(got) != "by TCP" || !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read %q, %v", got, err)
	}
}

// A peer that leaves announces how much of its stream is left on the session, and returns bytes of this
// end's stream. More than is possible ends the connection, as all of it takes memory here.
func TestAPeerThatLeavesTooMuch(t *testing.T) {
	for name, tt := range map[string]struct {
		limits session.Limits
		left   uint64 // the position in leave
		comes  int
		most   int // bytes that may be read of it
	}{
		"unread":              {left: 5 << 20, comes: 5 << 20, most: 4<<20 + 64<<10},
		"unread, not by ring": {limits: session.Limits{Window: 32}, left: 20 << 20, comes: 20 << 20, most: 9 << 20},
		"returned":            {left: 0, comes: 2}, // bytes of this end's stream, which had only one
		"beyond its end":      {left: 1 << 63, comes: 5, most: 5},
	} {
		p := movedByHand(t, tt.limits, 0, func(p *byHand) {
			go func() {
				p.Read(make([]byte, 1))
				p.SendNote(noteAt(newconn.NoteLeave, tt.left))
			}()
		}, func(p *byHand) {
			go func() {
				p.Write(make([]byte, tt.comes))
				p.CloseWrite()
			}()
		})
		a := p.a
		a.SetDeadline(time.Now().Add(patience))
		a.Write([]byte("1"))
		if got, err := io.ReadAll(a); !errors.Is(err, syscall.ECONNRESET) || len(got) > tt.most {
			t.Errorf("%s: read %d bytes, %v", name, len(got), err)
		}
		p.Abort()
	}
}

// Before the bytes have come, an announcement takes no more memory than a ring, even with a large
// receive budget.
func TestAPeerThatAnnouncesMuch(t *testing.T) {
	p := movedByHandTo(t, session.Config{ReceiveBudget: math.MaxInt / 2}, session.Limits{Window: 32}, 0, func(p *byHand) {
		p.SendNote(noteAt(newconn.NoteLeave, 1<<61))
	}, func(p *byHand) { go p.Abort() })
	p.a.SetDeadline(time.Now().Add(patience))
	if n, err := p.a.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read %d bytes, %v", n, err)
	}
}

// A peer cannot return bytes that were never sent to it, even among those that come before its answer.
func TestAPeerThatReturnsWhatItWasNotSent(t *testing.T) {
	defer sanconn.SetAnswerTime(0)()
	p := movedByHand(t, session.Limits{Window: 32}, 0, nil, func(p *byHand) {
		p.Write(make([]byte, 2))
		if err := testenv.Await(patience, func() error {
			if n := p.a.Stats().BytesReceived; n < 2 {
				return fmt.Errorf("%d bytes have been read", n)
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
		p.SendNote(noteAt(newconn.NoteLeave, 0))
		p.CloseWrite()
		p.Close()
	})
	if err := sanconn.LeaveSAN(p.a); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("it leaves: %v", err)
	}
}

// scarce is an endpoint in whose process others have used up the memory of rings. What comes back of
// sessions may take spare bytes.
type scarce struct {
	*twin.Endpoint
	spare int64
}

func (scarce) Starved() bool  { return true }
func (s scarce) Spare() int64 { return s.spare }

// The bytes of peers that starving connections keep after their way back are bounded. If one leaves no
// room, the next ones stay on their sessions until these bytes were read, or the connection that keeps
// them is closed or forgotten.
func TestStarvingConnectionsGoBackInTurns(t *testing.T) {
	testenv.Eventually(t, patience, func() error { // those of other tests may not be over
		if kept := sanconn.KeptOfAll(); kept != 0 {
			return fmt.Errorf("%d bytes count", kept)
		}
		return nil
	})
	var closes []io.Closer
	closeAll := func() {
		for _, c := range closes {
			c.Close()
		}
		closes = nil
	}
	defer closeAll()
	starving := func(spare int64) (a, b *sanconn.Conn) {
		t.Helper()
		a, b, err := newPair(newconn.Config{}, newconn.Config{})
		if err != nil {
			t.Fatal(err)
		}
		closes = append(closes, a, b)
		a.Write([]byte{0}) // by TCP: without such a byte it would not go back
		if _, err := b.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		ea, eb := twin.Pair(twin.Config{})
		if err := movePair(t.Context(), a, b, scarce{ea, spare}, eb, sessions{}); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, patience, func() error {
			if a.Provider() == "tcp" || b.Provider() == "tcp" {
				return errors.New("it has not moved")
			}
			return nil
		})
		b.Write([]byte("unread"))
		return a, b
	}
	left := func(c *sanconn.Conn) bool {
		sanconn.Starve(c)
		if c.Provider() != "tcp" && !sanconn.Leaving(c) {
			return false
		}
		awaitLeft(t, c)
		return true
	}
	for _, end := range []struct {
		name string
		of   func(c *sanconn.Conn)
	}{
		{"it is read", func(c *sanconn.Conn) { io.ReadFull(c, make([]byte, len("unread"))) }},
		{"it is closed", func(c *sanconn.Conn) { c.Close() }},
	} {
		first, _ := starving(sanconn.MostOfRing)
		second, _ := starving(sanconn.MostOfRing)
		roomy, _ := starving(2 * sanconn.MostOfRing)
		if !left(first) {
			t.Fatal("the first one does not go back")
		}
		if kept := sanconn.KeptOfAll(); kept != int64(len("unread")) {
			t.Errorf("%d bytes count of one that has left", kept)
		}
		if left(second) {
			t.Errorf("another one goes back before %s", end.name)
		}
		if !left(roomy) {
			t.Errorf("one for which there is room does not go back")
		}
		roomy.Close()
		end.of(first)
		if !left(second) {
			t.Errorf("another one does not go back once %s", end.name)
		}
		second.Close()
	}
	if kept := sanconn.KeptOfAll(); kept != 0 {
		t.Errorf("%d bytes count once all have been read or closed", kept)
	}
	closeAll()
	func() {
		c, _ := starving(sanconn.MostOfRing)
		if !left(c) || sanconn.KeptOfAll() == 0 {
			t.Error("one more does not go back")
		}
		closes = nil
	}()
	testenv.Eventually(t, patience, func() error {
		runtime.GC()
		if kept := sanconn.KeptOfAll(); kept != 0 {
			return fmt.Errorf("%d bytes count once it is forgotten", kept)
		}
		return nil
	})
}
