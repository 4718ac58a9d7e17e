package shm

import (
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/provider/shm/internal/quota"
)

// A descriptor that a peer has passed to this process may be of any file until it is checked, and
// closing it may take as long as the peer likes: it may be a TCP socket that lingers, a socket with
// such sockets in its queue, or a file of a FUSE server that does not answer. So a few threads for each
// user of the host close them. (No other call on an unchecked descriptor waits: checkHalf begins with a
// call that only memfds have, and setPeer with calls that need neither a file system nor a socket's
// lock.)

const (
	// closerThreads is how many threads a user's descriptors can block in close: more than one, so that
	// one slow close does not stop the others.
	closerThreads = 4

	// mostWaiting is how many descriptors of a user may wait to be closed before no more are accepted
	// from that user.
	mostWaiting = 64
)

// closers closes the descriptors that users have passed.
type closers struct {
	mu    sync.Mutex // guards the fields below, and those of each userClosers
	users map[quota.Holder]*userClosers
}

// userClosers closes what one user has passed. It exists only while there is something to close.
type userClosers struct {
	threads int
	waiting []func()      // each closes one descriptor
	room    chan struct{} // closed when at most mostWaiting wait again; nil: no more than that wait
}

// closeUntrusted closes descriptors that the user has passed, in the background. Until a descriptor is
// closed it counts as the user's.
func (a account) closeUntrusted(fds ...int) {
	for _, fd := range fds {
		a.closeLater(func() { unix.Close(fd) })
	}
}

// closeLater calls one in the background, which closes a descriptor that the user has passed, or a
// socket to one of the user's processes.
func (a account) closeLater(one func()) {
	c := &a.closers
	a.descriptors.Charge(a.user, 1)
	c.mu.Lock()
	defer c.mu.Unlock()
	u := c.users[a.user]
	if u == nil {
		u = new(userClosers)
		c.users[a.user] = u
	}
	u.waiting = append(u.waiting, one)
	if len(u.waiting) > mostWaiting && u.room == nil {
		u.room = make(chan struct{})
	}
	if u.threads < closerThreads {
		u.threads++
		go a.closeWaiting(u)
	}
}

// closeWaiting closes descriptors until none waits.
func (a account) closeWaiting(u *userClosers) {
	c := &a.closers
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(u.waiting) > 0 {
		one := u.waiting[0]
		u.waiting = u.waiting[1:]
		if len(u.waiting) <= mostWaiting && u.room != nil {
			close(u.room)
			u.room = nil
		}
		c.mu.Unlock()
		one()
		a.descriptors.Return(a.user, 1)
		c.mu.Lock()
	}
	if u.threads--; u.threads == 0 {
		delete(c.users, a.user)
	}
}

// awaitClosing returns when no more than mostWaiting of the user's descriptors wait to be closed, or
// when gone is closed.
func (a account) awaitClosing(gone <-chan struct{}) {
	c := &a.closers
	c.mu.Lock()
	var room chan struct{}
	if u := c.users[a.user]; u != nil {
		room = u.room
	}
	c.mu.Unlock()
	if room == nil {
		return
	}
	select {
	case <-room:
	case <-gone:
	}
}

// hangUp shuts a connected socket down in both directions, and ends calls that wait for it here; a
// listening socket accepts no more connections. The socket still has to be closed. Unlike close, this
// cannot block: close also closes what the peer has put into the socket's queue.
func hangUp(c syscall.Conn) {
	if rc, err := c.SyscallConn(); err == nil {
		rc.Control(func(fd uintptr) { unix.Shutdown(int(fd), unix.SHUT_RDWR) })
	}
}
