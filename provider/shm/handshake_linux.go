package shm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/session"
)

// How a link begins: the dialing process makes the first segment, both map it, and each
// gets the end of a doorbell at which it rings. A doorbell's bits are in that segment.
//
//	dialer                                acceptor
//	identify: the listener's user?        (the listener counts links by user)
//	share: make the segment
//	msgLink: segment, doorbell       →    check, share: map the segment
//	                                 ←    msgLinkReply: code, doorbell
//	start                                 start

// handshakeTimeout bounds the handshake at the accepting end: the wait for the request and
// sending the reply.
const handshakeTimeout = time.Second

// dialLink makes the dialing end of a link over a socket to the accepting process, which
// must belong to the user owner. It closes the socket if it fails. The caller is a user of
// the link.
func dialLink(ctx context.Context, conn *net.UnixConn, owner uint32, cfg Config) (*link, error) {
	l, err := newLink(0, conn, cfg)
	if err != nil {
		return nil, err
	}
	if err = l.identify(owner); err == nil {
		err = l.requestLink(ctx)
	}
	if err != nil {
		l.discard()
		return nil, unavailable(err)
	}
	l.start()
	return l, nil
}

// acceptLink makes the accepting end of a link over an accepted socket. It closes the socket
// if it fails.
func acceptLink(conn *net.UnixConn, cfg Config, accept acceptFunc) (*link, error) {
	l, err := newLink(1, conn, cfg)
	if err != nil {
		return nil, err
	}
	l.accept = accept
	if err = l.replyLink(); err != nil {
		l.discard()
		return nil, err
	}
	l.start()
	l.release()
	return l, nil
}

// identify checks that the listener's user has answered: another user's process may have
// taken the name. A user whom this user namespace does not map may be anybody.
func (l *link) identify(owner uint32) error {
	if l.peer.uid != owner || !oneUser(l.peer.uid) {
		return &session.Unavailable{Reason: session.ReasonOwner,
			Err: fmt.Errorf("shm: user %d answers for a listener of user %d", l.peer.uid, owner)}
	}
	return nil
}

// requestLink is the dialing end's part of the handshake.
func (l *link) requestLink(ctx context.Context) error {
	deadline, _ := ctx.Deadline()
	l.control.setDeadline(deadline)
	defer l.control.setDeadline(time.Time{})
	m, fd, err := newSegment(firstSlots)
	if err != nil {
		return &session.Unavailable{Reason: session.ReasonResources, Err: err}
	}
	l.share(m)
	err = l.control.send(&message{kind: msgLink, version: version, number: firstSlots}, fd, l.door.pass)
	unix.Close(fd)
	l.door.passed()
	if err != nil {
		return err
	}
	var reply message
	fds, err := l.control.receive(&reply)
	if err == nil {
		err = checkLinkReply(&reply, fds)
	}
	return l.takeDoorbell(fds, 0, err)
}

func checkLinkReply(m *message, fds []int) error {
	switch {
	case m.kind != msgLinkReply:
		return errMessage
	case m.code != codeOK:
		return codeError(m.code)
	case m.version != version:
		return codeError(codeVersion)
	case len(fds) != 1:
		return errMessage
	}
	return nil
}

// replyLink is the accepting end's part of the handshake.
func (l *link) replyLink() error {
	l.control.setDeadline(time.Now().Add(handshakeTimeout))
	defer l.control.setDeadline(time.Time{})
	var request message
	fds, err := l.control.receive(&request)
	code := uint8(codeOK)
	if err == nil {
		code, err = l.checkLinkRequest(&request, fds)
	} else if errors.Is(err, errCut) {
		code = codeResources
	}
	if err = l.takeDoorbell(fds, 1, err); err != nil {
		if code != codeOK {
			_ = l.control.send(&message{kind: msgLinkReply, version: version, code: code})
		}
		return err
	}
	err = l.control.send(&message{kind: msgLinkReply, version: version}, l.door.pass)
	l.door.passed()
	return err
}

// checkLinkRequest checks a request and maps its segment. With an error it returns the code
// that the dialer gets; codeOK: none, as it breaks the protocol.
func (l *link) checkLinkRequest(m *message, fds []int) (code uint8, err error) {
	switch {
	case m.kind != msgLink:
		return codeOK, errMessage
	case m.version != version:
		return codeVersion, fmt.Errorf("shm: version %d", m.version)
	case len(fds) != 2:
		return codeOK, errMessage
	}
	mem, err := l.openSegment(fds[0], m.number)
	if errors.Is(err, errSegment) {
		return codeOK, err
	}
	if err != nil {
		return codeResources, err
	}
	l.share(mem)
	return codeOK, nil
}

// share puts the slots and the doorbell into the first segment.
func (l *link) share(m mapping) {
	l.slots.add(m, l.side == 0)
	l.door.share(m, l.side)
}

// takeDoorbell takes over the peer's doorbell, the descriptor at an index, unless there is
// an error already, and closes the others.
func (l *link) takeDoorbell(fds []int, at int, err error) error {
	if err == nil {
		err = l.door.setPeer(fds[at])
	}
	for i, fd := range fds {
		if err != nil || i != at {
			l.theirs.closeForeign(fd)
		}
	}
	return err
}

// refuseLink tells a dialing process that this one has no room for it: just hanging up would
// mean that nobody listens.
func refuseLink(c *net.UnixConn, theirs account) {
	c.SetDeadline(time.Now().Add(refuseTimeout))
	var request message
	fds, _ := receive(c, &request) // closing with the request unread would send a reset
	theirs.closeForeign(fds...)
	_ = send(c, &message{kind: msgLinkReply, version: version, code: codeResources})
}
