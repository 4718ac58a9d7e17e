package shm

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/session"
)

// controlSocket carries the messages of a link, which set up segments and connections. Several
// goroutines may post, one receives. Its Close may take as long as the peer likes.
type controlSocket struct {
	*net.UnixConn
	raw  syscall.RawConn
	gone <-chan struct{} // closed when the link is dead
}

// Pauses before a message is sent again to a peer whose queue is full, with some hundred unread
// messages. They double, so that a peer that never reads costs nothing, and one that reads again waits
// no longer than it has kept this end waiting.
const (
	firstPause = time.Millisecond
	mostPause  = time.Second
)

// post sends a message without blocking in the socket. If the queue is full, memory is short, or too
// many descriptors of this process's user are in flight, it pauses and tries again until ctx or the
// link ends.
func (c *controlSocket) post(ctx context.Context, m *message, fds ...int) error {
	b, rights := m.encode(), rightsOf(fds)
	return c.attempt(ctx, func(fd int) error {
		return unix.Sendmsg(fd, b, rights, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	})
}

// attempt calls try, with pauses, as long as try finds the queue full or memory short.
func (c *controlSocket) attempt(ctx context.Context, try func(fd int) error) error {
	for pause := firstPause; ; pause = min(2*pause, mostPause) {
		var err error
		if e := c.raw.Control(func(fd uintptr) { err = try(int(fd)) }); e != nil {
			return e
		}
		switch err {
		case unix.EAGAIN, unix.EINTR, unix.ENOBUFS, unix.ENOMEM, unix.ETOOMANYREFS:
		default:
			return err
		}
		select {
		case <-time.After(pause):
		case <-c.gone:
			return errPeerGone
		case <-ctx.Done():
			if is(err, unix.EAGAIN, unix.EINTR) {
				return ctx.Err()
			}
			return &session.Unavailable{Reason: session.ReasonResources, Err: fmt.Errorf("shm: %w: %w", ctx.Err(), err)} // a shortage at this end, not at the peer
		}
	}
}

// awaitRead waits until the peer has read all that was sent, or the link ends.
func (c *controlSocket) awaitRead() error {
	return c.attempt(context.Background(), func(fd int) error {
		if n, err := unix.IoctlGetInt(fd, unix.SIOCOUTQ); err == nil && n > 0 {
			return unix.EAGAIN
		}
		return nil
	})
}

// send sends a message with descriptors, until the socket's deadline.
func send(c *net.UnixConn, m *message, fds ...int) error {
	_, _, err := c.WriteMsgUnix(m.encode(), rightsOf(fds), nil)
	return err
}

func rightsOf(fds []int) []byte {
	if len(fds) == 0 {
		return nil
	}
	return unix.UnixRights(fds...)
}

// mostFDs is the most descriptors of a message.
const mostFDs = 2

// errCut: descriptors of a message were lost, because this process has as many as it may have.
var errCut = fmt.Errorf("shm: descriptors were lost on the way: %w", unix.EMFILE)

// errTooMany: a message has more descriptors than mostFDs.
var errTooMany = fmt.Errorf("%w: too many descriptors", errMessage)

// passCredentials makes the kernel attach the sender's credentials to each message that a unix socket
// receives. It must be set before a socket connects, or before a listener listens, whose accepted
// sockets inherit it: then every message has credentials.
func passCredentials(fd int) error {
	return os.NewSyscallError("setsockopt", unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PASSCRED, 1))
}

// receive receives the next message and its descriptors, which the caller has to close even after an
// error.
//
// The kernel closes descriptors for which there is no room, within the receiving call. Closing the last
// descriptor of a file may take as long as the peer likes. So receive first peeks at the message and
// copies its descriptors, and then takes the message from the queue without them: none that the kernel
// closes there is the last one. A message with too many descriptors stays in the queue.
func receive(c *net.UnixConn, m *message) (fds []int, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	var b [messageSize + 1]byte
	room := make([]byte, unix.CmsgSpace(unix.SizeofUcred)+unix.CmsgSpace(4*mostFDs))
	var n, oobn, flags int
	if e := raw.Read(func(fd uintptr) bool {
		n, oobn, flags, err = recvmsg(int(fd), b[:], room, unix.MSG_PEEK)
		return err != unix.EAGAIN
	}); e != nil || err != nil {
		return nil, cmp.Or(e, err)
	}
	if n == 0 && oobn == 0 {
		return nil, io.EOF // an empty message would still have credentials
	}
	m.user, fds, err = parseControl(room[:oobn])
	cut := flags&unix.MSG_CTRUNC != 0
	switch {
	case err != nil:
		return fds, err
	case cut && len(fds) == mostFDs:
		return fds, errTooMany
	}
	if e := raw.Control(func(fd uintptr) { _, _, _, err = recvmsg(int(fd), b[:], nil, 0) }); e != nil || err != nil {
		return fds, cmp.Or(e, err)
	}
	if err := m.decode(b[:n]); err != nil {
		return fds, err
	}
	if cut {
		return fds, errCut
	}
	return fds, nil
}

func recvmsg(fd int, b, room []byte, flags int) (n, oobn, got int, err error) {
	for {
		n, oobn, got, _, err = unix.Recvmsg(fd, b, room, flags|unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
		if err != unix.EINTR {
			return n, oobn, got, err
		}
	}
}

// parseControl returns the user that has sent a message, and the message's descriptors.
func parseControl(control []byte) (user uint32, fds []int, err error) {
	user = overflowUID
	msgs, err := unix.ParseSocketControlMessage(control)
	for i := range msgs {
		switch msgs[i].Header.Type {
		case unix.SCM_RIGHTS:
			got, e := unix.ParseUnixRights(&msgs[i])
			fds, err = append(fds, got...), cmp.Or(err, e)
		case unix.SCM_CREDENTIALS:
			cred, e := unix.ParseUnixCredentials(&msgs[i])
			if err = cmp.Or(err, e); e == nil {
				user = cred.Uid
			}
		}
	}
	return user, fds, err
}
