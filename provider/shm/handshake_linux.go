package shm

import (
	"context"
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// How a link begins. Each process makes its half of the first segment, which includes its bell, and
// gets a descriptor of the other's doorbell.
//
//	dialer                                acceptor
//	(linkKey.connect: the user?)          (the listener counts links by user)
//	make a half
//	msgLink: half, doorbell          →    identify, check, make a half, share
//	                                 ←    msgLinkReply: code, half, doorbell
//	identify, check, share
//	start                                 start

// handshakeTimeout bounds the handshake at the accepting end: receiving the request and sending the
// reply. It is a variable for tests.
var handshakeTimeout = time.Second

// dialLink makes the dialing end of a link over a socket to the accepting process, which must belong to
// user. If it fails, it closes the socket.
func dialLink(ctx context.Context, conn *net.UnixConn, user uint32, cfg Config) (*link, error) {
	l, err := newLink(0, conn, cfg)
	if err != nil {
		return nil, err
	}
	if err = l.requestLink(ctx, user); err != nil {
		l.teardown()
		return nil, unavailable(err)
	}
	return l, nil
}

// acceptLink makes the accepting end of a link over an accepted socket. If it fails, it closes the
// socket.
func acceptLink(conn *net.UnixConn, cfg Config, accept acceptFunc) (*link, error) {
	l, err := newLink(1, conn, cfg)
	if err != nil {
		return nil, err
	}
	l.accept = accept
	if err = l.replyLink(); err != nil {
		l.teardown()
		return nil, err
	}
	return l, nil
}

// identify notes the peer's user, as the kernel reports it with the message. The credentials at the
// time of connect or listen may be of another user, whose privileges the process has dropped since. For
// a name in a directory the user decides nothing.
func (l *link) identify(m *message) error {
	l.peer.uid = m.user
	if l.cfg.Dir == "" && !oneUser(m.user) {
		return errUserUnknown
	}
	return nil
}

// errUserUnknown: overflowUID stands for any user that this user namespace does not map.
var errUserUnknown = fmt.Errorf("shm: this user namespace does not know the user (%d)", overflowUID)

// requestLink is the dialing end's part of the handshake.
func (l *link) requestLink(ctx context.Context, user uint32) error {
	deadline, _ := ctx.Deadline()
	l.control.SetDeadline(deadline)
	defer l.control.SetDeadline(time.Time{})
	m, fd, err := newHalf(firstSlots, l.payer, !l.mayPunch)
	if err != nil {
		return unavailable(err)
	}
	err = send(l.control.UnixConn, &message{kind: msgLink, version: version, number: firstSlots}, fd, l.door.toPass)
	unix.Close(fd)
	l.door.passed()
	var fds []int
	if err == nil {
		fds, err = l.checkLinkReply(m, user)
	}
	if err != nil {
		m.unmapKept(l.slots.memory, 0)
	}
	return l.setDoorbell(fds, err)
}

// checkLinkReply checks the reply to a request, and installs the segment; own is this end's half. The
// caller passes the descriptors to setDoorbell.
func (l *link) checkLinkReply(own mapping, user uint32) (fds []int, err error) {
	var m message
	if fds, err = receive(l.control.UnixConn, &m); err != nil {
		return fds, err
	}
	switch {
	case m.kind != msgLinkReply:
		return fds, errMessage
	case m.code != codeOK:
		return fds, codeError(m.code)
	case m.version != version:
		return fds, codeError(codeVersion)
	case len(fds) != 2:
		return fds, errMessage
	}
	if err := l.identify(&m); err != nil || l.cfg.Dir == "" && l.peer.uid != user {
		return fds, errOwner(m.user, user)
	}
	return fds, l.join(own, fds)
}

// replyLink is the accepting end's part of the handshake.
func (l *link) replyLink() error {
	l.control.SetDeadline(time.Now().Add(handshakeTimeout))
	defer l.control.SetDeadline(time.Time{})
	var request message
	fds, err := receive(l.control.UnixConn, &request)
	code, half := uint8(codeResources), -1
	if err == nil {
		half, code, err = l.checkLinkRequest(&request, fds)
	}
	if err = l.setDoorbell(fds, err); err == nil {
		err = send(l.control.UnixConn, &message{kind: msgLinkReply, version: version}, half, l.door.toPass)
		l.door.passed()
	}
	if err != nil && !is(err, errMessage, errSegment, errDoorbell) { // a dialer that breaks the protocol gets no reply
		_ = send(l.control.UnixConn, &message{kind: msgLinkReply, version: version, code: code})
	}
	if half >= 0 {
		unix.Close(half)
	}
	return err
}

// checkLinkRequest checks a request, installs its segment, and returns this end's half. The code is the
// one to reply with if this or a later step fails.
func (l *link) checkLinkRequest(m *message, fds []int) (half int, code uint8, err error) {
	switch {
	case m.kind != msgLink:
		return -1, codeResources, errMessage
	case m.version != version:
		return -1, codeVersion, fmt.Errorf("shm: version %d", m.version)
	case len(fds) != 2:
		return -1, codeResources, errMessage
	}
	if err := l.identify(m); err != nil {
		return -1, codeUser, err
	}
	half, err = l.accommodate(fds[0], m.number)
	return half, codeResources, err
}

// setDoorbell takes the peer's doorbell, which is the second descriptor, unless err is set. It closes
// the other descriptors.
func (l *link) setDoorbell(fds []int, err error) error {
	if err == nil {
		err = l.door.setPeer(fds[1])
	}
	for i, fd := range fds {
		if err != nil || i != 1 {
			l.peerUser.closeUntrusted(fd)
		}
	}
	return err
}

// refuseLink replies to a dialing process that this one has no room for its link. Without a reply the
// dialer would conclude that there is no listener.
func refuseLink(c *net.UnixConn, peerUser account) {
	c.SetDeadline(time.Now().Add(refuseTimeout))
	var request message
	fds, _ := receive(c, &request) // a close with the request unread would send a reset
	peerUser.closeUntrusted(fds...)
	_ = send(c, &message{kind: msgLinkReply, version: version, code: codeResources})
}
