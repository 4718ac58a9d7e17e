package sanconn

import (
	"cmp"
	"errors"
	"io"

	"github.com/sanconn/san/internal/raceedge"
	"github.com/sanconn/san/session"
)

var (
	// ErrNotReserved is the error of Commit without a Reserve before it, and of Discard of some bytes
	// without a Peek before it.
	ErrNotReserved = session.ErrNotReserved
	// ErrTooMuch is the error of Commit and Discard of more bytes than were lent.
	ErrTooMuch = session.ErrTooMuch
)

// Counts that an io.Reader or io.Writer must not return.
var (
	errInvalidRead  = errors.New("invalid read result")
	errInvalidWrite = errors.New("invalid write result") // as in io, which does not export it
)

// Reserve returns room in the memory that the connection sends from, for a caller that would otherwise
// fill a buffer and Write it: at least one byte, at most n. It blocks while there is no room. The
// caller fills the room from its front and calls Commit. Until then other Writes and Reserves wait;
// after it the room must not be used. Its errors are those of Write. A peer that has closed is found
// only after the first piece.
//
// Until Commit, a connection that has moved does not go back to TCP either: File and Control, at either
// end, wait for that, and then so do all Reads and Writes of the connection. On TCP the room is a
// buffer of at most 64 KiB.
func (c *Conn) Reserve(n int) ([]byte, error) {
	for {
		if s := c.out.san.Load(); s != nil && !c.out.owned.Load() {
			b, err := s.Reserve(n)
			if err != session.ErrTaken {
				return b, c.opError(opWrite, err)
			}
		}
		b, err := c.out.reserve(c, n)
		if err != errLook {
			return b, err
		}
	}
}

// reserve is Reserve on TCP.
func (o *outgoing) reserve(c *Conn, n int) ([]byte, error) {
	if err := o.await(c, &pendingWrite{}); err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if o.owned.Load() {
		return nil, errLook
	}
	if err := cmp.Or(o.deadline.passed(c), o.stoppedLocked(c)); err != nil {
		return nil, err
	}
	o.reserved = make([]byte, min(max(n, 1), copySize))
	o.ownLocked(c)
	return o.reserved, nil
}

// Commit sends the first n bytes of what Reserve returned, in place of a Write; with 0 it sends none.
// On a SAN it does not block, and no deadline applies. After an error nothing is reserved, and nothing
// was sent; on TCP, something may have been sent.
func (c *Conn) Commit(n int) error {
	_, err := c.sendReserved(n)
	return err
}

// sendReserved is Commit, and returns how many bytes were sent.
func (c *Conn) sendReserved(n int) (sent int, err error) {
	c.mu.Lock()
	room := c.out.reserved
	c.mu.Unlock()
	if room == nil {
		if s := c.out.san.Load(); s != nil { // both ends leave it only when nothing is lent
			raceedge.Release()
			if err := s.Commit(n); err != nil {
				return 0, c.opError(opWrite, err)
			}
			return n, nil
		}
		return 0, c.opError(opWrite, ErrNotReserved)
	}
	defer func() {
		c.mu.Lock()
		c.out.reserved = nil
		c.out.ownLocked(c)
		c.mu.Unlock()
	}()
	if n < 0 || n > len(room) {
		return 0, c.opError(opWrite, ErrTooMuch)
	}
	if n == 0 {
		return 0, nil
	}
	w := pendingWrite{p: room[:n], commits: true}
	err = c.out.write(c, &w)
	return int(w.n), err
}

// Peek returns bytes that have arrived, in the memory where they are: at least one, and as many as are
// there in one piece. It blocks while there are none. They stay in place until Discard. Until then
// Reads wait, and another Peek returns the same bytes. Its errors are those of Read. Like the room of
// Reserve, they keep the connection from going back to TCP.
//
// The bytes must not be written to: on shared memory they belong to the peer, and a write is a fault
// (SIGSEGV). On TCP they are in a buffer, from which a Read takes them.
func (c *Conn) Peek() ([]byte, error) {
	for {
		if err := c.in.stopped(c); err != nil {
			return nil, err
		}
		if s := c.in.san.Load(); s != nil {
			b, err := s.Peek()
			raceedge.Acquire()
			switch err {
			case nil, io.EOF:
				return b, err
			case session.ErrTaken:
			default:
				return nil, c.readError(err)
			}
		}
		if err := c.in.await(c); err != nil {
			return nil, err
		}
		c.in.op.Lock()
		b, err := c.in.peekLocked(c)
		c.in.unlock(c)
		if err != errLook {
			return b, err
		}
	}
}

// peekLocked reads from TCP into front.
func (in *incoming) peekLocked(c *Conn) ([]byte, error) {
	switch most, err := in.beforeLocked(c); {
	case err != nil:
		return nil, err
	case most == 0:
		return in.front, nil
	}
	b := make([]byte, peekSize)
	n, err := in.readLocked(c, b)
	if n == 0 {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	in.front = append(b[:n:n], in.front...)
	return in.front, nil
}

// peekSize is the size in bytes of Peek's buffer on TCP.
const peekSize = 32 << 10

// Discard counts the first n bytes of what Peek returned as read. They must not be used afterwards.
// After an error no byte counts as read, and Peek has to be called again.
func (c *Conn) Discard(n int) error {
	if s := c.in.san.Load(); s != nil { // both ends leave it only when nothing is lent
		return c.opError(opRead, s.Discard(n))
	}
	c.in.op.Lock()
	defer c.in.unlock(c)
	switch {
	case n == 0:
		return nil
	case len(c.in.front) == 0:
		return c.opError(opRead, ErrNotReserved)
	case n < 0 || n > len(c.in.front):
		return c.opError(opRead, ErrTooMuch)
	}
	c.in.advance(c, n)
	return nil
}
