package sanconn

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/sanconn/san/session"
)

// incoming is the peer's direction.
type incoming struct {
	// san is set, with mu held, once the direction has moved. Then a Read needs only san.
	san atomic.Pointer[session.Session]

	// Parts of Conn.state, to be read without mu: see steppedLocked.
	shut      atomic.Bool // CloseRead was called
	begun     atomic.Bool // the position at which it moves is known
	suspended atomic.Bool // Reads wait, as it goes back to TCP

	thrown bool // a rest was thrown away, because CloseRead had been called; guarded by Conn.mu
	cut    bool // a Read has found that the peer is lost: later ones return io.EOF; guarded by Conn.mu

	op    sync.Mutex    // held by one Read at a time on TCP, and by the move
	bytes atomic.Uint64 // read from TCP; grows with op held

	// Both change only with op and Conn.mu held.
	front []byte // unread bytes that precede TCP's
	rest  *rest  // … that follow some of TCP's; or nil

	// lends is held while a function of a RawConn's Read has the descriptor or waits for it on TCP, as
	// net's lock is; not while the function waits for a session.
	lends sync.Mutex

	deadline deadline
}

// rest is what came back from a session unread: its bytes follow position at of TCP's stream.
type rest struct {
	bytes []byte
	at    uint64
}

// stopped returns why nothing is read any more, on either carrier.
func (in *incoming) stopped(c *Conn) error {
	switch {
	case c.closed.Load():
		return c.opError(opRead, net.ErrClosed)
	case in.shut.Load():
		return io.EOF
	}
	return nil
}

// readLocked reads what precedes the session, or turns to the session.
func (in *incoming) readLocked(c *Conn, p []byte) (n int, err error) {
	most, err := in.beforeLocked(c)
	if err != nil {
		return 0, err
	}
	if len(in.front) > 0 {
		n = copy(p, in.front)
		in.advance(c, n)
		return n, nil
	}
	n, err = c.tcp.Read(p[:min(uint64(len(p)), most)])
	return in.readByTCPLocked(c, n, err)
}

// readByTCPLocked counts what was read from TCP, and returns what the result means. op is held.
func (in *incoming) readByTCPLocked(c *Conn, n int, err error) (int, error) {
	in.count(c, n)
	if n > 0 {
		return n, nil // the next Read meets the error again
	}
	if err = in.deadline.afterTCP(c, opRead, err); err != nil && err != errLook && !errors.Is(err, os.ErrDeadlineExceeded) {
		if err = in.endOfTCP(c, err); err != errLook {
			err = c.readError(err)
		}
	}
	return 0, err
}

// beforeLocked makes front what comes next, if that is not in TCP. Otherwise it returns how many bytes
// may be read from TCP. op is held.
func (in *incoming) beforeLocked(c *Conn) (most uint64, err error) {
	if err := in.stopped(c); err != nil {
		return 0, err
	}
	if in.san.Load() != nil || in.suspended.Load() {
		return 0, errLook
	}
	if r := in.rest; r != nil && len(in.front) == 0 {
		if most = r.at - in.bytes.Load(); most > 0 {
			return most, nil
		}
		c.mu.Lock()
		in.front, in.rest = r.bytes, nil
		c.mu.Unlock()
	}
	if len(in.front) > 0 {
		c.mu.Lock()
		defer c.mu.Unlock()
		return 0, in.deadline.passed(c) // the deadline comes before bytes that could be read at once
	}
	if in.begun.Load() && in.turnLocked(c) {
		return 0, errLook
	}
	return 1 << 62, nil // no limit
}

// holds reports whether there are unread bytes that were taken from a carrier. op or Conn.mu is held.
func (in *incoming) holds() bool { return len(in.front) > 0 || in.rest != nil }

// advance drops the first n bytes of front. op is held.
func (in *incoming) advance(c *Conn, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if in.front = in.front[n:]; len(in.front) == 0 {
		in.front = nil
		c.countKeptLocked()
	}
}

// count counts bytes read from TCP. op is held.
func (in *incoming) count(c *Conn, n int) {
	if n > 0 {
		in.bytes.Store(in.bytes.Load() + uint64(n))
		c.counted(int64(n) + turn)
	}
}

// endOfTCP returns what the end of TCP, or its error, means, once that is known. op is held.
func (in *incoming) endOfTCP(c *Conn, err error) error {
	var cut *session.Session
	c.mu.Lock()
	defer func() {
		c.mu.Unlock()
		if cut != nil { // both directions end, as TCP's do: a peer that writes on would wait for ever
			cut.Fail(errLacks)
		}
	}()
	c.state.tcpFailed(err)
	for {
		if err := in.stopped(c); err != nil {
			return err
		}
		end := c.state.endOf(in.bytes.Load())
		if in.suspended.Load() || end == endTurns {
			return errLook
		}
		if end == endIsCut {
			cut = c.session
		}
		if end != endOpen {
			c.state.in.broken = true
			switch {
			case c.state.failed != 0:
				if err == io.EOF {
					err = c.state.failed
				}
				c.state.failed = 0
			case end == endIsCut && err == io.EOF:
				err = c.opError(opRead, fmt.Errorf("the peer vanished while the connection moved: %w", syscall.ECONNRESET))
			}
			return err
		}
		c.boundAnswerLocked()
		if err := in.deadline.awaitLocked(c); err != nil {
			return err
		}
	}
}

// await waits while Reads have to wait, and returns why nothing is read any more, or nil.
func (in *incoming) await(c *Conn) error {
	if !in.suspended.Load() {
		return in.stopped(c)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for in.suspended.Load() {
		err := in.stopped(c)
		if err == nil {
			err = in.deadline.awaitLocked(c)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// awaitBehindEnd waits for a change of state, which may change the meaning of TCP's end.
func (in *incoming) awaitBehindEnd(c *Conn) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed.Load() {
		return c.opError(opRead, net.ErrClosed)
	}
	return in.deadline.awaitLocked(c)
}
