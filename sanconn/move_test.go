package sanconn_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/sanconn/san/internal/connpair"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

// onTCPPair returns both ends of a connection that moves when move is called.
func onTCPPair(t *testing.T, acceptor newconn.Config) (a, b *sanconn.Conn, move func() error) {
	t.Helper()
	a, b, err := newPair(newconn.Config{}, acceptor)
	if err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, a, b)
	a.SetDeadline(time.Now().Add(patience))
	b.SetDeadline(time.Now().Add(patience))
	return a, b, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		ea, eb := twin.Pair(twin.Config{})
		return movePair(ctx, a, b, ea, eb, sessions{})
	}
}

// moved waits until both directions of an end have moved.
func moved(t *testing.T, c *sanconn.Conn) error {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	return newconn.HandleOf(c).Moved(ctx)
}

// Whoever looks at a connection does not hold up its move.
func TestDebugBesideAMove(t *testing.T) {
	for range 60 {
		a, b, move := onTCPPair(t, newconn.Config{})
		var looking sync.WaitGroup
		stop := make(chan struct{})
		for _, c := range []*sanconn.Conn{a, b, a, b} {
			looking.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
						c.Debug()
					}
				}
			})
		}
		err := move()
		close(stop)
		looking.Wait()
		for _, c := range []*sanconn.Conn{a, b} {
			if err == nil {
				err = moved(t, c)
			}
		}
		if err != nil {
			t.Fatalf("%v\n%s%s", err, a.Debug(), b.Debug())
		}
		a.Close()
		b.Close()
	}
}

// What was reserved on TCP keeps other Writes out until Commit, also where the connection moves.
func TestOthersWaitForCommitAcrossAMove(t *testing.T) {
	for name, write := range map[string]func(c *sanconn.Conn, b []byte) error{
		"Write":        func(c *sanconn.Conn, b []byte) error { _, err := c.Write(b); return err },
		"WriteBuffers": func(c *sanconn.Conn, b []byte) error { _, err := c.WriteBuffers(&net.Buffers{b}); return err },
	} {
		t.Run(name, func(t *testing.T) {
			a, b, move := onTCPPair(t, newconn.Config{})
			room, err := a.Reserve(3)
			if err == nil {
				err = move()
			}
			if err == nil {
				err = moved(t, a)
			}
			if err != nil {
				t.Fatal(err)
			}
			done := make(chan error, 1)
			go func() {
				err := write(a, []byte("behind"))
				a.CloseWrite()
				done <- err
			}()
			select {
			case err := <-done:
				t.Fatalf("it did not wait: %v", err)
			case <-time.After(20 * time.Millisecond):
			}
			if err := a.Commit(copy(room, "it ")); err != nil {
				t.Error(err)
			}
			wantBytes(t, <-received(t, b), []byte("it behind"))
			if err := <-done; err != nil {
				t.Error(err)
			}
			if p := b.Provider(); p == "tcp" {
				t.Error("it has not moved")
			}
		})
	}
}

// A Write of many bytes that waits in TCP goes on by the session, whatever it is written by.
func TestALongWriteMovesInItsMiddle(t *testing.T) {
	all := pattern(64 << 20)
	for name, write := range map[string]func(c *sanconn.Conn) error{
		"Write": func(c *sanconn.Conn) error { _, err := c.Write(all); return err },
		"WriteBuffers": func(c *sanconn.Conn) error {
			v := net.Buffers{all[:10], all[10 : 1<<20], nil, all[1<<20 : len(all)-1], all[len(all)-1:]}
			n, err := c.WriteBuffers(&v)
			if n != int64(len(all)) || len(v) > 0 {
				t.Errorf("%d bytes, %d slices are left", n, len(v))
			}
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			a, b, move := onTCPPair(t, newconn.Config{})
			done := make(chan error, 1)
			go func() {
				err := write(a)
				a.CloseWrite()
				done <- err
			}()
			var head [1]byte
			if _, err := b.Read(head[:]); err != nil {
				t.Fatal(err)
			}
			if err := move(); err != nil {
				t.Fatal(err)
			}
			got := <-received(t, b)
			if err := <-done; err != nil {
				t.Error(err)
			}
			if !bytes.Equal(append(head[:], got...), all) {
				t.Errorf("%d bytes came, and not those that were written", 1+len(got))
			}
			if n := a.Stats().TCPBytesSent; n > uint64(len(all)/2) {
				t.Errorf("%d bytes went by TCP", n)
			}
		})
	}
}

// An end whose program has had the descriptor does not move before its own Read or Write has been
// used: an event loop may have it.
func TestAClaimedDescriptor(t *testing.T) {
	a, b, move := onTCPPair(t, newconn.Config{Threshold: 1000})
	raw, err := b.SyscallConn()
	if err == nil {
		err = raw.Control(func(uintptr) {})
	}
	if err != nil {
		t.Fatal(err)
	}
	a.Write([]byte("the descriptor's"))
	if err := move(); !errors.Is(err, connpair.ErrRefused) {
		t.Fatalf("it moves: %v", err)
	}
	if _, err := b.Read(make([]byte, 100)); err != nil { // which is a use of more than 1000
		t.Fatal(err)
	}
	if err := move(); err != nil {
		t.Fatal(err)
	}
	a.Write([]byte("by the session"))
	a.CloseWrite()
	wantBytes(t, <-received(t, b), []byte("by the session"))
}

// A direction that is ended beside a proposal ends no move: that goes on.
func TestWhatEndsBesideAnOfferMovesYet(t *testing.T) {
	a, b, err := newPair(newconn.Config{}, newconn.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	defer b.Close()
	ended := newconn.HandleOf(a).Ended
	ea, eb := twin.Pair(twin.Config{})
	go connpair.Take(t.Context(), eb, session.Config{}, func([]byte) *sanconn.Conn {
		if err := a.CloseWrite(); err != nil {
			t.Error(err)
		}
		if ended() {
			t.Error("it has ended, before the answer")
		}
		return b
	})
	if err := connpair.Propose(t.Context(), a, ea, session.Config{}, nil); err != nil {
		t.Fatal(err)
	}
	if err := newconn.HandleOf(a).Moved(t.Context()); err != nil || ended() {
		t.Errorf("%v, and it has ended: %v", err, ended())
	}
	if a.Close(); !ended() {
		t.Error("it has not ended")
	}
}

// CloseRead beside a proposal that comes to nothing: the descriptor shows the end, as TCP's does.
func TestCloseReadBesideAnOffer(t *testing.T) {
	a, b, err := newPair(newconn.Config{}, newconn.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	defer b.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	ea, eb := twin.Pair(twin.Config{})
	go connpair.Take(ctx, eb, session.Config{}, func([]byte) *sanconn.Conn {
		if err := a.CloseRead(); err != nil {
			t.Error(err)
		}
		b.CloseRead() // so b refuses
		return b
	})
	if err := connpair.Propose(ctx, a, ea, session.Config{}, nil); !errors.Is(err, connpair.ErrRefused) {
		t.Fatalf("it moves: %v", err)
	}
	f, err := a.File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	f.SetReadDeadline(time.Now().Add(10 * time.Second))
	if n, err := f.Read(make([]byte, 1)); n != 0 || err != io.EOF {
		t.Errorf("the descriptor: %d bytes, %v", n, err)
	}
}

// A Read that CloseRead ends finds the end, also where the proposal comes to nothing at that moment.
func TestAReadThatCloseReadEndsBesideAnOffer(t *testing.T) {
	for range 1000 {
		a, b, err := newPair(newconn.Config{}, newconn.Config{})
		if err != nil {
			t.Fatal(err)
		}
		read := make(chan error, 1)
		go func() { _, err := a.Read(make([]byte, 1)); read <- err }()
		ea, eb := twin.Pair(twin.Config{})
		go connpair.Take(t.Context(), eb, session.Config{}, func([]byte) *sanconn.Conn {
			a.CloseRead()
			b.CloseRead() // so b refuses
			return b
		})
		if err := connpair.Propose(t.Context(), a, ea, session.Config{}, nil); !errors.Is(err, connpair.ErrRefused) {
			t.Errorf("it moves: %v", err)
		}
		if err := <-read; err != io.EOF {
			t.Error(err)
		}
		a.Close()
		b.Close()
	}
}
