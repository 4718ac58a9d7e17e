package shm

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// controlSocket carries the messages of a link, by which segments and connections are set
// up. Several goroutines may post, one receives.
type controlSocket struct {
	conn *net.UnixConn
	raw  syscall.RawConn
}

func newControlSocket(conn *net.UnixConn) (controlSocket, error) {
	raw, err := conn.SyscallConn()
	return controlSocket{conn, raw}, err
}

// setDeadline bounds exchange, send and receive; the zero time: nothing does.
func (c *controlSocket) setDeadline(t time.Time) { c.conn.SetDeadline(t) }

// send sends a message and descriptors, bounded by the deadline.
func (c *controlSocket) send(m *message, fds ...int) error { return send(c.conn, m, fds...) }

// receive receives the next message, bounded by the deadline.
func (c *controlSocket) receive(m *message) (fds []int, err error) { return receive(c.conn, m) }

// Pauses before a message is sent again to a peer whose queue is full, with some hundred
// messages unread: each is twice the one before, so that a peer that never reads costs
// nothing, and one that reads again waits no longer than it has let wait.
const (
	firstPause = time.Millisecond
	mostPause  = time.Second
)

// post sends a message without blocking in the socket: if the queue is full or memory is
// short, it pauses and tries again until ctx ends or gone is closed.
func (c *controlSocket) post(ctx context.Context, gone <-chan struct{}, m *message, fds ...int) error {
	b, rights := m.encode(), rightsOf(fds)
	for pause := firstPause; ; pause = min(2*pause, mostPause) {
		var err error
		if e := c.raw.Control(func(fd uintptr) {
			err = unix.Sendmsg(int(fd), b, rights, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		}); e != nil {
			return e
		}
		switch err {
		case unix.EAGAIN, unix.EINTR, unix.ENOBUFS, unix.ENOMEM:
		default:
			return err
		}
		select {
		case <-time.After(pause):
		case <-gone:
			return errPeerGone
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// hangUp ends the socket at both ends; it still has to be closed.
func (c *controlSocket) hangUp() { hangUp(c.conn) }

// close may take as long as the peer likes.
func (c *controlSocket) close() { c.conn.Close() }

// send sends a message and descriptors, bounded by the socket's deadline.
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

// mostFDs is how many descriptors a message has at most. There is room for as many as a
// peer can send (SCM_MAX_FD): what the kernel drops it closes here, which may block.
const (
	mostFDs = 2
	roomFDs = 253
)

// errCut: descriptors were lost, most likely because this process is at its limit, or there
// are more than any message has.
var errCut = fmt.Errorf("shm: descriptors were lost on the way: %w", unix.EMFILE)

// receive receives the next message and its descriptors, which the caller has to close
// even if there is an error.
func receive(c *net.UnixConn, m *message) (fds []int, err error) {
	var b [messageSize + 1]byte
	var oob [1040]byte // a little more than roomFDs need
	n, oobn, flags, _, err := c.ReadMsgUnix(b[:], oob[:unix.CmsgSpace(4*roomFDs)])
	// An empty message is io.EOF, and its descriptors are there all the same.
	if oobn > 0 {
		msgs, e := unix.ParseSocketControlMessage(oob[:oobn])
		err = cmp.Or(err, e)
		for i := range msgs {
			if got, e := unix.ParseUnixRights(&msgs[i]); e == nil {
				fds = append(fds, got...)
			}
		}
	}
	if err != nil {
		return fds, err
	}
	if err := m.decode(b[:n]); err != nil {
		return fds, err
	}
	if flags&unix.MSG_CTRUNC != 0 || len(fds) > mostFDs {
		return fds, errCut
	}
	return fds, nil
}

// closeAll closes descriptors of this process.
func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}
