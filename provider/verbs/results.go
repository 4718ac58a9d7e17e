package verbs

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/session"
)

// What the results of connecting mean to the dialer.

// ibNoListener is the reject reason "invalid service ID" of InfiniBand's CM
// (include/rdma/ib_cm.h, IB_CM_REJ_INVALID_SERVICE_ID).
const ibNoListener = 8

// ibStale is "stale connection" there: the peer's connection manager still has one with a
// queue pair of the same number here, as after a restart of this host or its device, and
// ends it now. The next attempt uses another number.
const ibStale = 10

var errStale = unavailable(session.ReasonUnreachable, errors.New("verbs: the peer still had a connection of an earlier queue pair"))

func unavailable(r session.Reason, err error) error { return &session.Unavailable{Reason: r, Err: err} }

// eventError is what an event that ends an attempt to connect means to the
// dialer: ECONNREFUSED where TCP would be refused as well (rule C4), since
// the listener that refuses owns the TCP port too; otherwise why there is no SAN.
func eventError(ev ibv.Event) error {
	err := fmt.Errorf("verbs: %v, status %d", ev.Type, ev.Status)
	if errno := ev.Errno(); errno != nil {
		err = fmt.Errorf("verbs: %v: %w", ev.Type, errno)
	}
	switch ev.Type {
	case ibv.Rejected:
		p, ours := parsePrivateData(ev.Param.PrivateData)
		switch {
		case !ours && (ev.Status == ibNoListener || errors.Is(ev.Errno(), syscall.ECONNREFUSED)):
			return unavailable(session.ReasonNoListener, err)
		case !ours && ev.Status == ibStale:
			return errStale
		case !ours:
			return unavailable(session.ReasonProtocol, fmt.Errorf("%w: a foreign program listens there", err))
		}
		return p.err()
	case ibv.AddrError, ibv.RouteError:
		return unavailable(session.ReasonUnreachable, err)
	case ibv.Unreachable:
		return unavailable(session.ReasonTimeout, err)
	}
	return unavailable(session.ReasonUnreachable, err)
}

// callError is what the error of a call means to the dialer.
func callError(err error) error {
	var errno syscall.Errno
	switch {
	case err == nil:
		return nil
	case errors.As(err, new(*session.Unavailable)): // it has its meaning already
		return err
	case errors.Is(err, ibv.ErrNotAvailable):
		return unavailable(session.ReasonNoProvider, err)
	case !errors.As(err, &errno):
		return err
	}
	switch errno {
	case syscall.ECONNREFUSED: // siw, in the call
		return unavailable(session.ReasonNoListener, errWithoutErrno{err})
	case syscall.ENODEV, syscall.ENETUNREACH, syscall.EHOSTUNREACH, syscall.EADDRNOTAVAIL:
		return unavailable(session.ReasonUnreachable, errWithoutErrno{err})
	case syscall.ETIMEDOUT:
		return unavailable(session.ReasonTimeout, err)
	case syscall.EOPNOTSUPP: // of creating a queue pair: EFA has none that are reliably connected
		return unavailable(session.ReasonNotServed, errWithoutErrno{err})
	case syscall.EACCES, syscall.EPERM:
		return unavailable(session.ReasonPermission, err)
	case syscall.ENOMEM, syscall.ENOBUFS, syscall.EMFILE, syscall.ENFILE, syscall.EAGAIN, syscall.EADDRINUSE:
		return unavailable(session.ReasonResources, err)
	}
	return unavailable(session.ReasonProtocol, err)
}

// errWithoutErrno keeps the text of an error, but hides its errno, which would wrongly
// promise something about TCP.
type errWithoutErrno struct{ err error }

func (e errWithoutErrno) Error() string { return e.err.Error() }
