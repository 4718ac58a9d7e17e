//go:build !linux

package sanconn

import (
	"errors"
	"net"
)

// There is no SAN here, so no connection has anything to show.

func showNothing(func(fd uintptr) (done bool)) (done bool, err error) {
	return false, errors.ErrUnsupported
}

func showEnd(func(fd uintptr) (done bool)) (done bool, err error) {
	return false, errors.ErrUnsupported
}

const showMost = 0

func showBytes([]byte, func(fd uintptr) (done bool)) (n int, done bool, err error) {
	return 0, false, errors.ErrUnsupported
}

func recv(int, []byte, bool) (int, error) { return 0, errors.ErrUnsupported }

// queued is how many bytes have come that were not read.
func queued(*net.TCPConn) int { return 0 }
