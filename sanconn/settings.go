package sanconn

import (
	"net"
	"time"
)

// setting is the answer of a setting that has no meaning on a SAN and is
// accepted so that code for TCP goes on working.
func (c *Conn) setting() error {
	if c.closed.Load() {
		return c.opError(opSet, net.ErrClosed)
	}
	return nil
}

// SetLinger says what Close does with data that was not delivered yet. Zero:
// it is thrown away, and the peer finds a reset. Otherwise it is as Close says; the
// number of seconds is not used (Options.CloseTimeout).
func (c *Conn) SetLinger(sec int) error {
	c.reset.Store(sec == 0)
	return c.setting()
}

// SetNoDelay is accepted and has no effect: there is no delay.
func (c *Conn) SetNoDelay(noDelay bool) error { return c.setting() }

// SetReadBuffer is accepted and has no effect: see Options.ReceiveBudget.
func (c *Conn) SetReadBuffer(bytes int) error { return c.setting() }

// SetWriteBuffer is accepted and has no effect: see Options.SendBudget.
func (c *Conn) SetWriteBuffer(bytes int) error { return c.setting() }

// SetKeepAlive switches the questions to a silent peer off, or on at the interval
// that they had; see Options.KeepAlive.
func (c *Conn) SetKeepAlive(on bool) error {
	c.session.SetKeepAlive(on)
	return c.setting()
}

// SetKeepAlivePeriod sets the time between two such questions, at least a second.
// Zero means the default of 15 s, a negative one changes nothing.
func (c *Conn) SetKeepAlivePeriod(d time.Duration) error {
	c.session.SetKeepAlivePeriod(d)
	return c.setting()
}

// SetKeepAliveConfig does what both do. A SAN connection asks at the interval
// of config.Idle; Interval and Count are not used.
func (c *Conn) SetKeepAliveConfig(config net.KeepAliveConfig) error {
	c.session.SetKeepAlivePeriod(config.Idle)
	return c.SetKeepAlive(config.Enable)
}
