package sanconn

import (
	"os"
	"sync/atomic"
	"time"

	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/tcpid"
)

// After Control, and if it was passed on, a connection moves only if all bytes that TCP has carried
// went by its own Reads and Writes, by the kernel's counts. Bytes that were written by the descriptor
// would be lost between the carriers. A Read or Write in progress also makes a difference, because the
// kernel counts its bytes first. So each one compares the counts again when it returns, while check
// waits for them to agree.
const (
	// After countLooks looks, countPause apart, a direction whose counts do not agree is assumed to
	// have been used by the descriptor. A busy direction finishes several pieces of a Write meanwhile,
	// however slow the machine is.
	countLooks = 40
	countPause = 500 * time.Microsecond
)

// returnPause is the pause between two looks for what comes back by TCP, which takes some 50 µs. It
// doubles, because the peer may be stopped.
const (
	returnPause     = 50 * time.Microsecond
	mostReturnPause = time.Millisecond
)

// tcpDescriptor is TCP's descriptor, which the program may have, and earlier owners may have had.
type tcpDescriptor struct {
	// exposed is how often the program has had it for a moment, or earlier owners have had it: the
	// stream may have bytes that this Conn does not know of.
	exposed atomic.Uint64

	comparing atomic.Pointer[agreement] // in progress while check wants it; else nil

	users int // at the moment; guarded by Conn.mu
}

// agreement is for which directions this Conn's count equals TCP's.
type agreement struct{ out, in atomic.Bool }

// check returns an error if the program may have used the descriptor. The result holds as long as
// exposed has the value that is returned.
func (d *tcpDescriptor) check(c *Conn) (exposed uint64, err error) {
	exposed = d.exposed.Load()
	switch {
	case c.use.claimed():
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
	agree := new(agreement)
	d.comparing.Store(agree)
	defer d.comparing.Store(nil)
	for range countLooks {
		if err = agree.compare(c); err != nil || agree.out.Load() && agree.in.Load() {
			return exposed, err
		}
		time.Sleep(countPause)
	}
	return exposed, errCounts
}

// compare notes for which directions the counts agree. A count that has changed meanwhile shows
// nothing.
func (a *agreement) compare(c *Conn) error {
	out, in := c.out.written.Load(), c.in.bytes.Load()
	written, read, err := tcpid.Positions(c.tcp)
	if err != nil {
		return err
	}
	if written == out && c.out.written.Load() == out {
		a.out.Store(true)
	}
	if read == in && c.in.bytes.Load() == in {
		a.in.Store(true)
	}
	return nil
}

// counted is called after a Read or Write on TCP was counted, with its op held; use is how much use
// that is. It makes package san move the connection when that pays.
func (c *Conn) counted(use int64) {
	if a := c.fd.comparing.Load(); a != nil {
		a.compare(c) // check meets its errors itself
	}
	if c.use.add(use) {
		c.life.Used(handle{c}, false)
	}
}

// have makes TCP carry the connection, until release.
func (d *tcpDescriptor) have(c *Conn) error {
	c.mu.Lock()
	d.users++
	err := c.backLocked()
	if err == nil && c.state.failed != 0 { // the descriptor shows only the end
		err = c.state.failed
	}
	c.mu.Unlock()
	if err == nil {
		c.in.awaitReturned(c)
	}
	return err
}

// awaitReturned waits until the descriptor shows something, if bytes were returned to the peer, which
// sends them again: functions that look there, as those of pools, do not wait. A Read that takes the
// bytes ends the wait.
func (in *incoming) awaitReturned(c *Conn) {
	end := time.Now().Add(backTimeout.get())
	for pause := returnPause; !c.closed.Load() && time.Now().Before(end); pause = min(2*pause, mostReturnPause) {
		c.mu.Lock()
		returned := c.state.least > in.bytes.Load()
		c.mu.Unlock()
		if !returned {
			return
		}
		raw, _ := c.tcp.SyscallConn()
		if raw.Control(func(fd uintptr) { returned = nothingIn(int(fd)) }) != nil || !returned {
			return
		}
		time.Sleep(pause)
	}
}

// release ends a have, even one that has failed. claim: after the last release, the connection moves no
// earlier than after as much use as at its beginning.
func (d *tcpDescriptor) release(c *Conn, claim bool) {
	d.exposed.Add(1)
	c.mu.Lock()
	defer c.mu.Unlock()
	if d.users--; d.users == 0 && claim {
		c.use.claim(c.threshold)
	}
}

// pinLocked makes TCP carry the connection for good. It is called between have and release, with mu
// held.
func (d *tcpDescriptor) pinLocked(c *Conn) {
	c.state.pinned = true
	if c.state.hasLeft {
		c.use.at.Store(newconn.Never)
	}
	c.changedLocked() // for WriteUrgent
}

// File returns a copy of TCP's descriptor; see net.TCPConn.File. A connection that has moved to a SAN
// goes back first. From then on it stays on TCP. File fails if the peer does not answer within 5 s, or
// if a connection that has moved was reset. It also fails if there are unread bytes that were taken
// from TCP, or from the SAN when the peer had closed or gone back.
func (c *Conn) File() (*os.File, error) {
	defer c.fd.release(c, true)
	err := c.fd.have(c)
	c.mu.Lock()
	if err == nil && c.in.holds() {
		err = errUnread
	}
	c.mu.Unlock()
	if err != nil {
		return nil, c.opError(opFile, err)
	}
	f, err := c.tcp.File()
	if err == nil {
		c.mu.Lock()
		c.fd.pinLocked(c)
		c.state.readElsewhere()
		c.mu.Unlock()
	}
	return f, err
}
