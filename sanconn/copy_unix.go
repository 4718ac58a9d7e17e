//go:build unix

package sanconn

import (
	"io"
	"os"
	"syscall"
)

// fillFromSocket reads from a socket, without reserving room while it has nothing: that
// would keep other Writes from the connection.
func (c *Conn) fillFromSocket(s syscall.Conn, src *io.LimitedReader) (int64, error) {
	raw, err := s.SyscallConn()
	if err != nil {
		return 0, err
	}
	return c.fill(src, func(*io.LimitedReader) (n int, err error) {
		waitErr := raw.Read(func(fd uintptr) (done bool) {
			room, rerr := c.Reserve(int(min(copySize, src.N)))
			if rerr != nil {
				err = rerr
				return true
			}
			n, err = readNow(int(fd), room[:min(int64(len(room)), src.N)])
			if cerr := c.Commit(n); cerr != nil && err == nil {
				n, err = 0, cerr
			}
			return err != syscall.EAGAIN
		})
		src.N -= int64(n)
		if waitErr != nil { // the source was closed, or its deadline has passed
			err = waitErr
		}
		return n, err
	})
}

// readNow is a read that does not wait: the socket is non-blocking.
func readNow(fd int, b []byte) (int, error) {
	for {
		n, err := syscall.Read(fd, b)
		switch {
		case err == syscall.EINTR:
		case err == syscall.EAGAIN:
			return 0, err
		case err != nil:
			return 0, os.NewSyscallError("read", err)
		case n == 0:
			return 0, io.EOF
		default:
			return n, nil
		}
	}
}
