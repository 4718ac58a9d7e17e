package shm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/session"
)

// helloTimeout bounds the handshake at the accepting end: the wait for the hello and
// sending the welcome.
const helloTimeout = time.Second

// open makes the dialing end of a link over a socket to the accepting process, which must
// belong to the user owner. It closes the socket if it fails. The link does not end for
// lack of connections until the caller calls leave.
func open(ctx context.Context, conn *net.UnixConn, owner uint32, cfg Config) (*link, error) {
	l, err := newLink(0, conn, cfg)
	if err != nil {
		return nil, err
	}
	if err = l.hello(ctx, owner); err == nil {
		err = l.start()
	}
	if err != nil {
		l.discard()
		return nil, unavailable(err)
	}
	return l, nil
}

func (l *link) hello(ctx context.Context, owner uint32) error {
	// Another user's process may have taken the name. A user whom this user namespace
	// does not map may be anybody.
	if l.uid != owner || !oneUser(l.uid) {
		return &session.Unavailable{Reason: session.ReasonOwner,
			Err: fmt.Errorf("shm: user %d answers for a listener of user %d", l.uid, owner)}
	}
	m, fd, err := newSegment(firstSlots)
	if err != nil {
		return &session.Unavailable{Reason: session.ReasonResources, Err: err}
	}
	defer unix.Close(fd)
	l.addSegment(m)
	l.bellOut, l.bellIn = m.bell(0), m.bell(1)

	deadline, _ := ctx.Deadline()
	l.conn.SetDeadline(deadline)
	defer l.conn.SetDeadline(time.Time{})
	hello := &message{kind: msgHello, version: version, number: firstSlots}
	if err := send(l.conn, hello, l.bellFD(fd)...); err != nil {
		return err
	}
	var w message
	fds, err := receive(l.conn, &w)
	switch {
	case err != nil:
	case w.kind != msgWelcome:
		err = errMessage
	case w.code != codeOK:
		err = codeError(w.code)
	case w.version != version:
		err = codeError(codeVersion)
	}
	if err != nil {
		closeAll(fds)
		return err
	}
	l.takeBell(fds)
	return nil
}

// greet makes the accepting end of a link over an accepted socket. It closes the socket
// if it fails.
func greet(conn *net.UnixConn, cfg Config, accept acceptFunc) (*link, error) {
	l, err := newLink(1, conn, cfg)
	if err != nil {
		return nil, err
	}
	l.accept = accept
	if err = l.welcome(); err == nil {
		err = l.start()
	}
	if err != nil {
		l.discard()
		return nil, err
	}
	l.leave()
	return l, nil
}

func (l *link) welcome() error {
	l.conn.SetDeadline(time.Now().Add(helloTimeout))
	defer l.conn.SetDeadline(time.Time{})
	var h message
	fds, err := receive(l.conn, &h)
	code := uint8(codeOK)
	switch {
	case errors.Is(err, errCut):
		code = codeResources
	case err != nil:
	case h.kind != msgHello:
		err = errMessage
	case h.version != version:
		err, code = fmt.Errorf("shm: version %d", h.version), codeVersion
	case len(fds) == 0:
		err = errMessage
	default:
		if err = l.mapSegment(fds[0], h.number); err != nil && !errors.Is(err, errSegment) {
			code = codeResources
		}
	}
	if err != nil {
		closeAll(fds)
		if code != codeOK {
			_ = send(l.conn, &message{kind: msgWelcome, version: version, code: code})
		}
		return err
	}
	unix.Close(fds[0])
	l.bellIn, l.bellOut = l.maps[0].bell(0), l.maps[0].bell(1)
	l.takeBell(fds[1:])
	return send(l.conn, &message{kind: msgWelcome, version: version}, l.bellFD()...)
}

// decline tells a dialing process that this one has no room for it: just hanging up would
// mean that nobody listens.
func decline(c *net.UnixConn) {
	c.SetDeadline(time.Now().Add(declineTimeout))
	var h message
	fds, _ := receive(c, &h) // closing with the hello unread would send a reset
	closeAll(fds)
	_ = send(c, &message{kind: msgWelcome, version: version, code: codeResources})
}

// newLink makes a link from its socket and what the kernel says about the peer. It closes
// the socket if it fails.
func newLink(side int, conn *net.UnixConn, cfg Config) (*link, error) {
	l := &link{side: side, conn: conn, cfg: cfg, eventOut: -1, live: 1, segment: make(chan struct{}, 1), gone: make(chan struct{}), pending: map[uint32]chan uint8{}}
	l.slots.Store(new([]*slot))
	err := func() (err error) {
		if l.rawConn, err = conn.SyscallConn(); err != nil {
			return err
		}
		cred, err := peerCred(l.rawConn)
		if err != nil {
			return err
		}
		l.pid, l.uid = int(cred.Pid), cred.Uid
		l.pidfd = peerPidfd(l.rawConn, l.pid)
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
		if err != nil {
			return fmt.Errorf("shm: eventfd: %w", err)
		}
		l.eventIn = os.NewFile(uintptr(fd), "eventfd")
		// NewFile does not report that epoll had no room for it, and then nobody
		// would hear the bell. This fails in that case.
		if err := l.eventIn.SetReadDeadline(time.Time{}); err != nil {
			return fmt.Errorf("shm: eventfd: %w: %w", err, unix.ENOMEM)
		}
		return nil
	}()
	if err != nil {
		if side == 1 {
			decline(conn)
		}
		l.discard()
		return nil, &session.Unavailable{Reason: session.ReasonResources, Err: err}
	}
	links.add(l)
	return l, nil
}

// trusted reports whether the peer may share eventfds with us: it must run as the same
// user. Either side of an eventfd can make it block, so processes of
// other users ring by message.
func (l *link) trusted() bool {
	return l.uid == uint32(os.Geteuid()) && oneUser(l.uid) && !distrust
}

var distrust bool // for tests: treat every peer as another user's

// bellFD appends our eventfd to the descriptors for the peer, if the peer is trusted.
func (l *link) bellFD(fds ...int) []int {
	if l.trusted() {
		l.control(func(fd int) { fds = append(fds, fd) })
	}
	return fds
}

func (l *link) control(f func(fd int)) {
	if rc, err := l.eventIn.SyscallConn(); err == nil {
		rc.Control(func(fd uintptr) { f(int(fd)) })
	}
}

// takeBell stores the eventfd of the peer's hello or welcome, if it has one.
func (l *link) takeBell(fds []int) {
	if len(fds) > 0 && l.trusted() {
		l.eventOut, fds = fds[0], fds[1:]
	}
	closeAll(fds)
}

func (l *link) start() error {
	event, err := l.eventIn.SyscallConn()
	if err != nil {
		return err
	}
	l.work.Add(2)
	go l.serve()
	go l.answer(event)
	if l.pidfd != nil {
		if rc, err := l.pidfd.SyscallConn(); err == nil {
			l.work.Add(1)
			go l.watch(rc)
		}
	}
	return nil
}

// discard gives up a link that never started.
func (l *link) discard() {
	l.mu.Lock()
	l.torn = true
	l.mu.Unlock()
	l.release()
}
