package moving

import (
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"weak"

	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/reason"
	"github.com/sanconn/san/internal/tcpid"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

// Life is what is known of a connection. It does not keep the connection alive. It implements
// newconn.Life.
type Life struct {
	// Set by package san, which makes it for a connection that was accepted:
	Plan      *Plan     // how this end moves it; nil: only the other end does
	Held      io.Closer // lets its dialer find it; or nil
	Condition Condition // of the listener that accepted it; or nil

	dialed bool                 // this process has dialed it; otherwise it was accepted
	over   bool                 // it is closed: a move that ends later does not count as open; guarded by mu
	tries  atomic.Int32         // moves that failed since the last success, without those for urgent data
	own    *session.Unavailable // why the last move that this end has tried failed; or nil
	proof  tcpid.Proof

	ends tcpid.Ends                 // of an accepted connection, as the table has them
	conn weak.Pointer[sanconn.Conn] // of an accepted connection
	why  atomic.Pointer[session.Unavailable]

	mu      sync.Mutex // guards the fields below, and over
	carrier string     // the provider that it has moved to, and is counted as open on; "": none

	proposed, givenUp bool // the other end has proposed to move, and was not refused; no proposal is accepted any more

	decisions map[asked]chan error // of Condition, for proposals that have not been answered with them
}

// LifeOf returns the Life of a connection.
func LifeOf(c *sanconn.Conn) *Life { return lifeOf(newconn.HandleOf(c)) }

func lifeOf(h newconn.Handle) *Life { return h.Life().(*Life) }

// Used moves a connection that has been used enough.
func (l *Life) Used(h newconn.Handle, urgent bool) {
	if l.Plan != nil {
		l.Plan.moveLater(h, false, urgent)
	}
}

// Holds reports whether its dialer finds the connection before it has moved, which ends with Closed.
func (l *Life) Holds() bool { return !l.dialed }

// Moved counts a connection that has moved.
func (l *Life) Moved(provider string) {
	l.why.Store(nil)
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.over {
		l.carrier = provider
	}
	Count(func(n *Counters) {
		if !l.over {
			n.Open[provider]++
		}
		if l.dialed {
			n.Dialed[provider]++
		} else {
			n.Accepted[provider]++
		}
	})
}

// Left counts a connection that has gone back to TCP, and keeps the reason, if there is one.
func (l *Life) Left(why error) {
	l.mu.Lock()
	l.uncountLocked()
	l.mu.Unlock()
	if why != nil {
		l.Failed(reason.Of(why))
	}
}

// Closed counts a connection that is closed. Its dialer does not find it any more.
func (l *Life) Closed() {
	l.mu.Lock()
	l.over = true
	l.uncountLocked()
	l.mu.Unlock()
	if !l.dialed {
		accepted.remove(l.ends, l.conn)
	}
	if l.Held != nil {
		l.Held.Close()
	}
}

func (l *Life) uncountLocked() {
	if p := l.carrier; p != "" {
		l.carrier = ""
		Count(func(n *Counters) { n.Open[p]-- })
	}
}

// GiveUp reports whether there was no proposal. If so, none is accepted from now on.
func (l *Life) GiveUp() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.givenUp = !l.proposed
	return l.givenUp
}

// propose sets whether there is a proposal, and reports whether it may be accepted.
func (l *Life) propose(is bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.proposed = is && !l.givenUp
	return l.proposed
}

// Failed keeps and counts the reason why a connection has not moved.
func (l *Life) Failed(why *session.Unavailable) {
	l.why.Store(why)
	Count(func(n *Counters) { n.Fallbacks[why.Reason]++ })
}

// Reasons that are known without an attempt to move.
var (
	unused        = &session.Unavailable{Reason: session.ReasonUnused}    // nothing has been tried yet
	notProposed   = &session.Unavailable{Reason: session.ReasonPeerPlain} // its dialer has not tried to move it
	ErrShut       = &session.Unavailable{Reason: session.ReasonStays, Err: errors.New("it has ended")}
	errDescriptor = &session.Unavailable{Reason: session.ReasonStays, Err: errors.New("the program has taken its descriptor")}
)

// WhyOnTCP returns why a connection is on TCP.
func WhyOnTCP(c *sanconn.Conn) *session.Unavailable {
	h := newconn.HandleOf(c)
	switch why := lifeOf(h).why.Load(); {
	case h.Stays():
		return errDescriptor
	case h.Shut() && (why == nil || why == unused):
		return ErrShut
	case why != nil:
		return why
	}
	return unused // it is moving now, or has come back
}
