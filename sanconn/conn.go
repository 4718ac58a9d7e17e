// Package sanconn makes one net.Conn of two carriers: a TCP connection, on which each
// connection begins, and a session over a SAN, to which it moves and from which it can come
// back. It gives both the semantics of *net.TCPConn: deadlines, half-close, net's errors and
// addresses, and the optional interfaces that code for TCP connections looks for. It chooses
// no provider and does not decide when to move; package san does, and makes its connections.
//
// A program gets a *Conn from package san's Dial and Accept, as a net.Conn, and asserts the type
// for what net.Conn has not: memory that is lent (Reserve, Peek), urgent data, Stats and Debug.
// Options are fields of san.Dialer and san.ListenConfig.
package sanconn

import (
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/raceedge"
	"github.com/sanconn/san/session"
)

// Conn is a connection. It behaves as *net.TCPConn does, whichever carrier its bytes go by.
// All its methods may be called concurrently; the bytes of concurrent Writes are not mixed.
// Its errors are *net.OpError with the causes that TCP has, but for io.EOF and ErrNoUrgent,
// which are returned as they are.
//
//	handover.go             which carrier: the states and their transitions
//	outgoing.go incoming.go a direction on TCP
//	use.go                  how much went by it, until it is to move
//	move.go leave.go        to a session, as both ends agree, and back to TCP
//	cross.go                where in its stream each direction moves
//	descriptor.go           TCP's, which keeps the connection there while the program uses it
//	deadline.go close.go    what ends operations, and streams
type Conn struct {
	tcp       *net.TCPConn
	life      newconn.Life
	threshold int64 // see newconn.Config

	out outgoing
	in  incoming

	use    usage
	fd     tcpDescriptor
	closed atomic.Bool
	reset  atomic.Bool // SetLinger(0): Close is a reset

	mu      sync.Mutex // guards what follows; nothing that blocks under it
	state   handover
	session *session.Session          // committed to, or nil
	judge   func(answer []byte) error // of a proposal
	refused error                     // why the last one came to nothing
	inVain  error                     // why the way back to TCP was, behind which there is no other; nil: none was
	changed chan struct{}             // closed at the next change of state; nil: nobody waits for one
	keep    session.KeepAlive         // what the program has set
	past    *past                     // what is left of other sessions; nil: nothing
	cleanup runtime.Cleanup           // of a connection that the program forgets
}

// past is what is left of sessions that were left.
type past struct {
	Stats                // less what others had by TCP before
	urgent []byte        // that nobody has read
	kept   *atomic.Int64 // what the connection has of keptOfAll; nil: it has had nothing of it
}

// ErrNoUrgent is returned by ReadUrgent when no urgent data is waiting.
var ErrNoUrgent = session.ErrNoUrgent

// MaxUrgent is the largest urgent message in bytes: 64.
const MaxUrgent = session.MaxUrgent

func init() {
	newconn.New = func(tcp *net.TCPConn, cfg newconn.Config) net.Conn { return newConn(tcp, cfg) }
	newconn.HandleOf = func(c net.Conn) newconn.Handle { return handle{c.(*Conn)} }
}

// newConn is newconn.New.
func newConn(tcp *net.TCPConn, cfg newconn.Config) *Conn {
	c := &Conn{tcp: tcp, life: cfg.Life, threshold: cfg.Threshold}
	c.out.deadline.writes = true
	if cfg.PassedOn {
		c.fd.exposed.Store(1) // by those who had it
		c.out.written.Store(cfg.BytesWritten)
		c.in.bytes.Store(cfg.BytesRead)
		c.past = &past{Stats: Stats{TCPBytesSent: -cfg.BytesWritten, TCPBytesReceived: -cfg.BytesRead}}
	}
	c.use.again(cfg.Threshold)
	c.cleanUpLocked(nil)
	return c
}

// cleanUpLocked has a connection closed that the program forgets from now on, as in net, which
// closes TCP: with the session that it has committed to, or nil. mu is held.
func (c *Conn) cleanUpLocked(s *session.Session) {
	c.cleanup.Stop()
	if !c.closed.Load() && (s != nil || c.life.Holds()) {
		c.cleanup = runtime.AddCleanup(c, forgotten.close, forgotten{s, c.life})
	}
}

// forgotten is what is left of a connection that the program has forgotten.
type forgotten struct {
	session *session.Session
	life    newconn.Life
}

func (f forgotten) close() {
	go func() { // all cleanups of the process wait for each other
		if f.session != nil {
			f.session.Close() // bounded by Options.CloseTimeout
		}
		f.life.Closed()
	}()
}

// Read reads what has arrived into p, and blocks as long as nothing has. Once the
// peer has closed its direction and everything before that was read, it returns
// io.EOF. If the peer vanished, the error is ECONNRESET, or ETIMEDOUT if it stopped
// answering: once, and io.EOF behind it. A process of this host that ended without closing
// counts as closed, and the error is io.EOF, if it had read everything that came by the
// SAN and did not end in the middle of a Write.
func (c *Conn) Read(p []byte) (n int, err error) {
	if len(p) == 0 {
		if c.closed.Load() {
			err = c.opError(opRead, net.ErrClosed)
		}
		return 0, err
	}
	for {
		if s := c.in.san.Load(); s != nil {
			n, err := s.Read(p)
			raceedge.Acquire()
			switch {
			case err == nil, n > 0:
				return n, nil // the next Read finds the error again
			case err != session.ErrTaken:
				return 0, c.readError(err)
			}
		}
		if err := c.in.await(c); err != nil {
			return 0, err
		}
		c.in.op.Lock()
		n, err := c.in.readLocked(c, p)
		c.in.unlock(c)
		if err != errLook {
			return n, err
		}
	}
}

// Write writes all of p, or returns how many bytes it took and an error. After it has
// returned, p is not accessed any more. Bytes that it took may still be lost if this
// process or its host dies. The error is EPIPE or ECONNRESET where the peer does not
// read any more, ETIMEDOUT where it does not answer.
func (c *Conn) Write(p []byte) (int, error) {
	w := pendingWrite{p: p}
	if s := c.out.san.Load(); s != nil && !c.out.owned.Load() {
		// As the loop in write has it, but without its defer, which costs a tenth of a small Write.
		raceedge.Release()
		n, err := s.Write(p)
		if err == nil {
			return n, nil
		}
		w.p, w.n = p[n:], int64(n)
		if err = c.out.again(c, &w, err); err != errLook {
			return n, c.opError(opWrite, err)
		}
	}
	err := c.out.write(c, &w)
	return int(w.n), err
}

// LocalAddr returns this end's address, a *net.TCPAddr: the peer's RemoteAddr. It must
// not be changed.
func (c *Conn) LocalAddr() net.Addr { return c.tcp.LocalAddr() }

// RemoteAddr returns the peer's address, a *net.TCPAddr: the peer's LocalAddr. It must
// not be changed.
func (c *Conn) RemoteAddr() net.Addr { return c.tcp.RemoteAddr() }

// Provider returns the name of what carries the connection: "tcp", or that of the SAN
// provider to which both directions have moved, "shm" or "verbs".
func (c *Conn) Provider() string {
	if s := c.out.san.Load(); s != nil && c.in.san.Load() == s {
		return s.Limits().Provider
	}
	return "tcp"
}

// steppedLocked is changedLocked where state has changed: it is the one place that sets what
// operations look at without mu, but for the two sessions: out.san and in.san are set by the holder
// of the direction's op, as it moves or goes back.
func (c *Conn) steppedLocked() {
	h := &c.state
	c.in.shut.Store(h.in.shut)
	c.in.begun.Store(h.in.begun)
	c.in.suspended.Store(h.phase == leaving)
	c.out.shut.Store(h.out.shut)
	c.out.suspended.Store(h.goesBack())
	var next *session.Session
	if h.phase == onSAN && !h.out.begun {
		next = c.session
	}
	c.out.next.Store(next)
	c.changedLocked()
}

// changedLocked wakes all that wait for a change of state. mu is held.
func (c *Conn) changedLocked() {
	if c.state.phase == leaving {
		c.session.LookAgain()
	}
	if c.changed != nil {
		close(c.changed)
		c.changed = nil
	}
}

// awaitLocked waits for a change of state, up to t if that is not zero; mu is held, and
// released meanwhile. It returns false if the time is up.
func (c *Conn) awaitLocked(t time.Time) bool {
	if c.changed == nil {
		c.changed = make(chan struct{})
	}
	changed := c.changed
	c.mu.Unlock()
	defer c.mu.Lock()
	var late <-chan time.Time
	if !t.IsZero() {
		late = time.After(time.Until(t))
	}
	select {
	case <-changed:
		return true
	case <-late:
		return false
	}
}
