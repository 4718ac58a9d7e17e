package sanconn

import (
	"net"
	"time"

	"github.com/sanconn/san/internal/raceedge"
	"github.com/sanconn/san/session"
)

// closeTimeout bounds how long a connection that is closed on its way back to TCP waits for the peer,
// in the background, and how long TCP goes on sending what came back. closeWait bounds how long Close
// itself waits until that is done: then the peer gets all, even if the process ends.
const (
	closeTimeout = 10 * time.Second
	closeWait    = time.Second
)

// Close ends both directions. What was written is still delivered, and then the peer reads io.EOF. If
// data that has arrived was not read here, or after SetLinger(0), the peer finds a reset instead.
// Blocked operations return net.ErrClosed, and so does a second Close.
//
// Over "verbs" bytes in flight would be lost with the process. So Close waits until the peer has them:
// up to Options.CloseTimeout for a peer that goes on taking them, one second for a peer that takes
// none, or less than 128 KiB. (Delivery then goes on in the background.) Before that, it waits up to
// Options.CancelTimeout for an operation in the middle of a transfer. Over "shm" it waits only in the
// rare case that control messages have no room yet. On its way back to TCP a connection waits for the
// peer up to a second.
func (c *Conn) Close() error {
	c.mu.Lock()
	if c.closed.Swap(true) {
		c.mu.Unlock()
		return c.opError(opClose, net.ErrClosed)
	}
	raceedge.Release()
	c.cleanup.Stop() // otherwise the cleanup could close the connection again
	s, goesBack := c.session, c.state.goesBack()
	if s != nil || goesBack { // otherwise the end of TCP ends all operations
		c.in.deadline.close(c.tcp)
	}
	if s != nil { // what came back is still sent
		c.out.deadline.close(c.tcp)
	}
	c.changedLocked()
	c.countKeptLocked()
	c.mu.Unlock()
	defer c.life.Closed()
	switch {
	case goesBack:
		c.closeLeaving()
		return nil
	case s != nil:
		return c.closeSession(s)
	}
	return c.closeTCP()
}

// CloseRead ends the reading direction: Read returns io.EOF. As with TCP, the peer's Writes wait once
// there is no more room for unread bytes. On a SAN they wait until Close, whether or not CloseWrite was
// called.
func (c *Conn) CloseRead() error {
	c.mu.Lock()
	if c.closed.Load() {
		c.mu.Unlock()
		return c.opError(opClose, net.ErrClosed)
	}
	c.state.in.shut = true
	byTCP, s := c.state.byTCP(), c.in.san.Load()
	if !byTCP {
		c.in.deadline.hold(c.tcp) // ends a Read in TCP
	}
	c.steppedLocked()
	c.mu.Unlock()
	switch {
	case byTCP:
		return c.tcp.CloseRead()
	case s != nil:
		s.StopRead()
	}
	return nil
}

// CloseWrite ends the writing direction: the peer reads io.EOF after what was written. Later Writes
// fail with EPIPE, whatever has become of the connection. It is no error if the peer has closed
// already.
func (c *Conn) CloseWrite() error {
	raceedge.Release()
	c.mu.Lock()
	if c.closed.Load() {
		c.mu.Unlock()
		return c.opError(opClose, net.ErrClosed)
	}
	c.state.out.shut = true
	phase, s := c.state.phase, c.session
	if phase == proposed || phase == onSAN {
		c.out.deadline.hold(c.tcp) // ends a Write in TCP
	}
	c.boundAnswerLocked()
	c.steppedLocked()
	c.mu.Unlock()
	switch phase {
	case onTCP:
		return c.tcp.CloseWrite()
	case onSAN:
		err := c.endStream(s, (*session.Session).CloseWrite)
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.session == s && c.state.phase == onSAN {
			return c.opError(opClose, err)
		}
	}
	return nil // the proposal's answer, or the end of leaving, decides on which carrier the stream ends
}

// endStream ends the stream on the session, after its begin.
func (c *Conn) endStream(s *session.Session, end func(*session.Session) error) error {
	c.mu.Lock()
	begun := c.state.out.begun
	c.mu.Unlock()
	if !begun {
		c.out.op.Lock() // a Write in TCP was woken before
		c.out.crossLocked(c, s, nil)
		c.out.op.Unlock()
	}
	return end(s)
}

// closeSession ends the session's stream and then TCP. The order matters: for a peer that is on the
// session, an end of TCP alone is a cut.
func (c *Conn) closeSession(s *session.Session) error {
	if c.reset.Load() {
		s.Abort()
		return c.closeTCP()
	}
	end := (*session.Session).Close
	if c.in.unreadOnTCP(c) {
		end = (*session.Session).CloseUnread
	}
	c.endStream(s, end) // fails only if called twice
	select {
	case <-s.Ended():
		return c.closeTCP()
	default:
	}
	go func() { // bounded by Options.CloseTimeout
		<-s.Ended()
		c.closeTCP()
	}()
	return nil
}

// unreadOnTCP reports whether unread bytes have come that precede the session's.
func (in *incoming) unreadOnTCP(c *Conn) bool {
	if in.san.Load() != nil {
		return false
	}
	if in.unread(c) {
		return true
	}
	c.mu.Lock()
	begun, at := c.state.in.begun, c.state.in.at
	c.mu.Unlock()
	return begun && at > in.bytes.Load() || !begun && queued(c.tcp) > 0
}

// unread reports whether bytes have come here that were not read.
func (in *incoming) unread(c *Conn) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return in.thrown || in.holds()
}

// closeTCP closes TCP. It does so by a reset after SetLinger(0), and if unread bytes of the peer's are
// not in the kernel: they were taken from TCP, or came back from the SAN. The peer finds a reset of the
// session before this one.
func (c *Conn) closeTCP() error {
	if c.reset.Load() || c.in.unread(c) {
		c.tcp.SetLinger(0)
	}
	return c.tcp.Close()
}

// closeLeaving closes a connection that is going back to TCP, once what came back was sent by TCP.
func (c *Conn) closeLeaving() {
	closed := make(chan struct{})
	go func() { // bounded by closeTimeout
		defer close(closed)
		end := time.Now().Add(closeTimeout)
		c.mu.Lock()
		for !c.reset.Load() && c.state.goesBack() && c.awaitLocked(end) {
		}
		s, back := c.session, c.state.phase == onTCP
		if !back {
			c.reset.Store(true)
			c.state.sessionOver(false) // by the Abort
			c.steppedLocked()
		}
		c.mu.Unlock()
		if !back && s != nil {
			s.Abort()
		}
		c.closeTCP()
	}()
	select {
	case <-closed:
	case <-time.After(closeWait):
	}
}
