package verbs

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/internal/reason"
	"github.com/sanconn/san/session"
)

// What the results of connecting mean to the dialer.

// Reasons of a reject by InfiniBand's connection manager that have a meaning of their own (IBTA
// 12.6.7.2). The others are about the path: an address, a rate, a service level.
const (
	rejectNoQP        = 1 // the peer's device, or its kernel, has no room
	rejectNoResources = 3
	rejectTimeout     = 4 // the peer's connection manager has waited too long
	rejectNoListener  = 8
	// rejectStale: the peer's connection manager still has a connection with a queue pair of the same
	// number at this host, as after a restart of this host or its device, and ends it now. The next
	// attempt uses another number.
	rejectStale    = 10
	rejectConsumer = 28 // by the program that listens; on iWARP its errors are negative
)

var errStale = unavailable(session.ReasonUnreachable, errors.New("verbs: the peer still had a connection of an earlier queue pair"))

// rejectError returns the error for a reject that is not this provider's own: by the peer's kernel, or
// by a program that does not know this protocol.
func rejectError(ev ibv.Event, err error) error {
	switch ev.Status {
	case rejectNoListener, -int(syscall.ECONNREFUSED):
		return unavailable(session.ReasonNoListener, errWithoutErrno{err})
	case rejectStale:
		return errStale
	case rejectNoQP, rejectNoResources:
		return unavailable(session.ReasonResources, err)
	case rejectTimeout, -int(syscall.ETIMEDOUT):
		return unavailable(session.ReasonTimeout, err)
	}
	if ev.Status == rejectConsumer || ev.Status < 0 {
		return unavailable(session.ReasonProtocol, fmt.Errorf("%w: a foreign program listens there", err))
	}
	return unavailable(session.ReasonUnreachable, err)
}

func unavailable(r session.Reason, err error) error { return &session.Unavailable{Reason: r, Err: err} }

// eventError returns the error for an event that ends an attempt to connect.
func eventError(ev ibv.Event) error {
	err := fmt.Errorf("verbs: %w", ev.Err())
	switch ev.Type {
	case ibv.Rejected:
		if p, ours := parsePrivateData(ev.Param.PrivateData); ours {
			return p.err()
		}
		return rejectError(ev, err)
	case ibv.Unreachable:
		return unavailable(session.ReasonTimeout, err)
	}
	return unavailable(session.ReasonUnreachable, err)
}

// callError returns the error of a call, for the dialer.
func callError(err error) error {
	var errno syscall.Errno
	switch {
	case err == nil:
		return nil
	case errors.As(err, new(*session.Unavailable)): // it has a reason already
		return err
	case errors.Is(err, ibv.ErrNotAvailable):
		return unavailable(session.ReasonNoProvider, err)
	case !errors.As(err, &errno):
		return err
	}
	switch errno {
	case syscall.ECONNREFUSED: // siw, in the call
		return unavailable(session.ReasonNoListener, errWithoutErrno{err})
	case syscall.ENODEV, syscall.ENXIO, syscall.EIO, // the device has gone
		syscall.ECONNRESET, syscall.EPIPE, // the peer has gone
		syscall.ENETUNREACH, syscall.EHOSTUNREACH, syscall.ENETDOWN, syscall.EHOSTDOWN, syscall.EADDRNOTAVAIL:
		return unavailable(session.ReasonUnreachable, errWithoutErrno{err})
	case syscall.EOPNOTSUPP, syscall.ENOSYS, syscall.EPROTONOSUPPORT: // of creating a queue pair: EFA has no reliable connections
		return unavailable(session.ReasonNotServed, errWithoutErrno{err})
	}
	return reason.Of(err)
}

// errWithoutErrno keeps the text of an error, but hides its errno, which would tell something wrong
// about TCP.
type errWithoutErrno struct{ err error }

func (e errWithoutErrno) Error() string { return e.err.Error() }
