package sanconn

import (
	"cmp"
	"errors"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/sanconn/san/internal/raceedge"
	"github.com/sanconn/san/session"
)

// writePiece is how many bytes of a Write go to TCP at a time, so that a long Write can move in its
// middle. A piece takes many times as long as a system call.
const writePiece = 256 << 10

// outgoing is this end's direction.
type outgoing struct {
	// san is set once the direction has moved. Then a Write needs only san.
	san atomic.Pointer[session.Session]

	// Parts of Conn.state, to be read without mu: see steppedLocked.
	next      atomic.Pointer[session.Session] // the session that the direction may move to: the next holder of op moves it
	shut      atomic.Bool                     // CloseWrite was called
	suspended atomic.Bool                     // Writes wait, as the direction goes back to TCP, or what came back goes first

	// owned: a Write that was cut in its middle, or reserved room, goes before other Writes. It changes
	// with Conn.mu held.
	owned atomic.Bool

	op      sync.Mutex    // held by one Write at a time on TCP, and by the move
	cut     int32         // Writes that were cut, less those of them that have ended; guarded by Conn.mu
	written atomic.Uint64 // bytes written to TCP; grows with op held

	back     []byte // what came back from the session unread: it goes before anything else; guarded by op
	reserved []byte // see Conn.Reserve; guarded by Conn.mu

	deadline deadline
}

// pendingWrite is a Write in progress, of one slice or of several.
type pendingWrite struct {
	p       []byte       // what is left of the one slice
	v       *net.Buffers // what is left of several slices; nil: there is one
	n       int64        // how many bytes were written
	commits bool         // the bytes are in room of Reserve
	cuts    int          // how often it was cut in its middle
}

// done reports whether nothing is left.
func (w *pendingWrite) done() bool { return len(w.p) == 0 && (w.v == nil || len(*w.v) == 0) }

// bySession writes what is left by the session.
func (w *pendingWrite) bySession(s *session.Session) (err error) {
	raceedge.Release()
	var n int64
	if w.v != nil {
		n, err = s.WriteBuffers(*w.v)
		consume(w.v, n)
	} else {
		var k int
		k, err = s.Write(w.p)
		n, w.p = int64(k), w.p[k:]
	}
	w.n += n
	return err
}

// byTCP writes a piece by TCP.
func (w *pendingWrite) byTCP(tcp *net.TCPConn) (n int64, err error) {
	if w.v != nil {
		n, err = writePieceOf(w.v, tcp)
	} else {
		var k int
		k, err = tcp.Write(w.p[:min(len(w.p), writePiece)])
		n, w.p = int64(k), w.p[k:]
	}
	w.n += n
	return n, err
}

// write performs a Write.
func (o *outgoing) write(c *Conn, w *pendingWrite) error {
	defer func() {
		if w.cuts > 0 {
			o.addCuts(c, -w.cuts) // it may come before exchange counts the cut
		}
	}()
	for {
		if s := o.san.Load(); s != nil && o.may(c, w) {
			err := w.bySession(s)
			if err == nil {
				return nil
			}
			if err = o.again(c, w, err); err != errLook {
				return c.opError(opWrite, err)
			}
		}
		switch {
		case w.n > 0 && w.done():
			return nil
		case c.closed.Load():
			return c.opError(opWrite, net.ErrClosed)
		}
		if err := o.await(c, w); err != nil {
			return err
		}
		o.op.Lock()
		err := errLook
		if o.may(c, w) {
			err = o.writeLocked(c, w)
		}
		err = o.again(c, w, err)
		o.unlock(c)
		if err != errLook {
			return err
		}
	}
}

// again returns errLook if a Write that has returned err has to go on, because the way back to TCP has
// taken it. If that has cut the Write in its middle, other Writes wait for it, as the bytes must not be
// mixed. So again is called before other Writes can go on, except after a Write on the session, for
// which exchange calls addCuts.
func (o *outgoing) again(c *Conn, w *pendingWrite, err error) error {
	switch {
	case err == session.ErrCut:
		w.cuts++
	case err == errLook && w.n > 0 && w.cuts == 0:
		o.addCuts(c, 1)
		w.cuts++
	case err != session.ErrTaken:
		return err
	}
	return errLook
}

// addCuts counts Writes that were cut.
func (o *outgoing) addCuts(c *Conn, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	o.cut += int32(n)
	o.ownLocked(c)
}

// ownLocked sets owned. mu is held.
func (o *outgoing) ownLocked(c *Conn) {
	o.owned.Store(o.reserved != nil || o.cut > 0)
	c.changedLocked()
}

// may reports whether it is this Write's turn.
func (o *outgoing) may(c *Conn, w *pendingWrite) bool {
	if !o.owned.Load() {
		return true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return o.mayLocked(w)
}

func (o *outgoing) mayLocked(w *pendingWrite) bool {
	return !o.owned.Load() || w.cuts > 0 || w.commits && o.cut <= 0
}

// errLook: the state has changed, look again.
var errLook = errors.New("sanconn: look again")

// stopped returns why the holder of op must not write to TCP, or nil.
func (o *outgoing) stopped(c *Conn) error {
	if !c.closed.Load() && o.san.Load() == nil && !o.suspended.Load() && !o.shut.Load() {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return o.stoppedLocked(c)
}

// stoppedLocked is stopped with mu held.
func (o *outgoing) stoppedLocked(c *Conn) error {
	if !c.closed.Load() && (o.san.Load() != nil || o.suspended.Load()) {
		return errLook
	}
	return o.shutLocked(c)
}

// shutLocked returns why nothing is written any more, on either carrier, or nil. mu is held.
func (o *outgoing) shutLocked(c *Conn) error {
	switch {
	case c.closed.Load():
		return c.opError(opWrite, net.ErrClosed)
	case o.shut.Load(): // as in net, the deadline comes first
		return cmp.Or(o.deadline.passed(c), c.opError(opWrite, os.NewSyscallError(opWrite, syscall.EPIPE)))
	}
	return nil
}

// writeLocked writes by TCP, piece by piece, until the direction may move. op is held.
func (o *outgoing) writeLocked(c *Conn, w *pendingWrite) error {
	for {
		if s := o.next.Load(); s != nil {
			return o.crossLocked(c, s, w)
		}
		if err := o.stopped(c); err != nil {
			return err
		}
		n, err := w.byTCP(c.tcp)
		if err = o.wroteLocked(c, n, err); err != nil {
			return err
		}
		if w.done() {
			return nil
		}
	}
}

// piece writes a piece of a copy to TCP by put; errLook: something else has to be done first.
func (o *outgoing) piece(c *Conn, put func() (int64, error)) error {
	if err := o.await(c, &pendingWrite{}); err != nil {
		return err
	}
	o.op.Lock()
	defer o.unlock(c)
	if o.next.Load() != nil || o.owned.Load() || o.stopped(c) != nil {
		return errLook
	}
	n, err := put()
	return o.wroteLocked(c, n, err)
}

// wroteLocked counts bytes written to TCP, and returns what the error means. op is held.
func (o *outgoing) wroteLocked(c *Conn, n int64, err error) error {
	o.count(c, n)
	if endsTCP(c.tcp, err) {
		c.mu.Lock()
		c.state.out.broken = true
		c.mu.Unlock()
	}
	return o.deadline.afterTCP(c, opWrite, err)
}

// count counts bytes written to TCP. op is held.
func (o *outgoing) count(c *Conn, n int64) {
	o.written.Store(o.written.Load() + uint64(n))
	c.counted(n)
}

// await waits while a Write has to wait.
func (o *outgoing) await(c *Conn, w *pendingWrite) error {
	if !o.suspended.Load() && !o.owned.Load() {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for o.suspended.Load() || !o.mayLocked(w) {
		err := o.shutLocked(c)
		if err == nil {
			err = o.deadline.awaitLocked(c)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
