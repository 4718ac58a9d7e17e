package sanconn

import (
	"context"
	"time"

	"github.com/sanconn/san/session"
)

// A peer in the same process that gets no processor for seconds leaves all the same.
func init() { backTimeout = time.Minute }

// LeaveSAN has a connection go back to TCP, as File does, but not for good.
func LeaveSAN(c *Conn) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.backLocked()
}

// Starve has a connection go back to TCP as for lack of the session's memory.
func Starve(c *Conn) {
	c.mu.Lock()
	s := c.session
	c.mu.Unlock()
	c.starves(s)
}

// Leaving reports whether a connection is on its way back to TCP.
func Leaving(c *Conn) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.leave != nil || c.out.flushing
}

// CommitSent is Commit, and returns how many bytes were sent.
func CommitSent(c *Conn, n int) (int, error) { return c.commit(n) }

// SessionOf returns the session that a connection's Reads go by; nil: they go by TCP.
func SessionOf(c *Conn) *session.Session { return c.in.san.Load() }

// AwaitUrgent waits as WriteUrgent does.
func AwaitUrgent(ctx context.Context, c *Conn) error { return c.awaitMoved(ctx, false) }
