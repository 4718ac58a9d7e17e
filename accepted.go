package san

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"
	"weak"

	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/tcpid"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

// offerTimeout bounds how long a process that has connected may take to offer a connection,
// even with busy processors at both ends.
const offerTimeout = 10 * time.Second

// accepted are the connections of this process that others may offer to move, until they are
// closed, or the program has forgotten them. A sync.Map, which gets smaller again, takes three times
// as long: half a percent of an accept.
var accepted = struct {
	mu    sync.Mutex // guards conns
	conns map[tcpid.Ends]weak.Pointer[sanconn.Conn]
}{conns: make(map[tcpid.Ends]weak.Pointer[sanconn.Conn])}

// acceptedAt returns the connection with these addresses, nil if there is none.
func acceptedAt(e tcpid.Ends) *sanconn.Conn {
	accepted.mu.Lock()
	defer accepted.mu.Unlock()
	return accepted.conns[e].Value()
}

// register makes an accepted connection known, so that its dialer can have it moved.
func register(c *sanconn.Conn, tcp *net.TCPConn, l *life) {
	var err error
	if l.ends, err = tcpid.EndsOf(tcp); err != nil {
		return // it is closed already
	}
	l.conn = weak.Make(c)
	accepted.mu.Lock()
	defer accepted.mu.Unlock()
	accepted.conns[l.ends] = l.conn
}

// unregister ends that, unless the addresses are another's by now.
func unregister(l *life) {
	accepted.mu.Lock()
	defer accepted.mu.Unlock()
	if accepted.conns[l.ends] == l.conn {
		delete(accepted.conns, l.ends)
	}
}

// receive takes an endpoint by which another process may offer to move a connection. It does
// not block.
func receive(ep came, cfg session.Config) {
	t := &taker{came: ep, over: make(chan struct{})}
	cfg.Accepting = true
	cfg.OnNote = t.note
	t.session = session.New(ep.Endpoint, cfg)
	go t.run()
}

// taker waits for the offer on a session, and takes it.
type taker struct {
	came
	session *session.Session
	over    chan struct{} // closed by the first note, or the session's end
	taken   func(*session.Session, []byte)
	decided bool
}

func (t *taker) run() {
	ctx, cancel := context.WithTimeout(context.Background(), offerTimeout)
	defer cancel()
	if err := t.session.Negotiate(ctx); err != nil {
		t.session.Abort()
		return
	}
	select {
	case <-t.over:
	case <-ctx.Done():
		t.session.Abort()
	}
}

// note takes the peer's notes: the first is its offer, the others are the connection's.
func (t *taker) note(note []byte) {
	switch {
	case t.taken != nil:
		t.taken(t.session, note)
	case t.decided:
	default:
		t.decided = true
		defer close(t.over)
		if a := t.take(note); a.code != answerMoves {
			t.session.SendNote(append([]byte{newconn.NoteAnswer}, a.encode()...))
			t.session.Close()
		}
	}
}

// take takes the offer, if it is one for a connection of this process.
func (t *taker) take(note []byte) answer {
	if len(note) == 0 || note[0] != newconn.NoteOffer {
		return answer{code: answerOther}
	}
	offer, err := parseHello(note[1:])
	if err != nil {
		return answer{code: answerOther}
	}
	c := acceptedAt(offer.ends.Reversed())
	if c == nil {
		return answer{code: answerUnknown}
	}
	h := newconn.HandleOf(c)
	l := h.Life().(*life)
	a := t.judge(offer, h, l)
	if a.code != answerMoves {
		return a
	}
	if h.Ended() { // there is nothing to decide
		l.failed(errEnded)
		return answer{code: answerStays}
	}
	switch decided, err := t.condition(l); {
	case !decided:
		return answer{code: answerUnknown, stamp: a.stamp, undecided: true}
	case err != nil:
		return answer{code: answerRefused, stamp: a.stamp}
	}
	t.taken = h.Notes()
	if err := h.Take(t.session, a.encode()); err != nil {
		t.taken = nil
		l.failed(unavailableOf(err))
		return answer{code: answerStays}
	}
	return a
}

// judge compares what the offer says of its TCP connection with what is known of it here.
func (t *taker) judge(offer hello, h newconn.Handle, l *life) answer {
	if l.guesses.Load() >= mostGuesses {
		return answer{code: answerStays}
	}
	if offer.stamped {
		if t.user != nil {
			return answer{code: answerOther} // who is here can learn stamps, and shall show cookies
		}
		if t.outside && isHere(h.TCP()) {
			return answer{code: answerOther}
		}
		half, ok := l.answerStamp(h.TCP(), offer.challenge)
		if !ok {
			return answer{code: answerOther}
		}
		return answer{code: answerMoves, stamp: half}
	}
	if t.user == nil {
		return answer{code: answerOther} // cookies are for those who are here
	}
	cookie, err := tcpid.Cookie(h.TCP())
	if err != nil {
		return answer{code: answerOther}
	}
	if cookie != offer.peerCookie {
		return answer{code: answerUnknown}
	}
	peer, err := tcpid.Peer(h.TCP())
	if err != nil || peer.Cookie != offer.cookie || peer.UID != *t.user {
		return answer{code: answerOther}
	}
	return answer{code: answerMoves}
}

// isHere reports whether a connection's other end may be in the same network namespace.
func isHere(tcp *net.TCPConn) bool {
	_, err := tcpid.Peer(tcp)
	return !errors.Is(err, tcpid.ErrNotHere)
}

// mostGuesses is how many offers with a wrong stamp a connection takes, and how many such
// answers; then it stays on TCP. One guess in some thousand is right.
const mostGuesses = 3
