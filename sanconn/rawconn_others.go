//go:build !linux

package sanconn

import (
	"errors"
	"net"
)

// There is no SAN here, so no connection need be examined beside TCP.

type sharedSocket struct{}

var nothing, end sharedSocket

func (*sharedSocket) show(func(fd uintptr) (done bool)) (done bool, err error) {
	return false, errors.ErrUnsupported
}

func showBytes([]byte, func(fd uintptr) (done bool)) (took int, done bool, err error) {
	return 0, false, errors.ErrUnsupported
}

func nothingIn(int) bool { return false }

// queued is how many bytes have come that were not read.
func queued(*net.TCPConn) int { return 0 }

// resetsAtClose reports whether SO_LINGER is on, with no time.
func resetsAtClose(*net.TCPConn) bool { return false }
