package shm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/session"
)

var (
	errPeerGone    = fmt.Errorf("shm: the peer's process ended: %w", io.EOF)
	errPeerUnread  = fmt.Errorf("shm: the peer's process ended and had not read all: %w", syscall.ECONNRESET)
	errPeerClosed  = fmt.Errorf("shm: the peer closed the connection: %w", syscall.EPIPE)
	errPeerAborted = fmt.Errorf("shm: the peer aborted the connection: %w", syscall.ECONNRESET)
	errClosed      = errors.New("shm: endpoint is closed")
)

// ErrLinkGone is the error of a connection whose link has ended before the other end has taken
// it. Another one may do.
var ErrLinkGone = errors.New("shm: the link has ended")

// unavailable gives an error its reason.
func unavailable(err error) error {
	var known *session.Unavailable
	if errors.As(err, &known) {
		return err
	}
	reason := session.ReasonProtocol
	for _, r := range []struct {
		err    error
		reason session.Reason
	}{
		{errSegment, session.ReasonProtocol},
		{context.DeadlineExceeded, session.ReasonTimeout},
		{context.Canceled, session.ReasonTimeout},
		{os.ErrDeadlineExceeded, session.ReasonTimeout},
		{unix.EAGAIN, session.ReasonResources}, // the listener's queue is full
		{unix.ECONNREFUSED, session.ReasonNoListener},
		{unix.EMFILE, session.ReasonResources},
		{unix.ENFILE, session.ReasonResources},
		{unix.ENOMEM, session.ReasonResources},
		{unix.ENOBUFS, session.ReasonResources},
		{unix.ETOOMANYREFS, session.ReasonResources},
		{unix.ENOSYS, session.ReasonNoProvider}, // or a sandbox that says so
		{unix.EACCES, session.ReasonPermission},
		{unix.EPERM, session.ReasonPermission},
		{unix.EROFS, session.ReasonPermission},
		{ErrLinkGone, session.ReasonNoListener},
		{io.EOF, session.ReasonNoListener}, // the listener went away meanwhile
		{unix.ECONNRESET, session.ReasonNoListener},
		{unix.EPIPE, session.ReasonNoListener},
	} {
		if errors.Is(err, r.err) {
			reason = r.reason
			break
		}
	}
	return &session.Unavailable{Reason: reason, Err: err}
}

// codeError returns the error for a code from the peer; nil for codeOK.
func codeError(code uint8) error {
	switch code {
	case codeOK:
		return nil
	case codeVersion:
		return &session.Unavailable{Reason: session.ReasonVersion, Err: fmt.Errorf("shm: the listener's process does not speak version %d", version)}
	case codeClosed:
		return &session.Unavailable{Reason: session.ReasonNoListener, Err: errors.New("shm: the listener is closed")}
	case codeResources:
		return &session.Unavailable{Reason: session.ReasonResources, Err: errors.New("shm: the listener's process has no room")}
	case codeUser:
		return &session.Unavailable{Reason: session.ReasonOwner, Err: errors.New("shm: the listener's process does not know the user of this one")}
	}
	return &session.Unavailable{Reason: session.ReasonProtocol, Err: fmt.Errorf("shm: the listener answered %d", code)}
}

// linkError marks errors that mean that the other end closed the link.
func linkError(err error) error {
	if isGone(err) {
		return linkGone(err)
	}
	return unavailable(err)
}

func linkGone(why error) error { return unavailable(fmt.Errorf("%w: %v", ErrLinkGone, why)) }

// isGone reports whether an error means that there is nobody at the other end.
func isGone(err error) bool {
	for _, gone := range []error{errPeerGone, io.EOF, unix.EPIPE, unix.ECONNRESET, net.ErrClosed} {
		if errors.Is(err, gone) {
			return true
		}
	}
	return false
}
