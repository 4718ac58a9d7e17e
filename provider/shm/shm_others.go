//go:build !linux

package shm

import (
	"context"
	"errors"

	"github.com/sanconn/san/session"
)

var errSystem = &session.Unavailable{
	Reason: session.ReasonNoProvider,
	Err:    errors.New("shm: shared memory connections exist on Linux only"),
}

// Listener takes connections from processes of this host. There are none on this system.
type Listener struct{}

// Listen reports that there is no such provider on this system.
func Listen(uint16, Config) (*Listener, error) { return nil, errSystem }

// Number returns 0 on this system.
func (*Listener) Number() int { return 0 }

// Serve returns at once on this system.
func (*Listener) Serve(func(session.Endpoint)) {}

// Close does nothing on this system.
func (*Listener) Close() error { return nil }

// Dial reports that there is no such provider on this system.
func Dial(context.Context, uint16, int, uint32, Config) (session.Endpoint, error) {
	return nil, errSystem
}

// PeerUser returns 0 on this system, which has no endpoints.
func PeerUser(session.Endpoint) uint32 { return 0 }

// Idle returns at once: there are no links on this system.
func Idle(context.Context) error { return nil }
