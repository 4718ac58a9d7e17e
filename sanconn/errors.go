package sanconn

import (
	"errors"
	"io"
	"net"
	"os"
	"reflect"
	"syscall"

	"github.com/sanconn/san/internal/tcpid"
	"github.com/sanconn/san/session"
)

// Operation names, as net uses them in OpError.
const (
	opRead  = "read"
	opWrite = "write"
	opClose = "close"
	opSet   = "set"
	opFile  = "file"

	opWritev   = "writev"
	opReadFrom = "readfrom"
	opWriteTo  = "writeto"

	opRawControl = "raw-control"
	opRawRead    = "raw-read"
	opRawWrite   = "raw-write"
)

// opError is the only place where errors of the session become those that net would return
// for the operation op. io.EOF is not wrapped.
func (c *Conn) opError(op string, err error) error {
	if _, ok := err.(*net.OpError); err == nil || err == io.EOF || ok { // of TCP
		return err
	}
	var errno syscall.Errno
	switch {
	case c.closed.Load(), errors.Is(err, net.ErrClosed):
		err = net.ErrClosed
	case errors.Is(err, session.ErrInterrupted):
		err = os.ErrDeadlineExceeded
	case errors.Is(err, session.ErrClosed):
		errno = syscall.ECONNRESET // the Conn is open: its way back to TCP has failed
		if op == opWrite {         // or this is after CloseWrite
			errno = syscall.EPIPE
		}
		err = os.NewSyscallError(op, errno)
	case errors.As(err, &errno):
		err = os.NewSyscallError(op, errno)
	}
	if op == opRawControl { // as net has it
		return &net.OpError{Op: op, Net: c.network(), Addr: c.LocalAddr(), Err: err}
	}
	return &net.OpError{Op: op, Net: c.network(), Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: err}
}

// endsTCP reports whether an error of a Write by TCP is TCP's end. The error does not tell: it may be that of a
// copy's file, or one that TCP outlives (IP_RECVERR), and TCP ends with any that its packets have met. An end
// that the program has made by the descriptor is one, too, as none of these bytes were sent.
func endsTCP(tcp *net.TCPConn, err error) bool {
	if err == nil { // what follows allocates
		return false
	}
	var errno syscall.Errno
	if !errors.As(err, &errno) { // a deadline's, or Close's
		return false
	}
	sends, _ := tcpid.Sends(tcp) // where that cannot be known it is taken for the end
	return !sends
}

// readError is opError for a Read, or a Peek. Once one has found that the peer is lost it is io.EOF, as
// with TCP: a loop may end at nothing else.
func (c *Conn) readError(err error) error {
	if err = c.opError(opRead, err); errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.ETIMEDOUT) {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.in.cut {
			return io.EOF
		}
		c.in.cut = true
	}
	return err
}

// copyError is an error of ReadFrom or WriteTo, of which net tells the operation besides that in
// which it came up.
func (c *Conn) copyError(op string, err error) error {
	if oe, ok := err.(*net.OpError); err == nil || err == io.EOF || ok && oe.Op == op { // of TCP
		return err
	}
	return &net.OpError{Op: op, Net: c.network(), Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: err}
}

// network is what the connection was dialed by, or its listener opened: "tcp", "tcp4" or "tcp6".
// Package net shows it in errors alone.
func (c *Conn) network() string {
	fd := reflect.Indirect(reflect.ValueOf(c.tcp).Elem().FieldByName("fd"))
	if fd.Kind() == reflect.Struct {
		if network := fd.FieldByName("net"); network.Kind() == reflect.String {
			return network.String()
		}
	}
	return "tcp"
}
