// Package reason finds why a connection does not move, from the error of an attempt.
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

// Of returns why a connection does not move: the *Unavailable in err, or one with the reason that err
// implies.
func Of(err error) *session.Unavailable {
	why := new(session.Unavailable)
	if errors.As(err, &why) {
		return why
	}
	return &session.Unavailable{Reason: impliedBy(err), Err: err}
}

// Is reports whether err is an *Unavailable with one of these reasons.
func Is(err error, reasons ...session.Reason) bool {
	var why *session.Unavailable
	return errors.As(err, &why) && slices.Contains(reasons, why.Reason)
}

// impliedBy returns the reason that an error implies.
func impliedBy(err error) session.Reason {
	var errno syscall.Errno
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return session.ReasonTimeout
	case errors.Is(err, context.Canceled):
		return session.ReasonCanceled
	case errors.Is(err, net.ErrClosed), errors.Is(err, syscall.EPIPE): // an end was closed during the attempt
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
			syscall.EAFNOSUPPORT, syscall.EPROTONOSUPPORT, // of unix sockets and netlink: a kernel without, or systemd's RestrictAddressFamilies
			syscall.ENOPROTOOPT: // of a socket's options, in gVisor
			return session.ReasonNoProvider
		case syscall.EMFILE, syscall.ENFILE, syscall.ETOOMANYREFS, syscall.ENOMEM, syscall.ENOBUFS,
			syscall.ENOSPC, syscall.EDQUOT, syscall.EFBIG, // of a file, and RLIMIT_FSIZE
			syscall.EAGAIN, syscall.EADDRINUSE: // a listener's queue is full, a port or a name taken
			return session.ReasonResources
		}
	}
	return session.ReasonProtocol
}
