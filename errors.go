package san

import (
	"context"
	"errors"
	"net"
	"os"
	"slices"
	"syscall"
)

// unavailableOf is why a connection does not move, by the error of an attempt.
func unavailableOf(err error) *Unavailable {
	why := new(Unavailable)
	if errors.As(err, &why) {
		return why
	}
	return &Unavailable{Reason: impliedBy(err), Err: err}
}

// impliedBy is the reason that an error implies.
func impliedBy(err error) Reason {
	var errno syscall.Errno
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return ReasonTimeout
	case errors.Is(err, context.Canceled):
		return ReasonCanceled
	case errors.As(err, &errno):
		switch errno {
		case syscall.ETIMEDOUT:
			return ReasonTimeout
		case syscall.ENETUNREACH, syscall.EADDRNOTAVAIL, syscall.ECONNREFUSED, syscall.EHOSTUNREACH:
			return ReasonUnreachable
		case syscall.EPERM, syscall.EACCES:
			return ReasonPermission
		case syscall.ENOSYS:
			return ReasonNoProvider
		case syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM, syscall.ENOBUFS, syscall.EAGAIN, syscall.EADDRINUSE:
			return ReasonResources
		}
	}
	return ReasonProtocol
}

func isReason(err error, reasons ...Reason) bool {
	var why *Unavailable
	return errors.As(err, &why) && slices.Contains(reasons, why.Reason)
}

// requireError is an Unavailable under the policy Require, which forbids TCP.
type requireError struct{ why *Unavailable }

func (e requireError) Error() string { return "no SAN connection: " + e.why.Error() }
func (e requireError) Unwrap() error { return e.why }
func (e requireError) Timeout() bool {
	return e.why.Reason == ReasonTimeout || errors.Is(e.why, context.DeadlineExceeded)
}

// dialError is err as net.Dial would return it. A nil dst: the address is not known.
func dialError(network string, source, dst net.Addr, err error) error {
	return &net.OpError{Op: "dial", Net: network, Source: source, Addr: dst, Err: err}
}

// serverError is err as net.Listen, or a listener's Accept, would return it.
func serverError(op, network string, addr net.Addr, err error) error {
	return &net.OpError{Op: op, Net: network, Addr: addr, Err: err}
}
