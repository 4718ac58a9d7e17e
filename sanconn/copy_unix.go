//go:build unix

package sanconn

import (
	"io"
	"net"
	"os"
	"syscall"
)

// fillFromSocket reads from a socket, which nobody else reads meanwhile. While that has
// nothing, no room is reserved, which would keep other Writes from the connection. While
// there is no room, the socket is not in use, which would keep its Close waiting.
func (c *Conn) fillFromSocket(s syscall.Conn, src *io.LimitedReader) (int64, error) {
	raw, err := s.SyscallConn()
	if err != nil {
		return 0, err
	}
	return inParts(src, func(b *spare) (n int, err error) {
		if c.out.san.Load() == nil { // a Write may block, and the socket must not be in use then
			return copyPart(c, src, b)
		}
		b.put()
		room, err := c.Reserve(int(min(copySize, src.N)))
		if err != nil {
			if atEnd(raw) {
				err = io.EOF // nothing is lost
			}
			return 0, err
		}
		tried := false
		waitErr := raw.Read(func(fd uintptr) (done bool) {
			if tried {
				return true // it has something now
			}
			tried = true
			n, err = readNow(int(fd), room)
			if sent, cerr := c.commit(n); cerr != nil && err != io.EOF {
				n, err = sent, cerr
			}
			return err != syscall.EAGAIN
		})
		if !tried {
			c.Commit(0)
		}
		src.N -= int64(n)
		switch {
		case waitErr != nil: // the source was closed, or its deadline has passed
			return n, waitErr
		case err == syscall.EAGAIN:
			err = nil
		}
		return n, err
	})
}

// drainToSocket writes to a socket, to which nobody else writes meanwhile. While that has no room
// nothing is lent, which would keep the connection from going back to TCP, and then all its Reads
// and Writes waiting.
func (c *Conn) drainToSocket(s socket, all *io.LimitedReader) (int64, error) {
	raw, err := s.SyscallConn()
	if err != nil {
		return 0, err
	}
	return c.drain(s, all, func() (n int, err error) {
		b, err := c.Peek()
		if err != nil {
			return 0, err
		}
		tried := false
		var werr error
		waitErr := raw.Write(func(fd uintptr) (done bool) {
			if tried {
				return true // it has room now
			}
			tried = true
			n, werr = writeNow(int(fd), b)
			err = c.Discard(n)
			return err != nil || werr != syscall.EAGAIN
		})
		if !tried {
			c.Discard(0)
		}
		switch {
		case waitErr != nil: // the sink was closed, or its deadline has passed
			return n, sinkError(s, waitErr)
		case werr != nil && werr != syscall.EAGAIN:
			return n, sinkError(s, werr)
		}
		return n, err
	})
}

// sinkError is an error of a socket's Write.
func sinkError(s net.Conn, err error) error {
	return &net.OpError{Op: opWrite, Net: s.LocalAddr().Network(), Source: s.LocalAddr(), Addr: s.RemoteAddr(), Err: withoutOp(err)}
}

// withoutOp is an error of a RawConn's method without the operation, which is another here.
func withoutOp(err error) error {
	if op, ok := err.(*net.OpError); ok {
		return op.Err
	}
	return err
}

// atEnd reports whether a socket has nothing more to be read.
func atEnd(raw syscall.RawConn) (end bool) {
	raw.Read(func(fd uintptr) (done bool) {
		n, _, err := syscall.Recvfrom(int(fd), make([]byte, 1), syscall.MSG_PEEK)
		end = n == 0 && err == nil
		return true
	})
	return end
}

// readNow is a read that does not wait.
func readNow(fd int, b []byte) (int, error) {
	n, err := callNow("read", syscall.Read, fd, b)
	if n == 0 && err == nil {
		err = io.EOF
	}
	return n, err
}

// writeNow is a write that does not wait.
func writeNow(fd int, b []byte) (int, error) { return callNow("write", syscall.Write, fd, b) }

// callNow calls the kernel until no signal has interrupted that. The socket is non-blocking: an
// EAGAIN is as it is.
func callNow(name string, call func(fd int, b []byte) (int, error), fd int, b []byte) (int, error) {
	for {
		n, err := call(fd, b)
		switch err {
		case nil:
			return n, nil
		case syscall.EINTR:
		case syscall.EAGAIN:
			return 0, err
		default:
			return 0, os.NewSyscallError(name, err)
		}
	}
}
