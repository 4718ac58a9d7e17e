package moving

import (
	"context"
	"errors"
	"maps"
	"net"
	"sync"
	"sync/atomic"
	"time"
	"weak"

	"github.com/sanconn/san/internal/hello"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/reason"
	"github.com/sanconn/san/internal/tcpid"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

// ProposalTimeout is the time in which a process that has connected must propose a move. It is enough
// on busy processors at both ends.
const ProposalTimeout = 10 * time.Second

// accepted has the connections of this process that others may propose to move, until they are closed
// or collected.
var accepted = connTable{conns: make(map[tcpid.Ends]weak.Pointer[sanconn.Conn])}

// connTable finds connections by their addresses, and does not keep them alive. A sync.Map would take
// three times as long, which is half a percent of an accept.
type connTable struct {
	mu    sync.Mutex // guards the fields below
	conns map[tcpid.Ends]weak.Pointer[sanconn.Conn]
	most  int // the largest length of conns since it was made; a map does not shrink by itself
}

// at returns the connection with these addresses, or nil.
func (t *connTable) at(e tcpid.Ends) *sanconn.Conn {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.conns[e].Value()
}

func (t *connTable) add(e tcpid.Ends, c weak.Pointer[sanconn.Conn]) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.conns[e] = c
	t.most = max(t.most, len(t.conns))
}

// remove removes a connection, unless its addresses belong to another one by now.
func (t *connTable) remove(e tcpid.Ends, c weak.Pointer[sanconn.Conn]) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.conns[e] == c {
		delete(t.conns, e)
	}
	if n := len(t.conns); t.most >= fewConns && n <= t.most/16 {
		t.conns, t.most = maps.Collect(maps.All(t.conns)), n
	}
}

// fewConns is the size below which the table is not made smaller.
const fewConns = 1 << 10

// TakeOn makes a Conn around an accepted TCP connection, and lets its dialer find it.
func (l *Life) TakeOn(tcp *net.TCPConn, cfg newconn.Config) *sanconn.Conn {
	l.why.Store(notProposed)
	if l.Plan != nil { // this may be the dialing end
		l.why.Store(unused)
	}
	cfg.Life = l
	conn := newconn.New(tcp, cfg).(*sanconn.Conn)
	var err error
	if l.ends, err = tcpid.EndsOf(tcp); err == nil { // an error means that it is closed already
		l.conn = weak.Make(conn)
		accepted.add(l.ends, l.conn)
	}
	Count(func(n *Counters) { n.Accepted[TCP]++ })
	return conn
}

// Receive handles an endpoint by which another process may propose to move a connection. It does not
// block.
func Receive(ep Came, cfg session.Config) {
	t := &taker{Came: ep, over: make(chan struct{})}
	cfg.Accepting = true
	cfg.OnNote = t.note
	t.session = session.New(ep.Endpoint, cfg)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), ProposalTimeout)
		defer cancel()
		t.run(ctx)
	}()
}

// taker waits for the proposal on a session, and answers it.
type taker struct {
	Came
	session *session.Session
	over    chan struct{} // closed after the first note was handled
	notes   func(*session.Session, []byte)
	decided atomic.Bool // the first note has come, or the time for it is over
}

// run waits for the proposal. If the proposal came before ctx ended, the session is left alone: a
// connection may have it by now.
func (t *taker) run(ctx context.Context) {
	if t.session.Negotiate(ctx) == nil {
		select {
		case <-t.over:
		case <-ctx.Done():
		}
	}
	if !t.decided.Swap(true) {
		t.session.Abort()
	}
}

// note handles the peer's notes. The first one is the proposal; the connection handles the later ones.
func (t *taker) note(note []byte) {
	switch {
	case t.notes != nil:
		t.notes(t.session, note)
	case t.decided.Swap(true):
	default:
		defer close(t.over)
		if a := t.answer(note); a.Code != hello.Moves {
			t.session.SendNote(append([]byte{newconn.NoteAnswer}, a.Encode()...))
			t.session.Close()
		}
	}
}

// answer decides about a proposal to move a connection of this process, and moves the connection.
func (t *taker) answer(note []byte) hello.Answer {
	if len(note) == 0 || note[0] != newconn.NoteProposal {
		return hello.Answer{Code: hello.Other}
	}
	proposal, err := hello.ParseProposal(note[1:])
	if err != nil {
		return hello.Answer{Code: hello.Other}
	}
	c := accepted.at(proposal.Ends.Reversed())
	if c == nil {
		return hello.Answer{Code: hello.Unknown}
	}
	h := newconn.HandleOf(c)
	l := lifeOf(h)
	a := t.judge(proposal, h, l)
	if a.Code != hello.Moves {
		return a
	}
	if h.Shut() { // then the condition need not decide
		l.Failed(ErrShut)
		return hello.Answer{Code: hello.Stays}
	}
	if !l.propose(true) {
		return hello.Answer{Code: hello.Stays}
	}
	switch decided, err := t.condition(l); {
	case !decided:
		return hello.Answer{Code: hello.Unknown, Stamp: a.Stamp, Undecided: true}
	case err != nil:
		l.propose(false)
		return hello.Answer{Code: hello.Refused, Stamp: a.Stamp}
	}
	if err := h.Accept(t.session, a.Encode()); err != nil {
		l.Failed(reason.Of(err))
		return hello.Answer{Code: hello.Stays}
	}
	t.notes = h.Notes() // the next note is delivered after this one
	return a
}

// judge compares what the proposal tells about its TCP connection with what this process knows of it.
func (t *taker) judge(proposal hello.Proposal, h newconn.Handle, l *Life) hello.Answer {
	if l.proof.Guessed() {
		return hello.Answer{Code: hello.Stays}
	}
	if proposal.Stamped {
		if t.User != nil {
			return hello.Answer{Code: hello.Other} // a process of this network namespace can learn stamps, and has to show cookies
		}
		if t.outside {
			if _, err := tcpid.Peer(h.TCP()); !errors.Is(err, tcpid.ErrNotHere) { // the peer may be in this namespace
				return hello.Answer{Code: hello.Other}
			}
		}
		half, ok := l.proof.Answer(h.TCP(), proposal.Challenge)
		if !ok {
			return hello.Answer{Code: hello.Other}
		}
		return hello.Answer{Code: hello.Moves, Stamp: half}
	}
	if t.User == nil {
		return hello.Answer{Code: hello.Other} // only a process of this network namespace may show cookies
	}
	cookie, err := tcpid.Cookie(h.TCP())
	if err == nil && cookie != proposal.PeerCookie {
		return hello.Answer{Code: hello.Unknown}
	}
	var peer tcpid.Socket
	if err == nil {
		peer, err = tcpid.Peer(h.TCP())
	}
	switch {
	case err != nil && !errors.Is(err, tcpid.ErrNotHere): // as in a sandbox; the dialer knows nothing of that
		l.Failed(reason.Of(err))
		return hello.Answer{Code: hello.Stays}
	case err != nil, peer.Cookie != proposal.Cookie, peer.UID != *t.User:
		return hello.Answer{Code: hello.Other}
	}
	return hello.Answer{Code: hello.Moves}
}
