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

// Life is what is known of a connection beside the connection itself, which it does not keep
// alive. It implements newconn.Life.
type Life struct {
	// As it is made, by package san for a connection that was accepted:
	Plan      *Plan     // how this end has it move; nil: only the other end does
	Held      io.Closer // what has it found by its dialer; nil: nothing
	Condition Condition // of the listener that accepted it; or nil

	dialed bool                 // by this process; else it was accepted
	over   bool                 // it is closed: a move that ends only now is not counted as open; guarded by mu
	tries  atomic.Int32         // moves that failed since the last that did not, but for those for urgent data
	own    *session.Unavailable // why the last move that this end has tried failed; nil: none did
	proof  tcpid.Proof

	ends tcpid.Ends                 // of one that was accepted, as the table has them
	conn weak.Pointer[sanconn.Conn] // likewise
	why  atomic.Pointer[session.Unavailable]

	mu      sync.Mutex // guards what follows
	carrier string     // the provider that it has moved to, and is counted as open on; "": none

	proposed, givenUp bool // its other end has proposed to move, and was not refused; no proposal is taken any more

	decisions map[asked]chan error // of Condition, about proposals that have not had their answer
}

// LifeOf returns the Life of a connection.
func LifeOf(c *sanconn.Conn) *Life { return lifeOf(newconn.HandleOf(c)) }

func lifeOf(h newconn.Handle) *Life { return h.Life().(*Life) }

// Used has a connection move that has been used enough.
func (l *Life) Used(h newconn.Handle, urgent bool) {
	if l.Plan != nil {
		l.Plan.moveLater(h, false, urgent)
	}
}

// Holds reports whether it is found by its dialer, before it has moved.
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

// Left counts a connection that has gone back to TCP, and notes why.
func (l *Life) Left(why error) {
	l.mu.Lock()
	l.uncountLocked()
	l.mu.Unlock()
	if why != nil {
		l.Failed(reason.Of(why))
	}
}

// Closed counts a connection that is closed, and ends its being found.
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

// GiveUp reports whether there is no proposal, and then has none taken from now on.
func (l *Life) GiveUp() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.givenUp = !l.proposed
	return l.givenUp
}

// propose notes whether there is a proposal, and reports whether that may be taken.
func (l *Life) propose(is bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.proposed = is && !l.givenUp
	return l.proposed
}

// Failed notes why a connection has not moved.
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

// WhyOnTCP is why a connection is on TCP.
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
	return unused // it moves just now, or has come back
}
