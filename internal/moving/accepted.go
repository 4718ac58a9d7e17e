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

// ProposalTimeout bounds how long a process that has connected may take to propose a move,
// even with busy processors at both ends.
const ProposalTimeout = 10 * time.Second

// accepted are the connections of this process that others may propose to move, until they are
// closed, or the program has forgotten them.
var accepted = connTable{conns: make(map[tcpid.Ends]weak.Pointer[sanconn.Conn])}

// connTable has connections by their addresses, and does not keep them alive. A sync.Map takes
// three times as long: half a percent of an accept.
type connTable struct {
	mu    sync.Mutex // guards what follows
	conns map[tcpid.Ends]weak.Pointer[sanconn.Conn]
	most  int // that conns, which does not get smaller by itself, has had since it was made
}

// at returns the connection with these addresses, nil if there is none.
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

// remove removes a connection, unless the addresses are another's by now.
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

// fewConns are not worth making a table smaller for.
const fewConns = 1 << 10

// TakeOn makes a connection of one that was accepted by TCP, and has it found by its dialer.
func (l *Life) TakeOn(tcp *net.TCPConn, cfg newconn.Config) *sanconn.Conn {
	l.why.Store(notProposed)
	if l.Plan != nil { // it may be the dialed end
		l.why.Store(unused)
	}
	cfg.Life = l
	conn := newconn.New(tcp, cfg).(*sanconn.Conn)
	var err error
	if l.ends, err = tcpid.EndsOf(tcp); err == nil { // else it is closed already
		l.conn = weak.Make(conn)
		accepted.add(l.ends, l.conn)
	}
	Count(func(n *Counters) { n.Accepted[TCP]++ })
	return conn
}

// Receive takes an endpoint by which another process may propose to move a connection. It does
// not block.
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

// taker waits for the proposal on a session, and takes it.
type taker struct {
	Came
	session *session.Session
	over    chan struct{} // closed behind the first note, or the session's end
	notes   func(*session.Session, []byte)
	decided atomic.Bool // by the first note, or it was waited for in vain
}

// run waits for the proposal. One that is being taken when ctx ends, or was, has come in time: the
// connection may have the session.
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

// note takes the peer's notes: the first is its proposal, the others are the connection's.
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

// answer takes the proposal, if it is one for a connection of this process.
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
	if h.Shut() { // there is nothing to decide
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
	t.notes = h.Notes() // the next note waits for this one
	return a
}

// judge compares what the proposal says of its TCP connection with what is known of it here.
func (t *taker) judge(proposal hello.Proposal, h newconn.Handle, l *Life) hello.Answer {
	if l.proof.Guessed() {
		return hello.Answer{Code: hello.Stays}
	}
	if proposal.Stamped {
		if t.User != nil {
			return hello.Answer{Code: hello.Other} // who is here can learn stamps, and shall show cookies
		}
		if t.outside {
			if _, err := tcpid.Peer(h.TCP()); !errors.Is(err, tcpid.ErrNotHere) { // it may be in this one
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
		return hello.Answer{Code: hello.Other} // cookies are for those who are here
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
	case err != nil && !errors.Is(err, tcpid.ErrNotHere): // as in a sandbox, of which the dialer knows nothing
		l.Failed(reason.Of(err))
		return hello.Answer{Code: hello.Stays}
	case err != nil, peer.Cookie != proposal.Cookie, peer.UID != *t.User:
		return hello.Answer{Code: hello.Other}
	}
	return hello.Answer{Code: hello.Moves}
}
