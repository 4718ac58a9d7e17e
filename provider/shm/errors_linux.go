package shm

import (
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/reason"
	"github.com/sanconn/san/session"
)

var (
	errPeerGone    = fmt.Errorf("shm: the peer's process ended: %w", io.EOF)
	errPeerUnread  = fmt.Errorf("shm: the peer's process ended and had not read all: %w", syscall.ECONNRESET)
	errPeerClosed  = fmt.Errorf("shm: the peer closed the connection: %w", syscall.EPIPE)
	errPeerAborted = fmt.Errorf("shm: the peer aborted the connection: %w", syscall.ECONNRESET)
	errClosed      = errors.New("shm: endpoint is closed")
)

// errNoMemory: what processes of the peer's user have not read, or keep, takes so much memory that
// another connection's ring could not grow beyond ring.Start.
var errNoMemory = fmt.Errorf("shm: the memory for what the peer's user has not read, or keeps, is used up: %w", unix.ENOBUFS)

// errNoDescriptors: links with processes of the peer's user hold as many descriptors as one user may.
var errNoDescriptors = fmt.Errorf("shm: links with the peer's user hold as many descriptors as they may: %w", unix.EMFILE)

// ErrLinkGone is the error of a connection whose link has ended before the peer took the connection. A
// new link may serve.
var ErrLinkGone = errors.New("shm: the link has ended")

// unavailable returns err as an *Unavailable with its reason.
func unavailable(err error) error {
	switch {
	case errors.As(err, new(*session.Unavailable)): // it has one
	case is(err, unix.ENOENT): // without /proc
		return &session.Unavailable{Reason: session.ReasonNoProvider, Err: err}
	case is(err, ErrLinkGone, unix.ECONNREFUSED,
		io.EOF, unix.ECONNRESET, unix.EPIPE): // the listener was closed meanwhile
		return &session.Unavailable{Reason: session.ReasonNoListener, Err: err}
	}
	return reason.Of(err)
}

// is reports whether err is one of these errors.
func is(err error, these ...error) bool {
	return slices.ContainsFunc(these, func(e error) bool { return errors.Is(err, e) })
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
		return &session.Unavailable{Reason: session.ReasonResources, Err: errors.New("shm: the listener's process has no room, or no /proc to make memory with")}
	case codeUser:
		return &session.Unavailable{Reason: session.ReasonOwner, Err: errors.New("shm: the listener's process does not know the user of this one")}
	}
	return &session.Unavailable{Reason: session.ReasonProtocol, Err: fmt.Errorf("shm: the listener answered %d", code)}
}

// linkError wraps errors that mean that the other end closed the link with ErrLinkGone.
func linkError(err error) error {
	if isGone(err) {
		return linkGone(err)
	}
	return unavailable(err)
}

func linkGone(why error) error { return unavailable(fmt.Errorf("%w: %v", ErrLinkGone, why)) }

// isGone reports whether an error means that the other end has gone.
func isGone(err error) bool { return is(err, io.EOF, unix.EPIPE, unix.ECONNRESET, net.ErrClosed) }
