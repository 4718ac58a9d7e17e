package sanconn

import (
	"time"

	"github.com/sanconn/san/session"
)

// In tests a peer in the same process that gets no processor for seconds still has time to leave and to
// answer.
func init() {
	backTimeout.set(time.Minute)
	silentTimeout.set(time.Minute)
}

// set changes a duration, until undo is called.
func (d *duration) set(to time.Duration) (undo func()) {
	was := d.ns.Swap(int64(to))
	return func() { d.ns.Store(was) }
}

// SetBackTimeout changes backTimeout, until undo is called.
func SetBackTimeout(d time.Duration) (undo func()) { return backTimeout.set(d) }

// SetAnswerTime changes answerTime, until undo is called.
func SetAnswerTime(d time.Duration) (undo func()) { return answerTime.set(d) }

// SetSilentTimeout changes silentTimeout, until undo is called.
func SetSilentTimeout(d time.Duration) (undo func()) { return silentTimeout.set(d) }

// LeaveSAN makes a connection go back to TCP, as File does, but not for good.
func LeaveSAN(c *Conn) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.backLocked()
}

// Starve makes a connection go back to TCP as for lack of the session's memory.
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
	return c.state.goesBack()
}

// Keeps reports whether a connection that has come back keeps bytes of the session.
func Keeps(c *Conn) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state.phase == onTCP && c.in.rest != nil
}

// Reading reports whether a Read by TCP is in progress.
func Reading(c *Conn) bool {
	if !c.in.op.TryLock() {
		return true
	}
	c.in.unlock(c)
	return false
}

// CommitSent is Commit that returns how many bytes were sent.
func CommitSent(c *Conn, n int) (int, error) { return c.sendReserved(n) }

// Expect makes a connection expect n bytes by TCP, as if that many had been returned to the peer: before
// they have come, TCP's end is a cut. Lose makes a session end before the peer's direction has moved.
func Expect(c *Conn, n uint64) { c.change(func(h *handover) { h.least = n }) }
func Lose(c *Conn)             { c.change(func(h *handover) { h.lost = true }) }

func (c *Conn) change(f func(*handover)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f(&c.state)
}

// SessionOf returns the session by which a connection's Reads go, or nil if they go by TCP.
func SessionOf(c *Conn) *session.Session { return c.in.san.Load() }

// EndLate ends the stream like a CloseWrite that has found the connection on a session which it has left
// since. It reports whether Writes would still go by that session.
func EndLate(c *Conn, s *session.Session) bool {
	c.change(func(h *handover) { h.out.shut = true })
	c.endStream(s, (*session.Session).CloseWrite)
	return c.out.san.Load() != nil
}

// Lent is how many descriptors syscall.Read takes for lent ones, and how many are in its table.
func Lent() (n, in int) {
	for i := range lent.shelves {
		s := &lent.shelves[i]
		s.mu.Lock()
		in += len(s.by)
		s.mu.Unlock()
	}
	return int(lent.n.Load()), in
}

// AwaitUrgent waits as WriteUrgent does.
func AwaitUrgent(end time.Time, c *Conn) error { return c.moveForUrgent(end) }

// Users returns how many callers have TCP's descriptor or wait for it.
func Users(c *Conn) (n int) {
	c.change(func(*handover) { n = int(c.fd.users) })
	return n
}

// MostOfRing is how many bytes one connection may keep of a ring that it has left.
const MostOfRing = mostOfRing

// KeptOfAll returns how many bytes count as kept by all connections that have left their sessions
// because a Write starved.
func KeptOfAll() int64 { return keptOfAll.Load() }

// EndsTCP reports whether an error of a Write or a copy is the end of TCP.
func EndsTCP(c *Conn, err error) bool { return endsTCP(c.tcp, err) }
