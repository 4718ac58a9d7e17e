package sanconn

import (
	"io"
	"net"
	"os"
	"syscall"
)

// readFromDescriptor sends what src has, read straight into room that is reserved while it
// is read, and no longer: a reservation keeps other Writes from the connection. So only
// regular files are handled, and package net's sockets, of which no read waits.
func (c *Conn) readFromDescriptor(src syscall.Conn, limit *io.LimitedReader) (total int64, err error, handled bool) {
	raw, err := src.SyscallConn()
	if err != nil {
		return 0, nil, false
	}
	_, socket := src.(net.Conn)
	if raw.Control(func(fd uintptr) { handled = readsAtOnce(int(fd), socket) }) != nil || !handled {
		return 0, nil, false
	}
	for limit.N > 0 && err == nil {
		var n int
		waitErr := raw.Read(func(fd uintptr) (done bool) {
			n, err = c.readOnce(int(fd), int(min(copySize, limit.N)))
			return err != syscall.EAGAIN
		})
		limit.N -= int64(n)
		total += int64(n)
		if waitErr != nil { // the source was closed, or its deadline has passed
			err = waitErr
		}
	}
	if err == io.EOF {
		err = nil
	}
	return total, err, true
}

// readsAtOnce reports whether a read from fd does not wait.
func readsAtOnce(fd int, socket bool) bool {
	var st syscall.Stat_t
	if syscall.Fstat(fd, &st) != nil {
		return false
	}
	mode := st.Mode & syscall.S_IFMT
	return mode == syscall.S_IFREG || mode == syscall.S_IFSOCK && socket
}

// readOnce reserves room, reads up to most bytes into it, and sends them.
func (c *Conn) readOnce(fd, most int) (n int, err error) {
	room, err := c.Reserve(most)
	if err != nil {
		return 0, err
	}
	n, err = syscall.Read(fd, room)
	for err == syscall.EINTR {
		n, err = syscall.Read(fd, room)
	}
	n = max(n, 0)
	if cerr := c.Commit(n); cerr != nil {
		return 0, cerr
	}
	switch {
	case err == syscall.EAGAIN:
		return 0, err
	case err != nil:
		return 0, os.NewSyscallError("read", err)
	case n == 0:
		return 0, io.EOF
	}
	return n, nil
}
