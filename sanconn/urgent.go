package sanconn

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"github.com/sanconn/san/internal/raceedge"
	"github.com/sanconn/san/session"
)

// urgentTimeout bounds how long WriteUrgent waits for the connection to move.
const urgentTimeout = time.Second

var errUrgentOnTCP = fmt.Errorf("urgent data goes by a SAN alone, and the connection is on TCP: %w", errors.ErrUnsupported)

// WriteUrgent sends 1 to MaxUrgent bytes beside the stream: they overtake what was
// written before. Urgent data that the peer has not read when more arrives is lost. If
// the peer takes nothing, WriteUrgent may wait, until the write deadline at most. With
// any other length the error is EMSGSIZE. A connection that is on TCP has to move first, which
// the end that has dialed begins; if it has not within a second, or by the write deadline, the
// error matches errors.ErrUnsupported, or os.ErrDeadlineExceeded.
func (c *Conn) WriteUrgent(p []byte) (int, error) {
	if len(p) == 0 || len(p) > MaxUrgent {
		return 0, c.opError(opWrite, syscall.EMSGSIZE)
	}
	if c.out.san.Load() == nil {
		c.use.claimedUntil.Store(0) // the program uses the connection itself
		if c.use.begins() {
			c.life.Used(handle{c})
		}
		ctx, cancel := context.WithTimeout(context.Background(), urgentTimeout)
		defer cancel()
		switch err := c.awaitMoved(ctx, false); {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return 0, err
		case err != nil:
			return 0, c.opError(opWrite, fmt.Errorf("%w: %w", errUrgentOnTCP, err))
		}
	}
	n, err := 0, session.ErrTaken // by the way back to TCP
	if s := c.out.san.Load(); s != nil {
		raceedge.Release()
		n, err = s.WriteUrgent(p)
	}
	if err == session.ErrTaken {
		err = errUrgentOnTCP
	}
	return n, c.opError(opWrite, err)
}

// ReadUrgent returns the urgent data that arrived last, and does not block. What has
// no room in p is lost. If there is none, the error is ErrNoUrgent, as it is.
func (c *Conn) ReadUrgent(p []byte) (int, error) {
	n, err := 0, ErrNoUrgent
	if s := c.committed(); s != nil {
		n, err = s.ReadUrgent(p)
		raceedge.Acquire()
	}
	if errors.Is(err, ErrNoUrgent) && !c.closed.Load() {
		return n, ErrNoUrgent
	}
	return n, c.opError(opRead, err)
}

// Urgent returns a channel that receives a value when urgent data arrives. It has room
// for one: call ReadUrgent until ErrNoUrgent. On TCP no urgent data comes: call it again
// when the connection has moved.
func (c *Conn) Urgent() <-chan struct{} {
	if s := c.committed(); s != nil {
		return s.Urgent()
	}
	return nil
}
