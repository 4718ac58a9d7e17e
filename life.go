package san

import (
	"net"
	"sync"
	"sync/atomic"

	"github.com/sanconn/san/internal/tcpid"
)

// life is what this package knows of a connection beside the connection itself, which it
// does not keep alive.
type life struct {
	dialed  bool
	ends    tcpid.Ends   // of one that was accepted, as the table has them
	guesses atomic.Int32 // stamps from others that were wrong
	tries   atomic.Int32 // moves that failed
	why     atomic.Pointer[Unavailable]

	mu      sync.Mutex // guards what follows
	carrier string     // the provider that it has moved to, and is counted as open on; "": none
	over    bool       // it is closed: a move that ends only now is not counted as open
	stamp   func() (tcpid.Stamp, error)
}

// moved counts a connection that has moved.
func (l *life) moved(provider string, dialed bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.over {
		l.carrier = provider
	}
	count(func(n *Counters) {
		if !l.over {
			n.Open[provider]++
		}
		if dialed {
			n.Dialed[provider]++
		} else {
			n.Accepted[provider]++
		}
	})
}

// left counts a connection that has gone back to TCP.
func (l *life) left() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.leftLocked()
}

// closed counts a connection that is closed.
func (l *life) closed() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.over = true
	l.leftLocked()
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

// stampOnce remembers a stamp, which the kernel tells but once.
func (l *life) stampOnce(read func() (tcpid.Stamp, error)) (tcpid.Stamp, error) {
	l.mu.Lock()
	if l.stamp == nil {
		l.stamp = sync.OnceValues(read)
	}
	stamp := l.stamp
	l.mu.Unlock()
	return stamp()
}

// dialerStamp is the stamp of a connection that was dialed. The first call has to be before
// anything is sent.
func (l *life) dialerStamp(tcp *net.TCPConn) (tcpid.Stamp, error) {
	return l.stampOnce(func() (tcpid.Stamp, error) { return tcpid.DialerStamp(tcp) })
}

// confirm returns why an answer to the connection's challenge is not from its other end.
func (l *life) confirm(stamp tcpid.Stamp, a answer) error {
	if stamp.Confirm(a.stamp) {
		return nil
	}
	l.guesses.Add(1)
	return &Unavailable{Reason: ReasonOwner, Err: errImpostor}
}

func (l *life) acceptorStamp(tcp *net.TCPConn) (tcpid.Stamp, error) {
	return l.stampOnce(func() (tcpid.Stamp, error) { return tcpid.AcceptorStamp(tcp) })
}
