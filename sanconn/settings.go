package sanconn

import (
	"cmp"
	"net"
	"time"

	"github.com/sanconn/san/session"
)

// SetLinger sets what Close does with data that was not delivered yet; see net.TCPConn.SetLinger. With
// 0 the data is discarded and the peer finds a reset; on a SAN also if the process ends without
// CloseWrite or Close. With any other value a SAN delivers the data as Close does by default:
// Options.CloseTimeout takes the place of the number of seconds.
func (c *Conn) SetLinger(sec int) error {
	err := c.tcp.SetLinger(sec) // first, as a move reads it
	c.mu.Lock()
	c.reset.Store(sec == 0)
	if c.state.peerMayHaveLeft() {
		c.tcp.SetLinger(0)
	}
	s := c.session
	c.mu.Unlock()
	if s != nil {
		s.ResetAtDeath(sec == 0)
	}
	return c.set(err)
}

// SetNoDelay sets TCP's option; a SAN never delays.
func (c *Conn) SetNoDelay(noDelay bool) error { return c.set(c.tcp.SetNoDelay(noDelay)) }

// SetReadBuffer sets TCP's buffer; for a SAN see Options.ReceiveBudget.
func (c *Conn) SetReadBuffer(bytes int) error { return c.set(c.tcp.SetReadBuffer(bytes)) }

// SetWriteBuffer sets TCP's buffer; for a SAN see Options.SendBudget.
func (c *Conn) SetWriteBuffer(bytes int) error { return c.set(c.tcp.SetWriteBuffer(bytes)) }

// set returns the result of setting an option of TCP. After a session, TCP may be closed a little later
// than the Conn.
func (c *Conn) set(err error) error {
	if err == nil && c.closed.Load() {
		err = c.opError(opSet, net.ErrClosed)
	}
	return err
}

// setKeepAlive sets what is not nil, for the present session and for later ones.
func (c *Conn) setKeepAlive(set session.KeepAlive) {
	c.mu.Lock()
	c.keep = session.KeepAlive{On: cmp.Or(set.On, c.keep.On), Period: cmp.Or(set.Period, c.keep.Period)}
	s := c.session
	c.mu.Unlock()
	if s != nil {
		s.SetKeepAlive(set)
	}
}

// SetKeepAlive switches keepalives off, or on at the interval that they had, on both carriers; see
// Options.KeepAlive.
func (c *Conn) SetKeepAlive(on bool) error {
	c.setKeepAlive(session.KeepAlive{On: &on})
	return c.set(c.tcp.SetKeepAlive(on))
}

// SetKeepAlivePeriod sets the time between keepalives; on a SAN it is at least a second. There zero
// means the default of 15 s, and a negative period changes nothing. It does not switch keepalives on.
func (c *Conn) SetKeepAlivePeriod(d time.Duration) error {
	c.setKeepAlive(session.KeepAlive{Period: &d})
	return c.set(c.tcp.SetKeepAlivePeriod(d))
}

// SetKeepAliveConfig sets TCP's keepalives; on a SAN it is SetKeepAlivePeriod with config.Idle and
// SetKeepAlive with config.Enable.
func (c *Conn) SetKeepAliveConfig(config net.KeepAliveConfig) error {
	c.setKeepAlive(session.KeepAlive{On: &config.Enable, Period: &config.Idle})
	return c.set(c.tcp.SetKeepAliveConfig(config))
}
