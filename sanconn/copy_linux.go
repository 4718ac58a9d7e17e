package sanconn

import (
	"io"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// fillFromSocket reads from a socket, from which nobody else reads meanwhile. While the socket has no
// bytes, no room is reserved, which would block other Writes. While there is no room, the socket is not
// in use, which would block its Close.
func fillFromSocket(c *Conn, from socket, src *io.LimitedReader) (int64, error) {
	raw, err := from.SyscallConn()
	if err != nil {
		return 0, err
	}
	s := nonblocking{from, raw}
	return inParts(src, func(b *spare) (int, error) {
		if c.out.san.Load() == nil { // a Write may block, and the socket must not be in use then
			return copyOnce(c, src, b.get())
		}
		b.put()
		room, err := c.Reserve(int(min(copySize, src.N)))
		if err != nil {
			if s.atEnd() {
				err = errEnd // nothing is lost
			}
			return 0, err
		}
		n, err := commitFrom(c, s, room)
		src.N -= int64(n)
		switch err {
		case syscall.EAGAIN:
			err = s.await(raw.Read, unix.POLLIN)
		case io.EOF:
			err = errEnd
		}
		return n, err
	})
}

// drainToSocket writes to a socket, to which nobody else writes meanwhile. While the socket has no
// room, nothing is lent, which would keep the connection from going back to TCP and so block all its
// Reads and Writes.
func drainToSocket(c *Conn, to socket, all *io.LimitedReader) (int64, error) {
	raw, err := to.SyscallConn()
	if err != nil {
		return 0, err
	}
	s := nonblocking{to, raw}
	return drain(c, to, all, func() (int, error) {
		n, err := c.drainOnce(s)
		if err == syscall.EAGAIN {
			err = s.sinkError(s.await(raw.Write, unix.POLLOUT))
		}
		return n, err
	})
}

// nonblocking is a socket whose Read and Write do not wait: they return EAGAIN instead. Other errors of
// raw are that the socket was closed, or that its deadline has passed.
type nonblocking struct {
	socket
	raw syscall.RawConn
}

func (s nonblocking) Read(b []byte) (int, error) {
	n, err := now(s.raw.Read, "read", syscall.Read, b)
	if n == 0 && err == nil {
		err = io.EOF
	}
	return n, err
}

func (s nonblocking) Write(b []byte) (int, error) {
	n, err := now(s.raw.Write, "write", syscall.Write, b)
	if err == syscall.EAGAIN || err == nil && n < len(b) {
		return n, syscall.EAGAIN
	}
	return n, s.sinkError(err)
}

// now calls the kernel for the socket of a method of raw, and again if a signal has interrupted the
// call.
func now(use func(func(fd uintptr) (done bool)) error, name string, call func(fd int, b []byte) (int, error), b []byte) (n int, err error) {
	useErr := use(func(fd uintptr) (done bool) {
		for n, err = call(int(fd), b); err == syscall.EINTR; n, err = call(int(fd), b) {
		}
		return true
	})
	switch {
	case useErr != nil:
		return 0, useErr
	case err == nil, err == syscall.EAGAIN:
		return max(n, 0), err
	}
	return 0, os.NewSyscallError(name, err)
}

// await waits for the socket, by a method of raw.
func (s nonblocking) await(wait func(func(fd uintptr) (done bool)) error, event int16) error {
	return wait(func(fd uintptr) bool { return !waits(int(fd), event) })
}

// atEnd reports whether the socket has nothing more to read.
func (s nonblocking) atEnd() bool {
	n, err := now(s.raw.Read, "recvfrom", func(fd int, b []byte) (int, error) {
		n, _, err := syscall.Recvfrom(fd, b, syscall.MSG_PEEK)
		return n, err
	}, make([]byte, 1))
	return n == 0 && err == nil
}

// sinkError returns an error as the socket's own Write would.
func (s nonblocking) sinkError(err error) error {
	if err == nil {
		return nil
	}
	return &net.OpError{Op: opWrite, Net: s.LocalAddr().Network(), Source: s.LocalAddr(), Addr: s.RemoteAddr(), Err: withoutOp(err)}
}

// withoutOp returns the error in an error of a RawConn's method, whose operation is not the one that
// failed here.
func withoutOp(err error) error {
	if op, ok := err.(*net.OpError); ok {
		return op.Err
	}
	return err
}
