// Package overlay puts package san beneath package net. The command san links it into the
// programs that it builds, against packages net and syscall that it has edited. With any others
// it does not link, and there is nothing in it to be called.
package overlay

import (
	"context"
	"net"
	_ "unsafe" // for go:linkname

	"github.com/sanconn/san" // whose init sets undernet's functions
	"github.com/sanconn/san/internal/undernet"
)

// The number is that of what the two sides expect of each other: a command and a library of
// different numbers do not link.

//go:linkname setHooks net.sanSetHooks1
func setHooks(
	dialed func(*net.TCPConn) (net.Conn, error),
	listened func(*net.TCPListener, string) (undernet.Listener, error),
	noMPTCP func() bool,
)

//go:linkname carrier net.sanCarrier1
func carrier(*net.TCPConn) net.Conn

//go:linkname plain net.sanPlain1
func plain(context.Context) context.Context

//go:linkname setReaderOf syscall.sanSetReaderOf1
func setReaderOf(func(fd int) undernet.RawReader)

//go:linkname release net.sanRelease1
func release(*net.TCPListener)

var _ = san.InfoOf // its init comes before this one

func init() {
	undernet.Carrier, undernet.Plain, undernet.Release = carrier, plain, release
	setReaderOf(undernet.ReaderOf)
	undernet.Reads.Store(true)
	setHooks(undernet.Dialed, undernet.Listened, undernet.NoMPTCP)
}
