// Package sanconn makes one net.Conn of two carriers: a TCP connection, on which each connection
// begins, and a session over a SAN, to which it can move and from which it can come back. Both have the
// semantics of *net.TCPConn: deadlines, half-close, net's errors and addresses, and the optional
// interfaces that code for TCP connections looks for. The package neither chooses a provider nor
// decides when to move; package san does, and makes the connections.
//
// A program gets a *Conn from package san's Dial and Accept, as a net.Conn. It asserts the type for
// what net.Conn does not have: lent memory (Reserve, Peek), urgent data, Stats and Debug. Options are
// fields of san.Dialer and san.ListenConfig.
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

// Conn is a connection. It behaves as *net.TCPConn does, on either carrier. All its methods may be
// called concurrently; the bytes of concurrent Writes are not mixed. Its errors are *net.OpError with
// the causes that TCP has, except io.EOF and ErrNoUrgent, which are not wrapped.
//
//	handover.go             the states of the two carriers, and their transitions
//	outgoing.go incoming.go a direction on TCP
//	use.go                  how much TCP has carried, which decides when to move
//	move.go leave.go        moving to a session, on which both ends agree, and back to TCP
//	cross.go                the position in its stream at which each direction moves
//	descriptor.go           TCP's descriptor, whose use keeps the connection on TCP
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
	reset  atomic.Bool // after SetLinger(0): Close resets the connection

	mu      sync.Mutex // guards the fields below; nothing blocks with it held
	state   handover
	session *session.Session          // the session that this end has committed to; or nil
	judge   func(answer []byte) error // judges the answer to this end's proposal
	refused error                     // why the last proposal has failed
	inVain  error                     // why the way back to TCP has failed, after which there is no other; or nil
	changed chan struct{}             // closed at the next change of state; nil: nobody waits for one
	keep    session.KeepAlive         // set by the program
	past    *past                     // what is kept of earlier sessions; or nil
	cleanup runtime.Cleanup           // for a Conn that the program drops without Close
}

// past is what is kept of sessions that the connection has left.
type past struct {
	Stats                // without what other owners of the descriptor had by TCP before
	urgent []byte        // not read yet
	kept   *atomic.Int64 // the connection's part of keptOfAll; nil: it never had one
}

// ErrNoUrgent is the error of ReadUrgent when no urgent data is waiting.
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
		c.fd.exposed.Store(1) // to its earlier owners
		c.out.written.Store(cfg.BytesWritten)
		c.in.bytes.Store(cfg.BytesRead)
		c.past = &past{Stats: Stats{TCPBytesSent: -cfg.BytesWritten, TCPBytesReceived: -cfg.BytesRead}}
	}
	c.use.again(cfg.Threshold)
	c.cleanUpLocked(nil)
	return c
}

// cleanUpLocked makes a Conn that the program drops be closed when it is collected, as net closes TCP,
// with the session that it has committed to, or nil. mu is held.
func (c *Conn) cleanUpLocked(s *session.Session) {
	c.cleanup.Stop()
	if !c.closed.Load() && (s != nil || c.life.Holds()) {
		c.cleanup = runtime.AddCleanup(c, forgotten.close, forgotten{s, c.life})
	}
}

// forgotten is what remains of a Conn that was collected.
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

// Read reads what has arrived into p, and blocks if nothing has. Once the peer has closed its direction
// and everything before that was read, it returns io.EOF. If the peer has vanished, the error is
// ECONNRESET, or ETIMEDOUT if it has stopped answering; after that error Reads return io.EOF. If a
// process of this host has ended without closing, had read everything that came by the SAN, and was not
// in the middle of a Write, that counts as a close: the error is io.EOF.
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
				return n, nil // the next Read meets the error again
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

// Write writes all of p, or returns how many bytes it took and an error. After it has returned, p is
// not accessed any more. Bytes that it took may still be lost if this process or its host dies. The
// error is EPIPE or ECONNRESET if the peer does not read any more, and ETIMEDOUT if it does not answer.
func (c *Conn) Write(p []byte) (int, error) {
	w := pendingWrite{p: p}
	if s := c.out.san.Load(); s != nil && !c.out.owned.Load() {
		// Like the loop in write, but without its defer, which takes a tenth of a small Write.
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

// LocalAddr returns this end's address, a *net.TCPAddr, which is the peer's RemoteAddr. It must not be
// changed.
func (c *Conn) LocalAddr() net.Addr { return c.tcp.LocalAddr() }

// RemoteAddr returns the peer's address, a *net.TCPAddr, which is the peer's LocalAddr. It must not be
// changed.
func (c *Conn) RemoteAddr() net.Addr { return c.tcp.RemoteAddr() }

// Provider returns the name of what carries the connection: "tcp", or the name of the SAN provider to
// which both directions have moved, "shm" or "verbs".
func (c *Conn) Provider() string {
	if s := c.out.san.Load(); s != nil && c.in.san.Load() == s {
		return s.Limits().Provider
	}
	return "tcp"
}

// steppedLocked is changedLocked after a change of state. It is the only place that sets what
// operations read without mu, except the two sessions: the holder of a direction's op sets out.san or
// in.san, when the direction moves or goes back.
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

// awaitLocked waits for a change of state, until t if that is not zero. mu is held, and released
// meanwhile. It returns false if the time is up.
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
