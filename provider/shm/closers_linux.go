package shm

import (
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/provider/shm/internal/quota"
)

// Descriptors that a peer has passed to this process may be anything until they are checked, and
// closing them may take as long as the peer likes: a TCP socket that lingers, a socket with such
// ones in its queue, whatever a FUSE server does not answer. So they are closed here, by few
// threads for each user of the host. (Nothing else that is called on one before it is checked
// waits: checkHalf asks first for what memfds alone have, setPeer for what no file system and
// no socket's lock is asked about.)

const (
	// closerThreads is how many threads a user's descriptors can hold in calls to close
	// them: more than one, so that one slow call does not stop the others.
	closerThreads = 4

	// mostWaiting is how many descriptors of a user may wait to be closed before no
	// more are taken from it.
	mostWaiting = 64
)

// closers close what the users have passed.
type closers struct {
	mu    sync.Mutex // guards what follows
	users map[quota.Holder]*userClosers
}

// userClosers close what one user has passed; there are none without work.
type userClosers struct {
	threads int
	waiting []func()      // to be closed
	room    chan struct{} // closed when few are waiting again; nil: few are
}

// closeUntrusted closes descriptors that the user has passed, in the background. They count
// as the user's until that is done.
func (a account) closeUntrusted(fds ...int) {
	for _, fd := range fds {
		a.closeLater(func() { unix.Close(fd) })
	}
}

// closeLater calls one function, which closes a descriptor of the user or a socket to one of
// its processes, in the background.
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

// closeWaiting closes until nothing is waiting.
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

// awaitClosing waits while too many of the user's descriptors wait to be closed, or until
// gone is closed.
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

// hangUp ends a socket to a peer at both ends, and those that wait for it here, or has nobody connect
// to one that listens any more; it still has to be closed. It cannot block, as closing can: that
// also closes what the peer has put into the socket's queue.
func hangUp(c syscall.Conn) {
	if rc, err := c.SyscallConn(); err == nil {
		rc.Control(func(fd uintptr) { unix.Shutdown(int(fd), unix.SHUT_RDWR) })
	}
}
