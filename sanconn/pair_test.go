package sanconn_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"testing"

	"github.com/sanconn/san/internal/connpair"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

// ending is a Life that reports only the connection's end.
type ending struct {
	closed func() // may be nil
	holds  bool
}

func (e ending) Closed() {
	if e.closed != nil {
		e.closed()
	}
}

func (ending) Used(newconn.Handle, bool) {}
func (e ending) Holds() bool             { return e.holds }
func (ending) Moved(string)              {}
func (ending) Left(error)                {}

// using is ending that reports use as well.
type using struct {
	ending
	used func()
}

func (u using) Used(newconn.Handle, bool) { u.used() }

// tcpPair returns both ends of a TCP connection: the dialer's first.
func tcpPair() (dialed, accepted *net.TCPConn, err error) {
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return nil, nil, err
	}
	defer l.Close()
	if dialed, err = net.DialTCP("tcp", nil, l.Addr().(*net.TCPAddr)); err != nil {
		return nil, nil, err
	}
	if accepted, err = l.AcceptTCP(); err != nil {
		dialed.Close()
		return nil, nil, err
	}
	return dialed, accepted, nil
}

// newPair returns both ends of a connection on TCP: the dialer's first.
func newPair(dialer, acceptor newconn.Config) (a, b *sanconn.Conn, err error) {
	d, e, err := tcpPair()
	if err != nil {
		return nil, nil, err
	}
	for _, cfg := range []*newconn.Config{&dialer, &acceptor} {
		if cfg.Life == nil {
			cfg.Life = connpair.Nobody{}
		}
	}
	ca := newconn.New(d, dialer)
	cb := newconn.New(e, acceptor)
	return ca.(*sanconn.Conn), cb.(*sanconn.Conn), nil
}

// sessions has the configurations of both ends' sessions.
type sessions struct{ Dialer, Acceptor session.Config }

// movePair moves a connection to a session over these endpoints, which belong to the session from now
// on. It returns when both ends have agreed. Each direction moves when its writer and reader get there:
// newconn.Handle.Moved waits for that.
func movePair(ctx context.Context, a, b *sanconn.Conn, dialer, acceptor session.Endpoint, cfg sessions) error {
	taken := make(chan error, 1)
	go func() {
		taken <- connpair.Accept(ctx, acceptor, cfg.Acceptor, func([]byte) *sanconn.Conn { return b })
	}()
	err := connpair.Propose(ctx, a, dialer, cfg.Dialer, nil)
	return errors.Join(err, <-taken)
}

// movedPair returns both ends of a connection of which both directions have moved.
func movedPair(ctx context.Context, dialer, acceptor session.Endpoint, cfg sessions, configs ...newconn.Config) (a, b *sanconn.Conn, err error) {
	configs = append(configs, newconn.Config{}, newconn.Config{})
	if a, b, err = newPair(configs[0], configs[1]); err != nil {
		return nil, nil, err
	}
	err = movePair(ctx, a, b, dialer, acceptor, cfg)
	for _, c := range []*sanconn.Conn{a, b} {
		if err == nil {
			err = newconn.HandleOf(c).Moved(ctx)
		}
	}
	if err != nil {
		a.Close()
		b.Close()
		return nil, nil, err
	}
	return a, b, nil
}

// pattern returns the first n bytes of a random stream, in which each place has its own bytes.
func pattern(n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{}).Read(b)
	return b
}

// fileOf returns a file with this content, positioned at its beginning.
func fileOf(t *testing.T, content []byte) *os.File {
	t.Helper()
	f, err := os.Create(t.TempDir() + "/data")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if _, err := f.Write(content); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		t.Fatal(err)
	}
	return f
}

// received reads to the end in the background.
func received(t *testing.T, c net.Conn) <-chan []byte {
	ch := make(chan []byte, 1)
	go func() {
		b, err := io.ReadAll(c)
		if err != nil {
			t.Error(err)
		}
		ch <- b
	}()
	return ch
}

func wantBytes(t *testing.T, got, want []byte) {
	t.Helper()
	if bytes.Equal(got, want) {
		return
	}
	i := 0
	for i < min(len(got), len(want)) && got[i] == want[i] {
		i++
	}
	t.Errorf("%d bytes instead of %d; they differ from %d on", len(got), len(want), i)
}

// sendUnread writes "unread" at one end, and returns when that has come to the other, where it stays
// unread.
func sendUnread(t *testing.T, from, to *sanconn.Conn) {
	t.Helper()
	if _, err := from.Write([]byte("unread")); err != nil {
		t.Fatal(err)
	}
	if _, err := to.Peek(); err != nil {
		t.Fatal(err)
	}
	to.Discard(0)
}

// awaitLeaving waits until a connection is on its way back to TCP.
func awaitLeaving(t *testing.T, c *sanconn.Conn) {
	t.Helper()
	testenv.Eventually(t, patience, func() error {
		if !sanconn.Leaving(c) {
			return errors.New("it does not leave")
		}
		return nil
	})
}

// awaitLeft waits until a connection is not on its way back to TCP any more.
func awaitLeft(t *testing.T, c *sanconn.Conn) {
	t.Helper()
	testenv.Eventually(t, patience, func() error {
		if sanconn.Leaving(c) {
			return errors.New("it has not left")
		}
		return nil
	})
}

// byHand is a session on b's side without b, so that a test decides what that side sends when a moves
// and leaves.
type byHand struct {
	*session.Session
	a, b   *sanconn.Conn // b holds the other end of TCP
	ea, eb *twin.Endpoint
}

// movedByHand returns a byHand that has agreed to a's proposal, and has sent begin with that position.
// After that it calls proposed, and leaves when a's leave has come. Either may be nil.
func movedByHand(t *testing.T, limits session.Limits, begin uint64, proposed, leaves func(p *byHand)) *byHand {
	t.Helper()
	return movedByHandTo(t, session.Config{}, limits, begin, proposed, leaves)
}

// movedByHandTo is movedByHand with a configuration of a's session.
func movedByHandTo(t *testing.T, cfg session.Config, limits session.Limits, begin uint64, proposed, leaves func(p *byHand)) *byHand {
	t.Helper()
	p := new(byHand)
	var err error
	if p.a, p.b, err = newPair(newconn.Config{}, newconn.Config{}); err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, p.a, p.b)
	p.ea, p.eb = twin.Pair(twin.Config{Limits: limits})
	p.Session = session.New(p.eb, session.Config{Accepting: true, OnNote: func(note []byte) {
		switch {
		case len(note) == 0: // the end of the session
		case note[0] == newconn.NoteProposal:
			p.SendNote([]byte{newconn.NoteAnswer, 1})
			if begin != noBegin {
				p.SendNote(noteAt(newconn.NoteBegin, begin))
			}
			if proposed != nil {
				proposed(p)
			}
		case note[0] == newconn.NoteLeave && leaves != nil:
			leaves(p)
		}
	}})
	go p.Negotiate(t.Context())
	if err := connpair.Propose(t.Context(), p.a, p.ea, cfg, nil); err != nil {
		t.Fatal(err)
	}
	return p
}

// noBegin stands for a peer that sends no begin.
const noBegin = 1 << 63

// noteAt returns a note with a position.
func noteAt(kind byte, at uint64) []byte { return binary.LittleEndian.AppendUint64([]byte{kind}, at) }
