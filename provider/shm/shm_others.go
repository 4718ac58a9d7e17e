//go:build !linux

package shm

import (
	"context"
	"errors"
	"net"

	"github.com/sanconn/san/session"
)

var errSystem = &session.Unavailable{
	Reason: session.ReasonNoProvider,
	Err:    errors.New("shm: shared memory connections exist on Linux only"),
}

// Listener accepts connections from processes of this host. There are none on
// this system.
type Listener struct{}

// Listen reports that there is no such provider on this system.
func Listen(*net.TCPListener, Config) (*Listener, error) { return nil, errSystem }

// Accept reports that there is no such provider on this system.
func (*Listener) Accept() (session.Endpoint, *net.TCPAddr, *net.TCPAddr, error) {
	return nil, nil, nil, errSystem
}

// Waiting returns nil on this system.
func (*Listener) Waiting() error { return nil }

// Close does nothing on this system.
func (*Listener) Close() error { return nil }

// Dial reports that there is no such provider on this system.
func Dial(context.Context, int, *net.TCPAddr, Config) (session.Endpoint, error) {
	return nil, errSystem
}

// Idle returns at once: there are no links on this system.
func Idle(context.Context) error { return nil }
