package san

import (
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
	"weak"

	"github.com/sanconn/san/internal/hello"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/tcpid"
	"github.com/sanconn/san/sanconn"
)

// life is what this package knows of a connection beside the connection itself, which it
// does not keep alive. It implements newconn.Life.
type life struct {
	dialed  bool         // by this process; else it was accepted
	over    bool         // it is closed: a move that ends only now is not counted as open; guarded by mu
	guesses atomic.Int32 // stamps from others that were wrong
	tries   atomic.Int32 // moves that failed
	plan    *plan        // how this end has it move; nil: only the other end does
	held    io.Closer    // what has it found by its dialer; nil: nothing

	ends tcpid.Ends                 // of one that was accepted, as the table has them
	conn weak.Pointer[sanconn.Conn] // likewise
	why  atomic.Pointer[Unavailable]

	condition func(MoveOffer) error // of the listener that accepted it; or nil

	mu      sync.Mutex // guards what follows
	carrier string     // the provider that it has moved to, and is counted as open on; "": none
	stamps  func() ([]tcpid.Stamp, error)

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

// stampsOnce remembers stamps, which the kernel tells but once.
func (l *life) stampsOnce(read func() ([]tcpid.Stamp, error)) ([]tcpid.Stamp, error) {
	l.mu.Lock()
	if l.stamps == nil {
		l.stamps = sync.OnceValues(read)
	}
	stamps := l.stamps
	l.mu.Unlock()
	return stamps()
}

// dialerStamps are what may be the stamp of a connection that was dialed. The first call has
// to be before anything is sent.
func (l *life) dialerStamps(tcp *net.TCPConn, began time.Time) ([]tcpid.Stamp, error) {
	return l.stampsOnce(func() ([]tcpid.Stamp, error) { return tcpid.DialerStamps(tcp, began) })
}

// prove has a move tried with each stamp that a connection may have, until the peer does not
// take this end for another one.
func (l *life) prove(tcp *net.TCPConn, move func(tcpid.Stamp) error) error {
	stamps, err := l.dialerStamps(tcp, time.Time{})
	if err != nil {
		return &Unavailable{Reason: ReasonNotServed, Err: err}
	}
	for _, stamp := range stamps {
		if err = move(stamp); !errors.Is(err, hello.ErrOther) {
			break
		}
	}
	return err
}

// confirm returns why an answer to the connection's challenge is not from its other end.
func (l *life) confirm(stamp tcpid.Stamp, a hello.Answer) error {
	if stamp.Confirm(a.Stamp) {
		return nil
	}
	l.guesses.Add(1)
	return &Unavailable{Reason: ReasonOwner, Err: hello.ErrImpostor}
}

// answerStamp returns the acceptor's half of an accepted connection's stamp, unless the challenge
// is not its dialer's.
func (l *life) answerStamp(tcp *net.TCPConn, challenge uint16) (half uint16, ok bool) {
	s, err := l.stampsOnce(func() ([]tcpid.Stamp, error) {
		s, err := tcpid.AcceptorStamp(tcp)
		return []tcpid.Stamp{s}, err
	})
	if err != nil || l.guesses.Load() >= mostGuesses {
		return 0, false
	}
	if half, ok = s[0].Answer(challenge); !ok {
		l.guesses.Add(1)
	}
	return half, ok
}
