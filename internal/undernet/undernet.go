// Package undernet is what package san does beneath package net, in programs that cmd/san has
// built: there, packages net and syscall call these functions, by way of package overlay. In all other
// programs nothing does.
package undernet

import (
	"context"
	"net"
	"sync/atomic"
)

// Package san sets these when it is initialized.
var (
	// Dialed returns what carries a TCP connection that has been dialed, from now on, or nil:
	// it stays plain.
	Dialed func(*net.TCPConn) (net.Conn, error)

	// Listened makes a TCP listener known to its dialers. The result is
	// called for each connection that it accepts, and when it is closed.
	Listened func(tcp *net.TCPListener, network string) (Listener, error)

	// NoMPTCP reports whether listeners have to do without Multipath TCP.
	NoMPTCP func() bool
)

// Listener is an unnamed interface, which package net can name as well.
type Listener = interface {
	// Accepted returns what carries the connection, or nil: it stays plain.
	Accepted(*net.TCPConn) net.Conn
	Close() error
}

// Package overlay sets these when it is initialized.
var (
	// Carrier returns what carries a TCP connection of package net, or nil.
	Carrier = func(*net.TCPConn) net.Conn { return nil }

	// Plain returns a context with which package net dials and listens as ever.
	Plain = func(ctx context.Context) context.Context { return ctx }

	// Release makes a listener plain: no Accept is under way.
	Release = func(*net.TCPListener) {}
)

// Reads is set by package overlay: in this program, syscall.Read calls ReaderOf first.
var Reads atomic.Bool

// ReaderOf returns what is read instead of a descriptor, or nil. Package sanconn sets it.
var ReaderOf func(fd int) RawReader

// RawReader is what syscall.Read of a descriptor reads instead, an unnamed interface as well. A call of
// Next is followed by one of Took, unless it has returned an error.
type RawReader = interface {
	// Next returns the bytes that come next, where they lie, none at the end, or, if most is not
	// zero, has as many be read from the descriptor.
	Next() (b []byte, most uint64, err error)
	// Took tells what was read of these, and returns the error of syscall.Read.
	Took(n int, err error) error
}
