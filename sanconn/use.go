package sanconn

// turn is for how many bytes a Read counts, beside those that it brings: what a round trip
// by a SAN saves is as much as what it saves for so many bytes.
const turn = 32 << 10

// never is beyond what any connection counts.
const never = int64(1) << 62

// use counts what goes by TCP, and has package san move the connection when that pays.
func (c *Conn) use(n int64) {
	switch used, at := c.used.Add(n), c.useAt.Load(); {
	case used < at:
	case c.claimed(): // in vain
		c.useAt.CompareAndSwap(at, c.claimedUntil.Load())
	default:
		c.useNow()
	}
}

// useNow has package san move the connection, unless that has been done.
func (c *Conn) useNow() {
	if c.useAt.Swap(never) != never {
		c.life.Used((*handle)(c))
	}
}

// claimed reports whether the program may have taken the descriptor for itself, as event loops
// do: its own Read and Write have not been used since it had that for as much as Config.Threshold.
// What others have sent by then is the descriptor's.
func (c *Conn) claimed() bool { return c.used.Load() < c.claimedUntil.Load() }
