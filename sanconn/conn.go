// Package sanconn gives a session the semantics of net.Conn: deadlines,
// half-close, net's errors and addresses, and the optional interfaces that
// code for TCP connections looks for. It moves no bytes itself and chooses no
// provider; package san makes its connections.
package sanconn

import (
	"net"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/sanconn/san/session"
)

// Conn is a connection over a SAN. It behaves as *net.TCPConn does; all its
// methods may be called concurrently, and concurrent Writes are not mixed.
//
// It has no SyscallConn and no File: there is no descriptor that carries the
// bytes, and code that looks at one to learn whether the connection lives
// would be misled.
type Conn struct {
	session       *session.Session
	local, remote *net.TCPAddr

	// Beside the Conn and not in it: a timer that is set keeps its deadline, and
	// must not keep the Conn from being found forgotten.
	readDeadline, writeDeadline *deadline

	closed  atomic.Bool
	reset   atomic.Bool // SetLinger(0): Close is a reset
	onClose func()      // may be nil
	cleanup runtime.Cleanup
}

// Stats are the counters of a connection since its start.
type Stats = session.Stats

// ErrNoUrgent is what ReadUrgent says when no urgent data has arrived.
var ErrNoUrgent = session.ErrNoUrgent

// MaxUrgent is the most urgent data in bytes that one WriteUrgent takes.
const MaxUrgent = session.MaxUrgent

// New makes a Conn of a negotiated session, which it owns from now on.
// onClose, when not nil, is called once after the session was closed; it must
// not refer to the Conn, or the Conn is never collected.
func New(s *session.Session, local, remote *net.TCPAddr, onClose func()) *Conn {
	c := &Conn{
		session: s, local: local, remote: remote, onClose: onClose,
		readDeadline:  &deadline{interrupt: s.InterruptRead},
		writeDeadline: &deadline{interrupt: s.InterruptWrite},
	}
	// A connection that was forgotten is closed, as net does it.
	c.cleanup = runtime.AddCleanup(c, func(f forgotten) { go f.close() }, forgotten{s, onClose})
	return c
}

// forgotten is what is left of a Conn that was not closed.
type forgotten struct {
	session *session.Session
	onClose func()
}

func (f forgotten) close() {
	f.session.Close()
	if f.onClose != nil {
		f.onClose()
	}
}

// Read reads what has arrived into p and blocks while nothing has. It returns
// io.EOF, bare, once the peer has closed its direction and all before that was
// read. A peer that vanished is ECONNRESET instead, but for a process of this host
// that ended with all that it had written complete: that is io.EOF, as with TCP where
// it had read everything too.
func (c *Conn) Read(p []byte) (int, error) {
	if len(p) == 0 {
		if c.closed.Load() {
			return 0, c.opError(opRead, net.ErrClosed)
		}
		return 0, nil
	}
	n, err := c.session.Read(p)
	if err != nil {
		if n > 0 {
			return n, nil // the next Read finds the error again
		}
		err = c.opError(opRead, err)
	}
	return n, err
}

// Write writes all of p, or returns how many bytes it took and why not more.
// When it has returned, p is not touched any more. Data that was taken may
// still be lost if this process or its host dies.
func (c *Conn) Write(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, c.writable()
	}
	n, err := c.session.Write(p)
	if err != nil {
		err = c.opError(opWrite, err)
	}
	return n, err
}

// writable is what a Write of nothing finds out.
func (c *Conn) writable() error {
	switch {
	case c.closed.Load():
		return c.opError(opWrite, net.ErrClosed)
	case c.writeDeadline.passed():
		return c.opError(opWrite, session.ErrInterrupted)
	}
	return nil
}

// Close ends both directions. What was written is still delivered, and the
// peer then reads EOF; when unread data is left here, or after SetLinger(0),
// the peer finds a reset instead. Blocked operations return net.ErrClosed.
//
// Over "verbs", whose bytes would be lost with the process (on "shm" only where
// control messages still wait for room), it waits until the peer has them: a second
// for a peer that takes none, else up to Options.CloseTimeout; and before that for an
// operation that is in the middle of a transfer, up to Options.CancelTimeout.
func (c *Conn) Close() error {
	if c.closed.Swap(true) {
		return c.opError(opClose, net.ErrClosed)
	}
	c.cleanup.Stop()
	c.readDeadline.stop()
	c.writeDeadline.stop()
	if c.reset.Load() {
		c.session.Abort()
	} else {
		c.session.Close() // fails only the second time
	}
	if c.onClose != nil {
		c.onClose()
	}
	return nil
}

// CloseRead ends the reading direction: Read returns io.EOF, and what arrives is
// thrown away, as is (other than with TCP) what has arrived and was not read.
func (c *Conn) CloseRead() error { return c.opError(opClose, c.session.CloseRead()) }

// CloseWrite ends the writing direction: the peer reads EOF after what was
// written. Later Writes fail with EPIPE. That the peer has closed is no error.
func (c *Conn) CloseWrite() error { return c.opError(opClose, c.session.CloseWrite()) }

// LocalAddr and RemoteAddr are *net.TCPAddr. The peer sees the same two, the
// other way round.
func (c *Conn) LocalAddr() net.Addr { return c.local }

// RemoteAddr is the peer's address; see LocalAddr.
func (c *Conn) RemoteAddr() net.Addr { return c.remote }

// SetDeadline sets both deadlines; see net.Conn. An operation whose deadline
// has passed fails with os.ErrDeadlineExceeded even when it could go on at
// once. A Write that it ends in the middle returns the bytes that were taken.
func (c *Conn) SetDeadline(t time.Time) error {
	return c.deadlineError(c.readDeadline.set(t) && c.writeDeadline.set(t))
}

// SetReadDeadline sets the deadline of Read; see SetDeadline.
func (c *Conn) SetReadDeadline(t time.Time) error {
	return c.deadlineError(c.readDeadline.set(t))
}

// SetWriteDeadline sets the deadline of Write; see SetDeadline.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	return c.deadlineError(c.writeDeadline.set(t))
}

// deadlineError names the local end alone, as net does it for deadlines.
func (c *Conn) deadlineError(set bool) error {
	if set {
		return nil
	}
	return &net.OpError{Op: opSet, Net: "tcp", Addr: c.local, Err: net.ErrClosed}
}

// Provider is the name of the SAN provider that carries the connection: "shm",
// "verbs".
func (c *Conn) Provider() string { return c.session.Limits().Provider }

// Stats is a snapshot of the connection's counters.
func (c *Conn) Stats() Stats { return c.session.Stats() }
