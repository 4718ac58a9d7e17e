//go:build !unix

package sanconn

import (
	"io"
	"syscall"
)

// fillFromSocket copies, where sockets cannot be read without waiting.
func (c *Conn) fillFromSocket(_ syscall.Conn, src *io.LimitedReader) (int64, error) {
	return pump(c, src)
}

// drainToSocket copies, likewise.
func (c *Conn) drainToSocket(s socket, all *io.LimitedReader) (int64, error) {
	return pump(s, all)
}
