package verbs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"syscall"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/session"
)

// What the two ends tell each other in rdma_cm's private data, 12 bytes, little
// endian:
//
//	0  magic    u32
//	4  version  u16  of this provider: how messages lie in buffers
//	6  refusal  u16  in a reject: why; otherwise 0
//	8  flags    u32  0
type hello struct {
	version uint16
	refusal refusal
}

type refusal uint16

const (
	refusedBacklog   refusal = 1 // the backlog is full
	refusedVersion   refusal = 2
	refusedResources refusal = 3
	refusedSubnet    refusal = 4 // not from this address
	refusedClosed    refusal = 5 // the listener is being closed; another may have its port
	refusedAddress   refusal = 6 // no device of this end has the address that was dialed
	refusedDevice    refusal = 7 // a call of this end's device failed
)

// refusalFor is what the dialer is told of a listener's error.
func refusalFor(err error) refusal {
	var u *session.Unavailable
	if errors.As(callError(err), &u) {
		switch u.Reason {
		case session.ReasonUnreachable, session.ReasonNotServed:
			return refusedAddress
		case session.ReasonResources:
			return refusedResources
		}
	}
	return refusedDevice
}

const (
	helloMagic   = 'S' | 'A'<<8 | 'N'<<16 | 'v'<<24
	helloVersion = 1
	helloLen     = 12
)

func (h hello) bytes() []byte {
	b := make([]byte, helloLen)
	binary.LittleEndian.PutUint32(b, helloMagic)
	binary.LittleEndian.PutUint16(b[4:], h.version)
	binary.LittleEndian.PutUint16(b[6:], uint16(h.refusal))
	return b
}

// parseHello reads private data; false: it is a foreign program's.
func parseHello(b []byte) (h hello, ok bool) {
	if len(b) < helloLen || binary.LittleEndian.Uint32(b) != helloMagic {
		return h, false
	}
	return hello{binary.LittleEndian.Uint16(b[4:]), refusal(binary.LittleEndian.Uint16(b[6:]))}, true
}

// meaning is what a refusal tells the dialer.
func (h hello) meaning() error {
	switch {
	case h.version != helloVersion:
		return unavailable(session.ReasonVersion, fmt.Errorf("verbs: the peer speaks version %d, this end %d", h.version, helloVersion))
	case h.refusal == refusedBacklog:
		return fmt.Errorf("verbs: the peer's backlog is full: %w", syscall.ECONNREFUSED)
	case h.refusal == refusedResources:
		return unavailable(session.ReasonResources, errors.New("verbs: the peer has no resources left, of its RLIMIT_MEMLOCK most likely"))
	case h.refusal == refusedClosed:
		return unavailable(session.ReasonNoListener, errors.New("verbs: the peer is closing its listener"))
	case h.refusal == refusedAddress:
		return unavailable(session.ReasonUnreachable, errors.New("verbs: the peer has no RDMA device, or none of its GIDs, for this address"))
	case h.refusal == refusedDevice:
		return unavailable(session.ReasonUnreachable, errors.New("verbs: a call of the peer's RDMA device failed"))
	case h.refusal == refusedSubnet:
		return unavailable(session.ReasonPermission, errors.New("verbs: the peer does not serve this address"))
	}
	return unavailable(session.ReasonProtocol, fmt.Errorf("verbs: the peer refuses for a reason that is not known (%d)", h.refusal))
}

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
// the listener that says so owns the TCP port too; otherwise why there is no SAN.
func eventError(ev ibv.Event) error {
	err := fmt.Errorf("verbs: %v, status %d", ev.Type, ev.Status)
	if errno := ev.Errno(); errno != nil {
		err = fmt.Errorf("verbs: %v: %w", ev.Type, errno)
	}
	switch ev.Type {
	case ibv.Rejected:
		h, ours := parseHello(ev.Param.PrivateData)
		switch {
		case !ours && (ev.Status == ibNoListener || errors.Is(ev.Errno(), syscall.ECONNREFUSED)):
			return unavailable(session.ReasonNoListener, err)
		case !ours && ev.Status == ibStale:
			return errStale
		case !ours:
			return unavailable(session.ReasonProtocol, fmt.Errorf("%w: a foreign program listens there", err))
		}
		return h.meaning()
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
	case errors.As(err, new(*session.Unavailable)): // told already
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
