package san

import (
	"context"
	"errors"
	"net"
	"net/netip"
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

// accepted are the connections of this process that others may offer to move.
var accepted = acceptedConns{byEnds: make(map[tcpid.Ends]acceptedConn)}

type acceptedConns struct {
	mu     sync.Mutex // guards what follows
	byEnds map[tcpid.Ends]acceptedConn
	sweep  int // the size at which those are removed that the program has forgotten
}

// acceptedConn is one of them. The table does not keep it alive.
type acceptedConn struct {
	conn weak.Pointer[sanconn.Conn]
	life *life
}

func (a *acceptedConns) add(e tcpid.Ends, c acceptedConn) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.byEnds[e] = c
	if len(a.byEnds) < a.sweep {
		return
	}
	for e, c := range a.byEnds {
		if c.conn.Value() == nil {
			delete(a.byEnds, e)
		}
	}
	a.sweep = max(2*len(a.byEnds), 1024)
}

// remove removes a connection, unless the addresses are another's by now.
func (a *acceptedConns) remove(e tcpid.Ends, l *life) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.byEnds[e].life == l {
		delete(a.byEnds, e)
	}
}

func (a *acceptedConns) find(e tcpid.Ends) (acceptedConn, *sanconn.Conn) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c := a.byEnds[e]
	return c, c.conn.Value()
}

// withoutZone is an address as both ends know it: a zone is each host's own.
func withoutZone(e tcpid.Ends) tcpid.Ends {
	bare := func(a netip.AddrPort) netip.AddrPort {
		return netip.AddrPortFrom(a.Addr().Unmap().WithZone(""), a.Port())
	}
	return tcpid.Ends{Local: bare(e.Local), Remote: bare(e.Remote)}
}

// register makes an accepted connection known, so that its dialer can have it moved.
func register(c *sanconn.Conn, tcp *net.TCPConn, l *life) {
	ends, err := tcpid.EndsOf(tcp)
	if err != nil {
		return // closed already
	}
	l.ends = withoutZone(ends)
	accepted.add(l.ends, acceptedConn{weak.Make(c), l})
}

// receive takes an endpoint by which another process may offer to move a connection. It does
// not block.
func receive(ep came, cfg session.Config) {
	r := &receiver{came: ep, over: make(chan struct{})}
	cfg.Accepting = true
	cfg.OnNote = r.note
	r.session = session.New(ep.Endpoint, cfg)
	go r.run()
}

// receiver waits for the offer on a session.
type receiver struct {
	came
	session *session.Session
	over    chan struct{} // closed by the first note, or the session's end
	taken   func(*session.Session, []byte)
	decided bool
}

func (r *receiver) run() {
	ctx, cancel := context.WithTimeout(context.Background(), offerTimeout)
	defer cancel()
	if err := r.session.Negotiate(ctx); err != nil {
		r.session.Abort()
		return
	}
	select {
	case <-r.over:
	case <-ctx.Done():
		r.session.Abort()
	}
}

// note takes the peer's notes: the first is its offer, the others are the connection's.
func (r *receiver) note(note []byte) {
	switch {
	case r.taken != nil:
		r.taken(r.session, note)
	case r.decided:
	default:
		r.decided = true
		defer close(r.over)
		if a := r.take(note); a.code != answerMoves {
			r.session.SendNote(append([]byte{newconn.NoteAnswer}, a.encode()...))
			r.session.Close()
		}
	}
}

// take takes the offer, if it is one for a connection of this process.
func (r *receiver) take(note []byte) answer {
	if len(note) == 0 || note[0] != newconn.NoteOffer {
		return answer{code: answerOther}
	}
	offer, err := parseHello(note[1:])
	if err != nil {
		return answer{code: answerOther}
	}
	entry, c := accepted.find(withoutZone(offer.ends.Reversed()))
	if c == nil {
		return answer{code: answerUnknown}
	}
	h := newconn.HandleOf(c)
	a := r.judge(offer, h, entry.life)
	if a.code != answerMoves {
		return a
	}
	if r.condition(entry.life.ends, entry.life) != nil {
		return answer{code: answerRefused, stamp: a.stamp}
	}
	r.taken = h.Notes()
	if err := h.Take(r.session, a.encode()); err != nil {
		r.taken = nil
		return answer{code: answerStays}
	}
	entry.life.moved(r.provider, false)
	return a
}

// judge compares what the offer says of its TCP connection with what is known of it here.
func (r *receiver) judge(offer hello, h newconn.Handle, l *life) answer {
	if l.guesses.Load() >= mostGuesses {
		return answer{code: answerStays}
	}
	if offer.stamped {
		if r.user != nil {
			return answer{code: answerOther} // who is here can learn stamps, and shall show cookies
		}
		if r.outside && isHere(h.TCP()) {
			return answer{code: answerOther}
		}
		stamp, err := l.acceptorStamp(h.TCP())
		if err != nil {
			return answer{code: answerOther}
		}
		half, ok := stamp.Answer(offer.challenge)
		if !ok {
			l.guesses.Add(1)
			return answer{code: answerOther}
		}
		return answer{code: answerMoves, stamp: half}
	}
	if r.user == nil {
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
	if err != nil || peer.Cookie != offer.cookie || peer.UID != *r.user {
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
