//go:build !linux

package tcpid

import (
	"errors"
	"net"
	"syscall"
	"time"
)

// Cookie needs Linux.
func Cookie(*net.TCPConn) (uint64, error) { return 0, errors.ErrUnsupported }

// Hold needs Linux.
func Hold(syscall.Conn) (release func(), err error) { return nil, errors.ErrUnsupported }

// Namespace needs Linux.
func Namespace(syscall.Conn) uint64 { return 0 }

// Peer needs Linux.
func Peer(*net.TCPConn) (Socket, error) { return Socket{}, errors.ErrUnsupported }

// DialerStamps needs Linux.
func DialerStamps(*net.TCPConn, time.Time) ([]Stamp, error) { return nil, errors.ErrUnsupported }

// acceptorStamp needs Linux.
func acceptorStamp(*net.TCPConn) (Stamp, error) { return 0, errors.ErrUnsupported }

// IsOpen needs Linux.
func IsOpen(*net.TCPConn) (bool, error) { return false, errors.ErrUnsupported }

// Sends needs Linux.
func Sends(*net.TCPConn) (bool, error) { return false, errors.ErrUnsupported }

// Positions needs Linux.
func Positions(*net.TCPConn) (written, read uint64, err error) {
	return 0, 0, errors.ErrUnsupported
}
