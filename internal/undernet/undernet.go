// Package undernet connects package san to packages net and syscall in programs that cmd/san has built.
// There, net and syscall call these functions by way of package overlay. In other programs nothing
// calls them.
package undernet

import (
	"context"
	"net"
	"sync/atomic"
)

// Package san sets these when it is initialized.
var (
	// Dialed returns the connection that carries a dialed TCP connection from now on, or nil if the TCP
	// connection stays plain.
	Dialed func(*net.TCPConn) (net.Conn, error)

	// Listened makes a TCP listener known to dialers. The result's methods are called for each accepted
	// connection, and when the listener is closed.
	Listened func(tcp *net.TCPListener, network string) (Listener, error)

	// NoMPTCP reports whether listeners must not use Multipath TCP.
	NoMPTCP func() bool
)

// Listener is an unnamed interface, so that package net can declare the same one.
type Listener = interface {
	// Accepted returns the connection that carries the TCP connection, or nil if it stays plain.
	Accepted(*net.TCPConn) net.Conn
	Close() error
}

// Package overlay sets these when it is initialized.
var (
	// Carrier returns the connection that carries a TCP connection of package net, or nil.
	Carrier = func(*net.TCPConn) net.Conn { return nil }

	// Plain returns a context in which package net dials and listens without the library.
	Plain = func(ctx context.Context) context.Context { return ctx }

	// Release makes a listener plain again. No Accept may be under way.
	Release = func(*net.TCPListener) {}
)

// Reads is set by package overlay if syscall.Read calls ReaderOf first in this program.
var Reads atomic.Bool

// ReaderOf returns the reader that takes the place of a descriptor, or nil. Package sanconn sets it.
var ReaderOf func(fd int) RawReader

// RawReader is what syscall.Read reads in place of a descriptor. It is an unnamed interface, like
// Listener. Each call of Next that returns no error is followed by one of Took.
type RawReader = interface {
	// Next returns the next bytes of the stream, in the memory where they are; none at the stream's
	// end. If most is not 0, up to most bytes are to be read from the descriptor instead.
	Next() (b []byte, most uint64, err error)
	// Took is told how many of these bytes were read, and with which error, and returns the error for
	// syscall.Read.
	Took(n int, err error) error
}
