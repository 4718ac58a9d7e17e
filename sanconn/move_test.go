package sanconn_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/connpair"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/internal/trace"
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

// A connection that has gone back at once counts as moved only if no byte had gone by TCP before.
func TestMovedBehindAWayBack(t *testing.T) {
	for _, before := range []string{"", "by TCP"} {
		a, b, move := onTCPPair(t, newconn.Config{})
		if _, err := a.Write([]byte(before)); err != nil {
			t.Fatal(err)
		}
		if err := move(); err != nil {
			t.Fatal(err)
		}
		if err := sanconn.LeaveSAN(a); err != nil {
			t.Fatal(err)
		}
		for _, c := range []*sanconn.Conn{a, b} {
			if err := moved(t, c); (err == nil) != (before == "") {
				t.Errorf("behind %q on TCP: %v", before, err)
			}
		}
	}
}

// Calls of Debug do not delay a move.
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

// Room that was reserved on TCP keeps other Writes waiting until Commit, even if the connection moves
// meanwhile.
func TestOthersWaitForCommitAcrossAMove(t *testing.T) {
	for name, write := range map[string]func(c *sanconn.Conn, b []byte) error{
		"Write":        func(c *sanconn.Conn, b []byte) error { _, err := c.Write(b); return err },
		"WriteBuffers": func(c *sanconn.Conn, b []byte) error { _, err := c.WriteBuffers(&net.Buffers{b}); return err },
		"Reserve": func(c *sanconn.Conn, b []byte) error {
			room, err := c.Reserve(len(b))
			if err != nil {
				return err
			}
			return c.Commit(copy(room, b))
		},
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

// moveWithinAWrite moves a connection in the middle of a's Write. wantCut checks that the stream would
// have counted as cut before its begin, had the process ended there.
func moveWithinAWrite(t *testing.T, a, b *sanconn.Conn) (wantCut func()) {
	t.Helper()
	var text bytes.Buffer
	lines := trace.New(&text)
	ea, eb := twin.Pair(twin.Config{})
	if err := movePair(t.Context(), a, b, ea, eb, sessions{Dialer: session.Config{Trace: lines}}); err != nil {
		t.Fatal(err)
	}
	return func() {
		t.Helper()
		lines.Flush(patience)
		// Received messages may be between the two.
		if !regexp.MustCompile(` > Data len=8 .* more\n(.* < .*\n)*.* > Note len=17 `).MatchString(text.String()) {
			t.Errorf("the stream is not cut ahead of the begin:\n%.2000s", text.String())
		}
	}
}

const copyOfAFile = "a copy of a file"

// The rest of a long Write that waits in TCP goes by the session, whichever method has written it.
func TestALongWriteMovesInItsMiddle(t *testing.T) {
	all := pattern(64 << 20)
	f := fileOf(t, all)
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
		copyOfAFile: func(c *sanconn.Conn) error {
			n, err := io.Copy(c, f)
			if n != int64(len(all)) {
				t.Errorf("%d bytes were copied", n)
			}
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			a, b, _ := onTCPPair(t, newconn.Config{})
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
			wantCut := moveWithinAWrite(t, a, b)
			got := <-received(t, b)
			if err := <-done; err != nil {
				t.Error(err)
			}
			if name != copyOfAFile { // a Write has only a part of the file
				wantCut()
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

// A deadline ends such a Write like any other, even after it has got to the session.
func TestADeadlineOfALongWriteThatMoves(t *testing.T) {
	a, b, move := onTCPPair(t, newconn.Config{})
	done := make(chan error, 1)
	go func() {
		_, err := a.Write(make([]byte, 64<<20)) // more than both have room for
		done <- err
	}()
	read := func() {
		if _, err := b.Read(make([]byte, 64<<10)); err != nil {
			t.Fatal(err)
		}
	}
	read()
	if err := move(); err != nil {
		t.Fatal(err)
	}
	for s := a.Stats(); s.BytesSent == s.TCPBytesSent; s = a.Stats() {
		read() // TCP has room only then
	}
	a.SetWriteDeadline(time.Now())
	var op *net.OpError
	if err := <-done; !errors.Is(err, os.ErrDeadlineExceeded) || !errors.As(err, &op) {
		t.Errorf("%T: %v", err, err)
	}
}

// If either end leaves the session before such a Write has got there, the rest goes by TCP.
func TestALongWriteThatDoesNotMoveInItsMiddle(t *testing.T) {
	all := pattern(24 << 20) // more than TCP has room for
	for name, leaver := range map[string]int{"this end leaves": 0, "the other one leaves": 1} {
		for what, write := range map[string]func(c *sanconn.Conn, f *os.File) (int64, error){
			"Write":     func(c *sanconn.Conn, _ *os.File) (int64, error) { n, err := c.Write(all); return int64(n), err },
			copyOfAFile: func(c *sanconn.Conn, f *os.File) (int64, error) { return io.Copy(c, f) },
		} {
			t.Run(name+"/"+what, func(t *testing.T) {
				a, b, _ := onTCPPair(t, newconn.Config{})
				f := fileOf(t, all)
				done := make(chan error, 1)
				go func() {
					n, err := write(a, f)
					if n != int64(len(all)) {
						t.Errorf("%d bytes were written, %v", n, err)
					}
					a.CloseWrite()
					done <- err
				}()
				testenv.Eventually(t, patience, func() error {
					if a.Stats().TCPBytesSent == 0 {
						return errors.New("it has not written")
					}
					return nil
				})
				wantCut := moveWithinAWrite(t, a, b)
				if err := sanconn.LeaveSAN([]*sanconn.Conn{a, b}[leaver]); err != nil {
					t.Fatal(err)
				}
				got := <-received(t, b)
				if err := <-done; err != nil {
					t.Error(err)
				}
				if what != copyOfAFile {
					wantCut()
				}
				wantBytes(t, got, all)
			})
		}
	}
}

// An end whose program has had the descriptor does not move before its own Read or Write has been used:
// an event loop may have the descriptor.
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
	if _, err := b.Read(make([]byte, 100)); err != nil { // counts as more than 1000 of use
		t.Fatal(err)
	}
	if err := move(); err != nil {
		t.Fatal(err)
	}
	a.Write([]byte("by the session"))
	a.CloseWrite()
	wantBytes(t, <-received(t, b), []byte("by the session"))
}

// A direction that is ended during a proposal does not prevent the move.
func TestWhatEndsBesideAProposalMovesYet(t *testing.T) {
	a, b, err := newPair(newconn.Config{}, newconn.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	defer b.Close()
	ended := newconn.HandleOf(a).Shut
	ea, eb := twin.Pair(twin.Config{})
	go connpair.Accept(t.Context(), eb, session.Config{}, func([]byte) *sanconn.Conn {
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

// CloseWrite during a proposal ends a Write that waits in TCP, before the answer has come.
func TestCloseWriteBesideAProposal(t *testing.T) {
	a, b, _ := onTCPPair(t, newconn.Config{})
	all := pattern(64 << 20) // more than TCP has room for
	var n int
	wrote := make(chan error, 1)
	go func() {
		var err error
		n, err = a.Write(all)
		wrote <- err
	}()
	was, looks := uint64(0), 0
	testenv.Eventually(t, patience, func() error { // 20 looks without progress mostly show that it waits
		if n := a.Stats().TCPBytesSent; n == 0 || n != was {
			was, looks = n, 0
		}
		if looks++; looks < 20 {
			return errors.New("it does not wait")
		}
		return nil
	})
	ea, eb := twin.Pair(twin.Config{})
	go connpair.Accept(t.Context(), eb, session.Config{}, func([]byte) *sanconn.Conn {
		if err := a.CloseWrite(); err != nil {
			t.Error(err)
		}
		select {
		case err := <-wrote:
			if !errors.Is(err, syscall.EPIPE) {
				t.Error(err)
			}
		case <-time.After(patience):
			t.Error("the Write waits")
		}
		return b
	})
	if err := connpair.Propose(t.Context(), a, ea, session.Config{}, nil); err != nil {
		t.Fatal(err)
	}
	wantBytes(t, <-received(t, b), all[:n])
}

// After CloseRead during a proposal that is refused, the descriptor shows the end, as TCP's does.
func TestCloseReadBesideAProposal(t *testing.T) {
	a, b, err := newPair(newconn.Config{}, newconn.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	defer b.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	ea, eb := twin.Pair(twin.Config{})
	go connpair.Accept(ctx, eb, session.Config{}, func([]byte) *sanconn.Conn {
		if err := a.CloseRead(); err != nil {
			t.Error(err)
		}
		b.CloseRead() // so that b refuses
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

// A Read that CloseRead ends returns io.EOF, even if the proposal is refused at that moment.
func TestAReadThatCloseReadEndsBesideAProposal(t *testing.T) {
	for range 1000 {
		a, b, err := newPair(newconn.Config{}, newconn.Config{})
		if err != nil {
			t.Fatal(err)
		}
		read := make(chan error, 1)
		go func() { _, err := a.Read(make([]byte, 1)); read <- err }()
		ea, eb := twin.Pair(twin.Config{})
		go connpair.Accept(t.Context(), eb, session.Config{}, func([]byte) *sanconn.Conn {
			a.CloseRead()
			b.CloseRead() // so that b refuses
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

// Nothing is read after CloseRead, even if the direction moves only then.
func TestCloseReadAheadOfAMove(t *testing.T) {
	a, b, err := newPair(newconn.Config{}, newconn.Config{})
	if err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, a, b)
	ea, eb := twin.Pair(twin.Config{})
	var peer *session.Session
	peer = session.New(eb, session.Config{Accepting: true, OnNote: func(note []byte) {
		if len(note) > 0 && note[0] == newconn.NoteProposal {
			peer.SendNote([]byte{newconn.NoteAnswer, 1}) // the answer that it moves
		}
	}})
	defer peer.Abort()
	go peer.Negotiate(t.Context())
	if err := connpair.Propose(t.Context(), a, ea, session.Config{}, nil); err != nil {
		t.Fatal(err)
	}
	if err := a.CloseRead(); err != nil {
		t.Fatal(err)
	}
	peer.SendNote(noteAt(newconn.NoteBegin, 0))
	peer.Write([]byte("late"))
	testenv.Eventually(t, patience, func() error {
		if sanconn.SessionOf(a) == nil {
			return errors.New("it has not moved")
		}
		return nil
	})
	a.SetReadDeadline(time.Now().Add(patience))
	if n, err := a.Read(make([]byte, 9)); n != 0 || err != io.EOF {
		t.Errorf("%d bytes, %v", n, err)
	}
}

// A peer that violates the rules of moving ends the connection: what it has sent is not a valid stream.
func TestAPeerThatBreaksTheRules(t *testing.T) {
	begin := func(n uint64) []byte { return noteAt(newconn.NoteBegin, n) }
	leave := func(n uint64) []byte { return noteAt(newconn.NoteLeave, n) }
	for name, does := range map[string]struct {
		byTCP int // bytes
		notes [][]byte
		then  [][]byte // sent once five bytes of the session were read
	}{
		"more by TCP than it has said":   {10, [][]byte{begin(5)}, nil},
		"it begins twice":                {0, [][]byte{begin(0), begin(0)}, nil},
		"a note of another kind":         {0, [][]byte{begin(0), noteAt(77, 0)}, nil},
		"a note that is too short":       {0, [][]byte{begin(0)[:8]}, nil},
		"a note that is too long":        {0, [][]byte{append(begin(0), 0)}, nil},
		"an answer to no proposal":       {0, [][]byte{begin(0), {newconn.NoteAnswer, 1}}, nil},
		"it leaves before what was read": {0, [][]byte{begin(0)}, [][]byte{leave(4)}},
		"it leaves twice":                {0, [][]byte{begin(0)}, [][]byte{leave(5), leave(5)}},
	} {
		tcp, peer, err := tcpPair()
		if err != nil {
			t.Fatal(err)
		}
		a := newconn.New(tcp, newconn.Config{Life: connpair.Nobody{}}).(*sanconn.Conn)
		closeAtEnd(t, a)
		a.SetDeadline(time.Now().Add(patience))
		ea, eb := twin.Pair(twin.Config{})
		peer.Write(make([]byte, does.byTCP))
		var s *session.Session
		proposed := make(chan struct{})
		s = session.New(eb, session.Config{Accepting: true, OnNote: func(note []byte) {
			if len(note) > 0 && note[0] == newconn.NoteProposal {
				close(proposed)
			}
		}})
		go s.Negotiate(t.Context())
		moved := make(chan error, 1)
		go func() { moved <- connpair.Propose(t.Context(), a, ea, session.Config{}, nil) }()
		<-proposed
		s.SendNote([]byte{newconn.NoteAnswer, 1}) // the answer that it moves
		if err := <-moved; err != nil {
			t.Fatal(err)
		}
		for _, note := range does.notes {
			s.SendNote(note)
		}
		if does.byTCP > 0 { // wait until its begin has come, before they are read
			testenv.Eventually(t, patience, func() error {
				if text := a.Debug(); !strings.Contains(text, "read by the SAN") {
					return errors.New(text)
				}
				return nil
			})
		}
		s.Write(make([]byte, 5))
		if does.then != nil {
			if _, err := io.ReadFull(a, make([]byte, 5)); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			for _, note := range does.then {
				s.SendNote(note)
			}
		}
		asked := make(chan struct{})
		go func() { // as a peer does whose session has ended
			defer close(asked)
			defer peer.Close()
			if err := testenv.Await(patience, func() error {
				if s.Over() == nil {
					return errors.New("the session has not ended")
				}
				return nil
			}); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}()
		for err = nil; err == nil; {
			_, err = a.Read(make([]byte, 20))
		}
		if !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%s: %v", name, err)
		}
		<-asked // Over must not be called on a session that was aborted
		s.Abort()
	}
}

// Whatever ends this end's stream also ends a Write that waits in TCP, even if the connection moves: the
// peer reads the bytes that the Write has sent, and then the end.
func TestTheEndBesideAWriteThatWaitsInTCP(t *testing.T) {
	for name, tt := range map[string]struct {
		end  func(*sanconn.Conn) error
		want error // of the Write
	}{
		"Close":      {(*sanconn.Conn).Close, net.ErrClosed},
		"CloseWrite": {(*sanconn.Conn).CloseWrite, syscall.EPIPE},
	} {
		t.Run(name, func(t *testing.T) {
			a, b, move := onTCPPair(t, newconn.Config{})
			all := pattern(64 << 20) // more than TCP has room for
			var n int
			wrote := make(chan error, 1)
			go func() {
				var err error
				n, err = a.Write(all)
				wrote <- err
			}()
			testenv.Eventually(t, patience, func() error {
				if a.Stats().TCPBytesSent == 0 {
					return errors.New("it has not written")
				}
				return nil
			})
			if err := move(); err != nil {
				t.Fatal(err)
			}
			ends := make(chan error, 1)
			go func() { ends <- tt.end(a) }()
			for what, c := range map[string]chan error{"the end": ends, "the Write": wrote} {
				select {
				case err := <-c:
					if what == "the Write" && !errors.Is(err, tt.want) || what == "the end" && err != nil {
						t.Errorf("%s: %v", what, err)
					}
				case <-time.After(patience):
					t.Fatalf("%s waits", what)
				}
			}
			wantBytes(t, <-received(t, b), all[:n])
		})
	}
}

// Close before bytes that have come by TCP were read is a reset, even if the peer has moved after them.
func TestCloseAheadOfWhatCameBeforeTheMove(t *testing.T) {
	a, b, move := onTCPPair(t, newconn.Config{})
	if _, err := a.Write([]byte("unread")); err != nil {
		t.Fatal(err)
	}
	if err := move(); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, patience, func() error { // until a has moved, and b knows the position
		if a.Provider() == "tcp" || !strings.Contains(b.Debug(), "read by the SAN from byte 6 on") {
			return errors.New(b.Debug())
		}
		return nil
	})
	b.Close()
	a.SetReadDeadline(time.Now().Add(patience))
	if n, err := a.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the peer reads %d bytes, %v", n, err)
	}
}
