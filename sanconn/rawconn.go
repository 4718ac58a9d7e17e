package sanconn

import (
	"errors"
	"fmt"
	"io"
	"syscall"

	"github.com/sanconn/san/internal/raceedge"
	"github.com/sanconn/san/session"
)

// SyscallConn returns a RawConn of TCP's descriptor, to which the connection goes back first
// if it has moved. They fail where File does.
//
// Behind Control it may move again, once it has been used by its own Read and Write for as much
// as at its beginning, and if TCP has carried no byte that these do not know of: what sets an
// option, as gRPC does, costs nothing, and what takes the descriptor for itself, as event loops
// do, keeps it. Behind Write, as behind File, it stays on TCP for good.
//
// So does Read, once its function wants to wait. Before that the connection stays where it is
// and may move: the function, which in connection pools only examines an idle connection,
// gets a non-blocking socket that shows what the connection has, while the function runs:
// nothing, the next bytes (a piece of up to 4 KiB), or the end of the stream. What the
// function reads from it counts as read from the connection; what it only looks at (MSG_PEEK)
// does not. Errors of the connection are returned without a call.
func (c *Conn) SyscallConn() (syscall.RawConn, error) {
	raw, err := c.tcp.SyscallConn()
	return rawConn{c, raw}, err
}

type rawConn struct {
	c   *Conn
	tcp syscall.RawConn
}

func (r rawConn) Control(f func(fd uintptr)) error {
	c := r.c
	c.expose(1)
	defer c.expose(-1)
	if err := c.toTCP(false); err != nil {
		return c.opError(opRawControl, err)
	}
	c.readElsewhere()
	return r.tcp.Control(f)
}

// expose counts users of TCP's descriptor. Behind the last one, the connection may move once
// it has been used for as much as at its beginning.
func (c *Conn) expose(n int32) {
	c.exposed.Add(1)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.users += n; c.users == 0 && c.cfg.Use != nil {
		c.useAt.Store(c.used.Load() + c.cfg.Threshold)
	}
}

func (r rawConn) Write(f func(fd uintptr) (done bool)) error {
	c := r.c
	if err := c.toTCP(true); err != nil {
		return c.opError(opRawWrite, err)
	}
	c.out.op.Lock()
	defer c.out.op.Unlock()
	return r.tcp.Write(f)
}

func (r rawConn) Read(f func(fd uintptr) (done bool)) error {
	tried := false
	var stays error // why the connection does not go back to TCP
	for {
		done, err := r.show(f)
		switch {
		case err == errLook:
			continue
		case err == errLeftLying && !tried:
			err = nil
		case err == nil && !done:
			err = stays // and there was nothing to be shown
		}
		if done || err != nil {
			return r.c.opError(opRawRead, err)
		}
		stays, tried = r.c.toTCP(true), true
		if stays == nil && !r.c.descriptorHasAll() {
			if _, err := r.c.Peek(); err != nil && err != io.EOF {
				return r.c.opError(opRawRead, err)
			}
		}
	}
}

// errLeftLying: the function waits for more than what it was shown, which did not come by
// TCP's descriptor, and has read nothing of that.
var errLeftLying = fmt.Errorf("sanconn: to wait behind bytes that have not been read: %w", errors.ErrUnsupported)

// show calls f once with what the connection has, or until it is done with TCP's descriptor.
func (r rawConn) show(f func(fd uintptr) (done bool)) (done bool, err error) {
	c := r.c
	if s := c.in.san.Load(); s != nil && !c.in.shut.Load() {
		b, err := s.Look(false)
		raceedge.Acquire()
		if err != session.ErrTaken {
			return showLoan(f, b, err, s.Discard)
		}
	}
	if c.in.away.Load() {
		if err := c.awaitIn(opRawRead); err != nil {
			return false, err
		}
	}
	c.in.op.Lock()
	defer c.in.unlock(c)
	most, err := c.beforeLocked()
	switch {
	case err == io.EOF:
		return showLoan(f, nil, err, nil)
	case err != nil:
		return false, err
	case len(c.in.front) > 0:
		return showLoan(f, c.in.front, nil, func(n int) error {
			c.in.take(n)
			return nil
		})
	}
	if c.descriptorHasAll() || showMost == 0 {
		c.readElsewhere()
		return true, r.tcp.Read(f)
	}
	rerr := r.tcp.Read(func(fd uintptr) bool {
		done, err = r.showTCP(int(fd), most, f)
		return true
	})
	if rerr != nil {
		return false, c.afterTCP(&c.in.deadline, opRawRead, rerr)
	}
	return done, err
}

// descriptorHasAll reports whether the function may have TCP's descriptor: the connection stays
// on TCP, and no bytes are kept that come before some of TCP's.
func (c *Conn) descriptorHasAll() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state.pinned && c.state.phase == onTCP && !c.in.resting
}

// showTCP shows what TCP has. op is held.
func (r rawConn) showTCP(fd int, most uint64, f func(fd uintptr) (done bool)) (done bool, err error) {
	c := r.c
	b := make([]byte, min(most, showMost))
	n, err := recv(fd, b, true)
	switch {
	case err == syscall.EAGAIN:
		return showNothing(f)
	case err != nil:
		return false, c.opError(opRawRead, err)
	case n == 0:
		c.mu.Lock()
		err = c.endLocked(io.EOF)
		c.mu.Unlock()
		if err == errOpen {
			return showNothing(f)
		}
		return showLoan(f, nil, err, nil)
	}
	return showLoan(f, b[:n], nil, func(n int) error {
		n, err := recv(fd, b[:n], false)
		c.in.count(c, n)
		return err
	})
}

// showLoan shows b, or the end, or that there is nothing. discard counts bytes as read.
func showLoan(f func(fd uintptr) (done bool), b []byte, err error, discard func(int) error) (done bool, _ error) {
	switch {
	case err == io.EOF:
		if done, err = showEnd(f); err == nil && !done {
			err = io.EOF
		}
		return done, err
	case err != nil:
		return false, err
	case b == nil:
		return showNothing(f)
	}
	n := 0
	defer func() { // also if f panics
		if derr := discard(n); err == nil {
			err = derr
		}
	}()
	if n, done, err = showBytes(b, f); err == nil && !done && n == 0 {
		err = errLeftLying
	}
	return done, err
}
