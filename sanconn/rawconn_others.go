//go:build !linux

package sanconn

import (
	"errors"
	"net"
)

// There is no SAN on this system, so all connections are on TCP.

type sharedSocket struct{}

var nothing, end sharedSocket

func (*sharedSocket) show(func(fd uintptr) (done bool)) (done bool, err error) {
	return false, errors.ErrUnsupported
}

func showBytes([]byte, func(fd uintptr) (done bool)) (took int, done bool, err error) {
	return 0, false, errors.ErrUnsupported
}

func nothingIn(int) bool { return false }

// queued returns how many unread bytes have come.
func queued(*net.TCPConn) int { return 0 }

// resetsAtClose reports whether SO_LINGER is on, with a time of 0.
func resetsAtClose(*net.TCPConn) bool { return false }
