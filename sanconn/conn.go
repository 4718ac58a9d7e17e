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

	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/raceedge"
	"github.com/sanconn/san/session"
)

// Conn is a connection over a SAN. It behaves as *net.TCPConn does. All its
// methods may be called concurrently; the bytes of concurrent Writes are not mixed.
// Its errors are *net.OpError with the causes that TCP has, but for io.EOF, which is
// returned as it is.
//
// No descriptor carries the bytes, so it has no File, and SyscallConn is for reading alone.
type Conn struct {
	session       *session.Session
	local, remote *net.TCPAddr

	// Separate allocations: a running timer keeps its deadline alive, and must not keep
	// a forgotten Conn from being collected.
	readDeadline, writeDeadline *deadline

	closed  atomic.Bool
	reset   atomic.Bool // SetLinger(0): Close is a reset
	onClose func()      // may be nil
	cleanup runtime.Cleanup
}

// Stats are the counters of one connection since its start.
type Stats = session.Stats

// ErrNoUrgent is returned by ReadUrgent when no urgent data is waiting.
var ErrNoUrgent = session.ErrNoUrgent

// MaxUrgent is the largest urgent message in bytes: 64.
const MaxUrgent = session.MaxUrgent

func init() {
	newconn.New = func(s *session.Session, local, remote *net.TCPAddr, onClose func()) net.Conn {
		return newConn(s, local, remote, onClose)
	}
}

// newConn is newconn.New.
func newConn(s *session.Session, local, remote *net.TCPAddr, onClose func()) *Conn {
	c := &Conn{
		session: s, local: local, remote: remote, onClose: onClose,
		readDeadline:  &deadline{interrupt: s.InterruptRead},
		writeDeadline: &deadline{interrupt: s.InterruptWrite},
	}
	// A connection that the program has forgotten is closed, as in net.
	c.cleanup = runtime.AddCleanup(c, func(f forgotten) { go f.close() }, forgotten{s, onClose})
	return c
}

// forgotten is what is needed to close a Conn that has been collected.
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

// Read reads what has arrived into p, and blocks as long as nothing has. Once the
// peer has closed its direction and everything before that was read, it returns
// io.EOF. If the peer vanished, the error is ECONNRESET, or ETIMEDOUT if it stopped
// answering. A process of this host that ended without closing counts as closed, and
// the error is io.EOF, if it had read everything and did not end in the middle of a
// Write.
func (c *Conn) Read(p []byte) (int, error) {
	if len(p) == 0 {
		if c.closed.Load() {
			return 0, c.opError(opRead, net.ErrClosed)
		}
		return 0, nil
	}
	n, err := c.session.Read(p)
	raceedge.Acquire()
	if err != nil {
		if n > 0 {
			return n, nil // the next Read finds the error again
		}
		err = c.opError(opRead, err)
	}
	return n, err
}

// Write writes all of p, or returns how many bytes it took and an error. After it has
// returned, p is not accessed any more. Bytes that it took may still be lost if this
// process or its host dies. The error is EPIPE or ECONNRESET where the peer does not
// read any more, ETIMEDOUT where it does not answer.
func (c *Conn) Write(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, c.writable()
	}
	raceedge.Release()
	n, err := c.session.Write(p)
	if err != nil {
		err = c.opError(opWrite, err)
	}
	return n, err
}

// writable returns the error of a Write of no bytes.
func (c *Conn) writable() error {
	switch {
	case c.closed.Load():
		return c.opError(opWrite, net.ErrClosed)
	case c.writeDeadline.passed():
		return c.opError(opWrite, session.ErrInterrupted)
	}
	return nil
}

// Close ends both directions. What was written is still delivered, and the peer
// then reads io.EOF; if data that arrived was not read here, or after SetLinger(0), it
// finds a reset instead. Blocked operations return net.ErrClosed, and so does a second
// Close.
//
// Over "verbs" the bytes on their way would be lost with the process, so Close waits
// until the peer has them: up to Options.CloseTimeout for a peer that goes on taking
// them, a second for one that takes none, or less than 128 KiB. (Delivery then goes on in the background.)
// Before that it waits up to Options.CancelTimeout for an operation in the middle of a
// transfer. Over "shm" it waits only in the rare case that control messages have no
// room yet.
func (c *Conn) Close() error {
	if c.closed.Swap(true) {
		return c.opError(opClose, net.ErrClosed)
	}
	raceedge.Release()
	c.cleanup.Stop()
	c.readDeadline.stop()
	c.writeDeadline.stop()
	if c.reset.Load() {
		c.session.Abort()
	} else {
		c.session.Close() // fails only if called twice
	}
	if c.onClose != nil {
		c.onClose()
	}
	return nil
}

// CloseRead ends the reading direction: Read returns io.EOF, and what arrives is
// discarded. Other than with TCP, so is what had arrived and was not read.
func (c *Conn) CloseRead() error { return c.opError(opClose, c.session.CloseRead()) }

// CloseWrite ends the writing direction: the peer reads io.EOF after what was
// written. Later Writes fail with EPIPE. If the peer has closed already, that is no
// error.
func (c *Conn) CloseWrite() error {
	raceedge.Release()
	return c.opError(opClose, c.session.CloseWrite())
}

// LocalAddr returns this end's address, a *net.TCPAddr: the peer's RemoteAddr. It must
// not be changed.
func (c *Conn) LocalAddr() net.Addr { return c.local }

// RemoteAddr returns the peer's address, a *net.TCPAddr: the peer's LocalAddr. It must
// not be changed.
func (c *Conn) RemoteAddr() net.Addr { return c.remote }

// SetDeadline sets both deadlines; see net.Conn. An operation whose deadline
// has passed fails with os.ErrDeadlineExceeded, even if it could proceed at once. A
// Write that a deadline interrupts returns how many bytes it took. The error is
// net.ErrClosed after Close.
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

// deadlineError names only the local end, as net does for deadlines.
func (c *Conn) deadlineError(set bool) error {
	if set {
		return nil
	}
	return &net.OpError{Op: opSet, Net: "tcp", Addr: c.local, Err: net.ErrClosed}
}

// Provider returns the name of the SAN provider that carries the connection: "shm"
// or "verbs".
func (c *Conn) Provider() string { return c.session.Limits().Provider }

// Stats returns a snapshot of the connection's counters.
func (c *Conn) Stats() Stats { return c.session.Stats() }
