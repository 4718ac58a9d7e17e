// Package reason tells why a connection does not move, by the error of what has tried.
package reason

import (
	"context"
	"errors"
	"net"
	"os"
	"slices"
	"syscall"

	"github.com/sanconn/san/session"
)

// Of is why a connection does not move, by the error of an attempt.
func Of(err error) *session.Unavailable {
	why := new(session.Unavailable)
	if errors.As(err, &why) {
		return why
	}
	return &session.Unavailable{Reason: impliedBy(err), Err: err}
}

// Is reports whether an error is an *Unavailable for one of these reasons.
func Is(err error, reasons ...session.Reason) bool {
	var why *session.Unavailable
	return errors.As(err, &why) && slices.Contains(reasons, why.Reason)
}

// impliedBy is the reason that an error implies.
func impliedBy(err error) session.Reason {
	var errno syscall.Errno
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return session.ReasonTimeout
	case errors.Is(err, context.Canceled):
		return session.ReasonCanceled
	case errors.Is(err, net.ErrClosed), errors.Is(err, syscall.EPIPE): // by an end of it, meanwhile
		return session.ReasonStays
	case errors.As(err, &errno):
		switch errno {
		case syscall.ETIMEDOUT:
			return session.ReasonTimeout
		case syscall.ENETUNREACH, syscall.EADDRNOTAVAIL, syscall.ECONNREFUSED, syscall.EHOSTUNREACH,
			syscall.EIO, syscall.ESTALE: // of a file system
			return session.ReasonUnreachable
		case syscall.EPERM, syscall.EACCES, syscall.EROFS:
			return session.ReasonPermission
		case syscall.ENOSYS,
			syscall.EAFNOSUPPORT, syscall.EPROTONOSUPPORT: // of unix sockets and netlink: a kernel without, or systemd's RestrictAddressFamilies
			return session.ReasonNoProvider
		case syscall.EMFILE, syscall.ENFILE, syscall.ETOOMANYREFS, syscall.ENOMEM, syscall.ENOBUFS,
			syscall.ENOSPC, syscall.EDQUOT, syscall.EFBIG, // of a file, and RLIMIT_FSIZE
			syscall.EAGAIN, syscall.EADDRINUSE: // a listener's queue is full, a port or a name taken
			return session.ReasonResources
		}
	}
	return session.ReasonProtocol
}
