package sanconn

import (
	"time"

	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/tcpid"
)

// Behind Control, and once it was passed on, a connection moves only if TCP has carried no byte that
// its own Reads and Writes do not know of: what was written by the descriptor would be lost between
// the carriers. A Read or Write that is under way makes a difference as well, as the kernel counts
// it first. So each has the counts compared once more when it returns, while they are wanted.
const (
	// After countLooks looks, countPause apart, a direction that has not agreed is taken for one that
	// was used by the descriptor. A busy one takes several pieces of a Write meanwhile, however slow
	// the machine is.
	countLooks = 40
	countPause = 500 * time.Microsecond
)

// checkCounts returns an error if the program may have used the descriptor. What it has found
// holds as long as exposed stays what is returned.
func (c *Conn) checkCounts() (exposed uint64, err error) {
	exposed = c.exposed.Load()
	switch {
	case c.claimed():
		return 0, newconn.ErrClaimed
	case exposed == 0:
		return 0, nil
	}
	// The session would not end where a stream has ended by the descriptor.
	switch open, err := tcpid.IsOpen(c.tcp); {
	case err != nil:
		return 0, err
	case !open:
		return 0, errHalfClosed
	}
	c.out.agrees.Store(false)
	c.in.agrees.Store(false)
	c.comparing.Store(true)
	defer c.comparing.Store(false)
	for range countLooks {
		if err = c.compareCounts(); err != nil || c.out.agrees.Load() && c.in.agrees.Load() {
			return exposed, err
		}
		time.Sleep(countPause)
	}
	return exposed, errCounts
}

// compareCounts notes which direction's count is TCP's. One that has changed meanwhile tells
// nothing.
func (c *Conn) compareCounts() error {
	out, in := c.out.written.Load(), c.in.bytes.Load()
	written, read, err := tcpid.Positions(c.tcp)
	if err != nil {
		return err
	}
	if written == out && c.out.written.Load() == out {
		c.out.agrees.Store(true)
	}
	if read == in && c.in.bytes.Load() == in {
		c.in.agrees.Store(true)
	}
	return nil
}

// counted is called when a Read or Write on TCP has been counted, with its op held.
func (c *Conn) counted() {
	if c.comparing.Load() {
		c.compareCounts() // if that fails, whoever wants it finds out
	}
}
