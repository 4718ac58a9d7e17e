package sanconn

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"

	"github.com/sanconn/san/internal/raceedge"
	"github.com/sanconn/san/session"
)

// urgentTimeout bounds how long WriteUrgent waits for the connection to move.
const urgentTimeout = time.Second

var errUrgentOnTCP = fmt.Errorf("urgent data goes by a SAN alone, and the connection is on TCP: %w", errors.ErrUnsupported)

// WriteUrgent sends 1 to MaxUrgent bytes outside the stream: they overtake what was written before.
// With any other length the error is EMSGSIZE. Urgent data that the peer has not read when more arrives
// is lost. If the peer takes nothing, WriteUrgent may wait, at most until the write deadline.
//
// A connection that is on TCP has to move first, which the dialing end begins. If it has not moved
// within a second, or by the write deadline, the error matches errors.ErrUnsupported, or
// os.ErrDeadlineExceeded.
func (c *Conn) WriteUrgent(p []byte) (int, error) {
	if len(p) == 0 || len(p) > MaxUrgent {
		return 0, c.opError(opWrite, syscall.EMSGSIZE)
	}
	for end := time.Now().Add(urgentTimeout); ; {
		if s := c.out.san.Load(); s != nil {
			raceedge.Release()
			if n, err := s.WriteUrgent(p); err == nil || !c.leaves(s) {
				return n, c.opError(opWrite, err)
			}
		}
		switch err := c.moveForUrgent(end); {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return 0, err
		case err != nil:
			return 0, c.opError(opWrite, fmt.Errorf("%w: %w", errUrgentOnTCP, err))
		}
	}
}

// leaves reports whether the connection goes back, or has gone back, from a session to TCP.
func (c *Conn) leaves(s *session.Session) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.session != s || c.state.phase == leaving
}

// moveForUrgent moves a connection that is on TCP, or on its way back, or waits while others move it,
// until end or the write deadline. After an attempt that has failed it makes others.
func (c *Conn) moveForUrgent(end time.Time) error {
	ctx, cancel := context.WithDeadline(context.Background(), end)
	defer cancel()
	c.use.claimedUntil.Store(0) // the program uses the connection itself
	stop := c.wakeWhenDone(ctx)
	defer stop()
	c.mu.Lock()
	defer c.mu.Unlock()
	for begun := false; ; {
		if !begun && !c.state.goesBack() {
			begun = true
			c.mu.Unlock()
			if c.use.begins() {
				c.life.Used(handle{c}, true)
			}
			c.mu.Lock()
		}
		onSession := c.state.phase == onSAN
		switch s := c.in.san.Load(); {
		case onSession && c.state.over:
			return errNoSession
		case onSession && s != nil && c.out.san.Load() == s:
			return nil
		case c.state.pinned:
			return errPinned
		case c.closed.Load():
			return net.ErrClosed
		case ctx.Err() != nil: // this check may be late: a deadline that has passed comes first
			return cmp.Or(c.out.deadline.passed(c), c.refused, ctx.Err())
		}
		if err := c.out.deadline.awaitLocked(c); err != nil {
			return err
		}
	}
}

// ReadUrgent returns the urgent data that arrived last, and does not block. Bytes that have no room in
// p are lost. If there is no urgent data, the error is ErrNoUrgent, which is not wrapped.
func (c *Conn) ReadUrgent(p []byte) (int, error) {
	n, err := 0, ErrNoUrgent
	c.mu.Lock()
	s := c.session
	c.mu.Unlock()
	if s != nil {
		n, err = s.ReadUrgent(p)
		raceedge.Acquire()
	}
	c.mu.Lock()
	if past := c.past; past != nil && past.urgent != nil {
		none := err == ErrNoUrgent
		if none {
			n, err = copy(p, past.urgent), nil
		}
		if none || s == c.session { // otherwise p has newer data
			past.urgent = nil
		}
	}
	c.mu.Unlock()
	if errors.Is(err, ErrNoUrgent) && !c.closed.Load() {
		return n, ErrNoUrgent
	}
	return n, c.opError(opRead, err)
}

// Urgent returns a channel that receives a value when urgent data arrives. It has room for one value:
// call ReadUrgent until ErrNoUrgent. On TCP no urgent data comes: call Urgent again when the connection
// has moved, or gone back.
func (c *Conn) Urgent() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.past != nil && c.past.urgent != nil: // the session may not have announced it
		told := make(chan struct{}, 1)
		told <- struct{}{}
		return told
	case c.session != nil:
		return c.session.Urgent()
	}
	return nil
}
