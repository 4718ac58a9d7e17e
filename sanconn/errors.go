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

// opError is the only place where errors of the session become those that net would return for the
// operation op. io.EOF is not wrapped.
func (c *Conn) opError(op string, err error) error {
	if _, ok := err.(*net.OpError); err == nil || err == io.EOF || ok { // an error of TCP
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
		if op == opWrite {         // or CloseWrite was called
			errno = syscall.EPIPE
		}
		err = os.NewSyscallError(op, errno)
	case errors.As(err, &errno):
		err = os.NewSyscallError(op, errno)
	}
	if op == opRawControl { // as in net
		return &net.OpError{Op: op, Net: c.network(), Addr: c.LocalAddr(), Err: err}
	}
	return &net.OpError{Op: op, Net: c.network(), Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: err}
}

// endsTCP reports whether TCP has ended, after a Write by TCP has returned an error. The error does not
// show that: it may be the error of a copy's file, or one that TCP survives (IP_RECVERR), and TCP ends
// with any error that its packets have met. An end that the program has made by the descriptor counts,
// too, because none of these bytes were sent.
func endsTCP(tcp *net.TCPConn, err error) bool {
	if err == nil { // the rest allocates
		return false
	}
	var errno syscall.Errno
	if !errors.As(err, &errno) { // of a deadline or Close
		return false
	}
	sends, _ := tcpid.Sends(tcp) // if that cannot be found out, TCP counts as ended
	return !sends
}

// readError is opError for a Read or a Peek. After one of them has found that the peer is lost, later
// ones return io.EOF, as with TCP: a loop may end only at io.EOF.
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

// copyError returns an error of ReadFrom or WriteTo. As in net, it names this operation in addition to
// the one that failed.
func (c *Conn) copyError(op string, err error) error {
	if oe, ok := err.(*net.OpError); err == nil || err == io.EOF || ok && oe.Op == op { // an error of TCP
		return err
	}
	return &net.OpError{Op: op, Net: c.network(), Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: err}
}

// network returns the network by which the connection was dialed or its listener opened: "tcp", "tcp4"
// or "tcp6". Package net shows it only in errors.
func (c *Conn) network() string {
	fd := reflect.Indirect(reflect.ValueOf(c.tcp).Elem().FieldByName("fd"))
	if fd.Kind() == reflect.Struct {
		if network := fd.FieldByName("net"); network.Kind() == reflect.String {
			return network.String()
		}
	}
	return "tcp"
}
