package sanconn

import (
	"net"
	"time"

	"github.com/sanconn/san/session"
)

// SetLinger says what Close does with data that was not delivered yet; see
// net.TCPConn.SetLinger. With 0 it is discarded and the peer finds a reset; on a SAN also if
// the process ends without CloseWrite or Close. Any other value means there what Close says;
// the number of seconds is not used, as there is Options.CloseTimeout.
func (c *Conn) SetLinger(sec int) error {
	c.reset.Store(sec == 0)
	if s := c.committed(); s != nil {
		s.ResetAtDeath(sec == 0)
	}
	return c.set(c.tcp.SetLinger(sec))
}

// SetNoDelay is TCP's; on a SAN there is no delay.
func (c *Conn) SetNoDelay(noDelay bool) error { return c.set(c.tcp.SetNoDelay(noDelay)) }

// SetReadBuffer is TCP's; for a SAN see Options.ReceiveBudget.
func (c *Conn) SetReadBuffer(bytes int) error { return c.set(c.tcp.SetReadBuffer(bytes)) }

// SetWriteBuffer is TCP's; for a SAN see Options.SendBudget.
func (c *Conn) SetWriteBuffer(bytes int) error { return c.set(c.tcp.SetWriteBuffer(bytes)) }

// set is the result of setting what TCP has, which Close may close a little later, behind a
// session.
func (c *Conn) set(err error) error {
	if err == nil && c.closed.Load() {
		err = c.opError(opSet, net.ErrClosed)
	}
	return err
}

// keepAlive is what the program has set, for a session that comes later. Conn's mu guards it.
type keepAlive struct {
	off    bool
	period time.Duration // 0: not set
}

func (k keepAlive) apply(s *session.Session) {
	if k.period != 0 {
		s.SetKeepAlivePeriod(k.period)
	}
	if k.off {
		s.SetKeepAlive(false)
	}
}

// set changes what is set, also for the session that there is.
func (c *Conn) setKeepAlive(change func(*keepAlive), now func(*session.Session)) {
	c.mu.Lock()
	change(&c.keep)
	s := c.session
	c.mu.Unlock()
	if s != nil {
		now(s)
	}
}

// SetKeepAlive switches keepalives off, or on at the interval that they had, on both
// carriers; see Options.KeepAlive.
func (c *Conn) SetKeepAlive(on bool) error {
	c.setKeepAlive(func(k *keepAlive) { k.off = !on }, func(s *session.Session) { s.SetKeepAlive(on) })
	return c.set(c.tcp.SetKeepAlive(on))
}

// SetKeepAlivePeriod sets the time between keepalives; on a SAN it is at least a second. Zero
// means the default of 15 s; a negative period changes nothing there. It does not switch them
// on.
func (c *Conn) SetKeepAlivePeriod(d time.Duration) error {
	c.setPeriod(d)
	return c.set(c.tcp.SetKeepAlivePeriod(d))
}

func (c *Conn) setPeriod(d time.Duration) {
	c.setKeepAlive(func(k *keepAlive) { k.period = d }, func(s *session.Session) { s.SetKeepAlivePeriod(d) })
}

// SetKeepAliveConfig is TCP's; on a SAN it is SetKeepAlivePeriod with config.Idle and
// SetKeepAlive with config.Enable.
func (c *Conn) SetKeepAliveConfig(config net.KeepAliveConfig) error {
	c.setPeriod(config.Idle)
	c.setKeepAlive(func(k *keepAlive) { k.off = !config.Enable }, func(s *session.Session) { s.SetKeepAlive(config.Enable) })
	return c.set(c.tcp.SetKeepAliveConfig(config))
}
