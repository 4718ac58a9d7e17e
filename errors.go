package san

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"syscall"
)

// verdict returns what a failed attempt over a SAN means: a reason to try something else,
// or the final error for this address (C4).
func verdict(ctx context.Context, err error) (*Unavailable, error) {
	why := new(Unavailable)
	switch {
	case ctx.Err() != nil:
		return nil, contextError{ctx.Err()}
	case errors.As(err, new(hookError)):
		return nil, err
	case errors.As(err, &why):
		return why, nil
	case reasonOf(err) != ReasonNone:
		return &Unavailable{Reason: reasonOf(err), Err: err}, nil
	}
	for _, errno := range []syscall.Errno{syscall.ECONNREFUSED, syscall.EHOSTUNREACH} {
		if errors.Is(err, errno) {
			return nil, os.NewSyscallError("connect", errno)
		}
	}
	return &Unavailable{Reason: ReasonProtocol, Err: err}, nil
}

// reasonOf returns the reason that an error implies, or ReasonNone.
func reasonOf(err error) Reason {
	why := new(Unavailable)
	var errno syscall.Errno
	switch {
	case errors.As(err, &why):
		return why.Reason
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return ReasonTimeout
	case errors.As(err, &errno):
		switch errno {
		case syscall.ETIMEDOUT:
			return ReasonTimeout
		case syscall.ENETUNREACH, syscall.EADDRNOTAVAIL:
			return ReasonUnreachable
		case syscall.EPERM, syscall.EACCES:
			return ReasonPermission
		case syscall.ENOSYS:
			return ReasonNoProvider
		case syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM, syscall.ENOBUFS, syscall.EAGAIN, syscall.EADDRINUSE:
			return ReasonResources
		}
	}
	return ReasonNone
}

// answered reports whether an attempt failed because of an answer from the destination.
func answered(err error) bool {
	switch reasonOf(err) {
	case ReasonNoListener, ReasonOwner, ReasonVersion, ReasonProtocol:
		return true
	}
	return errors.Is(err, syscall.ECONNREFUSED) && !errors.As(err, new(hookError))
}

// requireError is an Unavailable under the policy Require, which forbids TCP.
type requireError struct{ why *Unavailable }

func (e requireError) Error() string { return "no SAN connection: " + e.why.Error() }
func (e requireError) Unwrap() error { return e.why }
func (e requireError) Timeout() bool { return e.why.Reason == ReasonTimeout }

// hookError is what a Control hook returned: final, as with net.
type hookError struct{ error }

func (e hookError) Unwrap() error { return e.error }

// contextError is a dial that timed out or was canceled, with net's messages.
type contextError struct{ cause error }

func (e contextError) Error() string {
	if e.Timeout() {
		return "i/o timeout"
	}
	return "operation was canceled"
}

func (e contextError) Timeout() bool   { return errors.Is(e.cause, context.DeadlineExceeded) }
func (e contextError) Temporary() bool { return e.Timeout() }
func (e contextError) Unwrap() error   { return e.cause }
func (e contextError) Is(target error) bool {
	return target == os.ErrDeadlineExceeded && e.Timeout()
}

// dialError is err as net.Dial would return it. The zero dst: the address is not known.
func dialError(network string, source net.Addr, dst netip.AddrPort, err error) error {
	e := &net.OpError{Op: "dial", Net: network, Source: source, Err: err}
	if dst.IsValid() {
		e.Addr = net.TCPAddrFromAddrPort(dst)
	}
	return e
}

// listenError is err as net.Listen would return it.
func listenError(network string, addr net.Addr, err error) error {
	return &net.OpError{Op: "listen", Net: network, Addr: addr, Err: err}
}
