package sanconn

// LeaveSAN has a connection go back to TCP, as File does, but not for good.
func LeaveSAN(c *Conn) error {
	err := c.toTCP(true)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.state.pinned = false
	return err
}

// Leaving reports whether a connection is on its way back to TCP.
func Leaving(c *Conn) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.leave != nil || c.out.flushing
}
