//go:build !linux

package sanconn

import (
	"io"
	"syscall"
)

// readFromDescriptor handles nothing where descriptors cannot be read without waiting.
func (c *Conn) readFromDescriptor(syscall.Conn, *io.LimitedReader) (int64, error, bool) {
	return 0, nil, false
}
