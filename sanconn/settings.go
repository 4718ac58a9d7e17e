package sanconn

import (
	"net"
	"time"
)

// setting returns the error of a setter. Settings without a meaning on a SAN are accepted,
// so that code for TCP works.
func (c *Conn) setting() error {
	if c.closed.Load() {
		return c.opError(opSet, net.ErrClosed)
	}
	return nil
}

// SetLinger says what Close does with data that was not delivered yet. With 0 it is
// discarded and the peer finds a reset, as it does if the process ends without CloseWrite or
// Close. Any other value means what Close says; the number of seconds is not used, as there
// is Options.CloseTimeout. The error of this and the following settings is net.ErrClosed,
// after Close.
func (c *Conn) SetLinger(sec int) error {
	c.reset.Store(sec == 0)
	c.session.ResetAtDeath(sec == 0)
	return c.setting()
}

// SetNoDelay is accepted and has no effect: there is no delay.
func (c *Conn) SetNoDelay(noDelay bool) error { return c.setting() }

// SetReadBuffer is accepted and has no effect: see Options.ReceiveBudget.
func (c *Conn) SetReadBuffer(bytes int) error { return c.setting() }

// SetWriteBuffer is accepted and has no effect: see Options.SendBudget.
func (c *Conn) SetWriteBuffer(bytes int) error { return c.setting() }

// SetKeepAlive switches keepalives off, or on at the interval that they had; see
// Options.KeepAlive.
func (c *Conn) SetKeepAlive(on bool) error {
	c.session.SetKeepAlive(on)
	return c.setting()
}

// SetKeepAlivePeriod sets the time between keepalives, at least a second. Zero means
// the default of 15 s; a negative period changes nothing. It does not switch them on.
func (c *Conn) SetKeepAlivePeriod(d time.Duration) error {
	c.session.SetKeepAlivePeriod(d)
	return c.setting()
}

// SetKeepAliveConfig calls SetKeepAlivePeriod with config.Idle and SetKeepAlive with
// config.Enable. Interval and Count are not used.
func (c *Conn) SetKeepAliveConfig(config net.KeepAliveConfig) error {
	c.session.SetKeepAlivePeriod(config.Idle)
	return c.SetKeepAlive(config.Enable)
}
