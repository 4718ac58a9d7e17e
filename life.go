package san

import (
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"weak"

	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/tcpid"
	"github.com/sanconn/san/sanconn"
)

// life is what this package knows of a connection beside the connection itself, which it
// does not keep alive. It implements newconn.Life.
type life struct {
	dialed bool         // by this process; else it was accepted
	over   bool         // it is closed: a move that ends only now is not counted as open; guarded by mu
	tries  atomic.Int32 // moves that failed
	proof  tcpid.Proof
	plan   *plan     // how this end has it move; nil: only the other end does
	held   io.Closer // what has it found by its dialer; nil: nothing

	ends tcpid.Ends                 // of one that was accepted, as the table has them
	conn weak.Pointer[sanconn.Conn] // likewise
	why  atomic.Pointer[Unavailable]

	condition condition // of the listener that accepted it; or nil

	mu      sync.Mutex // guards what follows
	carrier string     // the provider that it has moved to, and is counted as open on; "": none

	decisions map[asked]*decision // of condition, about offers that have not had their answer
}

// Used has a connection move that has been used enough.
func (l *life) Used(h newconn.Handle) {
	if l.plan != nil {
		l.plan.moveLater(h, l, false)
	}
}

// Holds reports whether it is found by its dialer, before it has moved.
func (l *life) Holds() bool { return !l.dialed }

// Moved counts a connection that has moved.
func (l *life) Moved(provider string) {
	l.why.Store(nil)
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.over {
		l.carrier = provider
	}
	count(func(n *Counters) {
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

// Left counts a connection that has gone back to TCP.
func (l *life) Left() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.leftLocked()
}

// Closed counts a connection that is closed, and ends its being found.
func (l *life) Closed() {
	l.mu.Lock()
	l.over = true
	l.leftLocked()
	l.mu.Unlock()
	if !l.dialed {
		accepted.remove(l.ends, l.conn)
	}
	if l.held != nil {
		l.held.Close()
	}
}

func (l *life) leftLocked() {
	if p := l.carrier; p != "" {
		l.carrier = ""
		count(func(n *Counters) { n.Open[p]-- })
	}
}

// failed notes why a connection has not moved.
func (l *life) failed(why *Unavailable) {
	l.why.Store(why)
	count(func(n *Counters) { n.Fallbacks[why.Reason]++ })
}

// The reasons of connections for which nothing has failed.
var (
	unused        = &Unavailable{Reason: ReasonUnused}    // nothing has been tried yet
	notOffered    = &Unavailable{Reason: ReasonPeerPlain} // its dialer has not tried to move it
	errEnded      = &Unavailable{Reason: ReasonStays, Err: errors.New("it has ended")}
	errDescriptor = &Unavailable{Reason: ReasonStays, Err: errors.New("the program has taken its descriptor")}
)

// onTCP is why a connection is on TCP.
func (l *life) onTCP(h newconn.Handle) *Unavailable {
	switch why := l.why.Load(); {
	case h.Stays():
		return errDescriptor
	case h.Ended() && (why == nil || why == unused):
		return errEnded
	case why != nil:
		return why
	}
	return unused // it moves just now, or has come back
}
