package sanconn

import (
	"errors"
	"fmt"
	"io"
	"syscall"

	"github.com/sanconn/san/internal/raceedge"
)

var (
	errNoDescriptor = fmt.Errorf("no descriptor carries a SAN connection; only RawConn.Read works: %w", errors.ErrUnsupported)
	errLookedAt     = fmt.Errorf("what comes behind bytes that were not read cannot be waited for: %w", errors.ErrUnsupported)
)

// SyscallConn returns a RawConn of which Read works, for connection pools that examine an
// idle connection without reading from it. Read calls its function with a non-blocking
// socket that shows what the connection has, while the function runs: nothing, the next
// bytes (a piece of up to 4 KiB), or the end of the stream. What the function reads from it
// counts as read from the connection; what it only looks at (MSG_PEEK) does not. The socket
// is not the connection's: options, a copy of it, and what is written to it have no effect.
//
// As with TCP, if the function returns false, it is called again when there is more to be
// read; the read deadline and Close end the wait. Not as with TCP, that is an error if it
// has left all bytes unread. Errors of the connection are returned without a call.
//
// Control and Write fail with an error that matches errors.ErrUnsupported, and so does Read
// where there is no SAN.
func (c *Conn) SyscallConn() (syscall.RawConn, error) { return rawConn{c}, nil }

type rawConn struct{ c *Conn }

func (r rawConn) Control(func(fd uintptr)) error { return r.c.opError(opRawControl, errNoDescriptor) }

func (r rawConn) Write(func(fd uintptr) (done bool)) error {
	return r.c.opError(opRawWrite, errNoDescriptor)
}

func (r rawConn) Read(f func(fd uintptr) (done bool)) error {
	for wait := false; ; wait = true {
		done, err := r.show(wait, f)
		if done || err != nil {
			return r.c.opError(opRawRead, err)
		}
	}
}

// show calls f once. wait: not before there is something to be read.
func (r rawConn) show(wait bool, f func(fd uintptr) (done bool)) (done bool, err error) {
	b, err := r.c.session.Look(wait)
	raceedge.Acquire()
	switch {
	case err == io.EOF:
		if done, err = showEnd(f); !done && err == nil {
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
		if derr := r.c.session.Discard(n); err == nil {
			err = derr
		}
	}()
	n, done, err = showBytes(b, f)
	if !done && err == nil && n == 0 {
		err = errLookedAt
	}
	return done, err
}
