package sanconn

import (
	"errors"
	"io"
	"net"
	"os"
	"sync/atomic"
	"syscall"

	"github.com/sanconn/san/internal/raceedge"
	"github.com/sanconn/san/internal/undernet"
	"github.com/sanconn/san/session"
)

// SyscallConn returns a RawConn of TCP's descriptor. A connection that has moved goes back to TCP
// first. Its methods fail as File does, except because of unread bytes: Read shows these to its
// function by a socket of their own.
//
// After Control the connection may move again, once its own Read and Write have been used for as much
// as at its beginning, at an accepted end for half as much, and if no byte has gone by the descriptor
// alone, and no direction was ended by it. So a program that sets an option, as gRPC does, loses
// nothing, and a program that takes the descriptor for itself, as event loops do, keeps it. After
// Write, as after File, the connection stays on TCP for good.
//
// Read calls its function without going back if nothing has come, as when a pool examines an idle
// connection, or if the end has come by a SAN: with a socket that shows exactly that. If bytes have
// come, Read is like Control, and once the function wants to wait for more, like Write. In programs
// that cmd/san has built, a function that reads by syscall.Read reads the connection instead, on either
// carrier: the connection may move, and stays where it is.
func (c *Conn) SyscallConn() (syscall.RawConn, error) { return &rawConn{c: c}, nil }

// rawConn is small, because pools make one for each use of a connection.
type rawConn struct {
	c         *Conn
	counts    atomic.Bool // the last function of Read has read by syscall.Read; the next one may, too
	otherwise atomic.Bool // a function has read otherwise
	lending   *lending    // nil before the first use of TCP; guarded by incoming.lends
}

// tcp returns TCP's RawConn.
func (r *rawConn) tcp() syscall.RawConn {
	raw, _ := r.c.tcp.SyscallConn() // fails only without a connection
	return raw
}

func (r *rawConn) Control(f func(fd uintptr)) error {
	c := r.c
	defer c.fd.release(c, true)
	if err := c.fd.have(c); err != nil {
		return c.opError(opRawControl, err)
	}
	c.mu.Lock()
	c.state.readElsewhere()
	c.mu.Unlock()
	return r.tcp().Control(f)
}

func (r *rawConn) Write(f func(fd uintptr) (done bool)) error {
	c := r.c
	defer c.fd.release(c, true)
	if err := c.fd.have(c); err != nil {
		return c.opError(opRawWrite, err)
	}
	for { // after a Write that was cut, and after reserved room
		if err := c.out.await(c, &pendingWrite{}); err != nil {
			err.(*net.OpError).Op = opRawWrite
			return err
		}
		c.out.op.Lock()
		if !c.out.suspended.Load() && !c.out.owned.Load() {
			break
		}
		c.out.op.Unlock()
	}
	defer c.out.op.Unlock()
	return r.tcp().Write(func(fd uintptr) bool {
		c.mu.Lock()
		c.fd.pinLocked(c)
		c.mu.Unlock()
		return f(fd)
	})
}

func (r *rawConn) Read(f func(fd uintptr) (done bool)) error {
	for {
		var done bool
		var err error
		if r.counts.Load() || undernet.Reads.Load() && !r.otherwise.Load() {
			done, err = r.readCounted(f)
		}
		if !done && err == nil && !r.counts.Load() {
			done, err = r.readUncounted(f)
		}
		if oe, ok := err.(*net.OpError); ok && oe.Op != opRawRead {
			e := *oe
			e.Op, err = opRawRead, &e
		}
		if done || err != nil {
			return r.c.opError(opRawRead, err)
		}
	}
}

// readUncounted is Read for a function that may read in any way. It returns false without an error if
// the function has read by syscall.Read after all, and so was counted.
func (r *rawConn) readUncounted(f func(fd uintptr) (done bool)) (done bool, err error) {
	c := r.c
	if (handle{c}).Stays() {
		return r.readTCP(f, true, false)
	}
	waits, done, err := r.look(f)
	if done || err != nil {
		return done, err
	}
	defer func() { c.fd.release(c, !r.counts.Load()) }()
	if err := c.fd.have(c); err != nil {
		if r.showLast(f) {
			return true, nil
		}
		return false, err
	}
	// In programs that cmd/san has built f is called at once, because it may read by syscall.Read: then
	// it needs the descriptor only for that.
	looked := waits && !undernet.Reads.Load()
	for {
		done, err := r.readTCP(f, waits, looked)
		if done || err != nil || r.counts.Load() {
			return done, err
		}
		waits, looked = true, false
	}
}

// look shows f what has come without going back to TCP, if that can be shown: nothing, or the end,
// after which f may wait.
func (r *rawConn) look(f func(fd uintptr) (done bool)) (empty, done bool, err error) {
	for {
		empty, err = r.empty()
		switch {
		case err == io.EOF:
			if done, err = end.show(f); !done && err == nil {
				err = r.c.in.awaitBehindEnd(r.c)
			}
			if done || err != nil {
				return false, done, err
			}
			continue
		case err == nil && empty:
			done, err = nothing.show(f)
		}
		return empty, done, err
	}
}

// empty reports whether nothing has come that could be read, nor the end; io.EOF: the end has come by a
// SAN, or CloseRead was called.
func (r *rawConn) empty() (bool, error) {
	c := r.c
	for {
		if s := c.in.san.Load(); s != nil && !c.in.shut.Load() {
			b, err := s.PeekExclusive(false)
			raceedge.Acquire()
			if b != nil {
				s.Discard(0)
			}
			if err != session.ErrTaken {
				return b == nil, err
			}
		}
		if c.in.suspended.Load() {
			return false, nil
		}
		if empty, err := r.emptyTCP(); err != errLook {
			return empty, err
		}
	}
}

// emptyTCP is empty on TCP.
func (r *rawConn) emptyTCP() (empty bool, err error) {
	c := r.c
	c.in.op.Lock()
	defer c.in.unlock(c)
	switch _, err = c.in.beforeLocked(c); {
	case err == io.EOF: // by CloseRead, which TCP does not know of if the connection had moved
		return false, io.EOF
	case len(c.in.front) > 0:
		return false, nil
	case c.closed.Load():
		return false, net.ErrClosed // with the operation raw-read, not read
	case err != nil:
		return false, err
	}
	if err = r.tcp().Read(func(fd uintptr) bool {
		empty = nothingIn(int(fd))
		return true
	}); err != nil {
		return false, c.in.deadline.afterTCP(c, opRawRead, err)
	}
	return empty, nil
}

// showHeld shows f the unread bytes that were taken from a carrier, which TCP's descriptor cannot have,
// such as those of a peer that has closed. in.op is held.
func (r *rawConn) showHeld(f func(fd uintptr) (done bool)) (done bool, err error) {
	c := r.c
	for c.in.holds() {
		switch most, err := c.in.beforeLocked(c); {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return false, err
		case err != nil, most > 0: // TCP's bytes precede them
			return false, errUnread
		}
		took, done, err := showBytes(c.in.front, f)
		c.in.advance(c, took)
		switch {
		case done || err != nil:
			return done, err
		case took == 0:
			return false, errUnread // f waits for more than these
		}
	}
	return false, nil
}

// showLast shows f what can still be read if there is no way back, because the session has ended: what
// was taken from the session on the way, and what the session has.
func (r *rawConn) showLast(f func(fd uintptr) (done bool)) (done bool) {
	in := &r.c.in
	func() {
		in.op.Lock()
		defer in.unlock(r.c)
		done, _ = r.showHeld(f) // fails if TCP's bytes come first
	}()
	for took := 1; took > 0 && !done; {
		s := in.san.Load()
		if s == nil {
			break
		}
		b, _ := s.PeekExclusive(false)
		raceedge.Acquire()
		if b == nil {
			break
		}
		func() {
			took = 0 // if f panics
			defer func() { s.Discard(took) }()
			took, done, _ = showBytes(b, f)
		}()
	}
	return done
}

// readTCP is Read on TCP. It calls f once, unless f may wait and does not read by syscall.Read. looked:
// f has seen that there is nothing, and wants to wait.
func (r *rawConn) readTCP(f func(fd uintptr) (done bool), waits, looked bool) (done bool, err error) {
	c := r.c
	c.in.lends.Lock()
	defer c.in.lends.Unlock()
	l := r.lendingLocked()
	c.in.op.Lock()
	defer c.in.unlock(c)
	if done, err = r.showHeld(f); done || err != nil {
		return done, err
	}
	l.f, l.session, l.most, l.tells, l.ended, l.done = f, nil, 1<<62, nil, nil, false
	c.mu.Lock()
	l.plain = c.state.endOf(c.in.bytes.Load()) != endIsCut
	c.mu.Unlock()
	err = r.tcp().Read(func(fd uintptr) bool {
		if !looked || !nothingIn(int(fd)) {
			if r.lend(fd); l.used {
				return true
			}
		}
		c.mu.Lock()
		if waits {
			c.fd.pinLocked(c)
		}
		c.state.readElsewhere()
		c.mu.Unlock()
		return l.done || !waits
	})
	return l.done, err
}
