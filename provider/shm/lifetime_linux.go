package shm

import "sync"

// lifetime counts the users of a link. A dead link gets no new users, and is dismantled when its last
// user has gone.
type lifetime struct {
	gone      chan struct{} // closed when the link is dead
	dismantle func()        // called once, in its own goroutine
	idled     func()        // called with mu held when a link that is not dead may be unused

	mu       sync.Mutex // guards the fields below; no system call is made with it held
	users    int        // endpoints, connects in progress, and others that need the memory
	dead     bool       // no new connections
	peerGone bool       // … and the peer has ended the link
	torn     bool       // dismantle was started
	idle     int        // ticks without a user
}

// acquire adds a user, for whom the link's memory stays mapped. It fails if the link is dead.
func (l *lifetime) acquire() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.dead {
		return ErrLinkGone
	}
	l.users++
	return nil
}

// release removes a user.
func (l *lifetime) release() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.users--
	l.unusedLocked()
}

// unusedLocked is called when the link may be unused. It starts to dismantle a dead link, and the idle
// time of any other one.
func (l *lifetime) unusedLocked() {
	if l.users > 0 || l.torn {
		return
	}
	if l.dead {
		l.torn = true
		go l.dismantle()
	} else {
		l.idle = 0
		l.idled()
	}
}

// over reports whether no new connection can be made.
func (l *lifetime) over() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.dead
}

// kill makes a link dead that the peer has ended, and adds a user, for whom its memory stays mapped. It
// returns false if the link is dead already.
func (l *lifetime) kill() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.dead {
		return false
	}
	l.dead, l.peerGone = true, true
	close(l.gone)
	l.users++
	return true
}

// closeUnused makes a link dead that has no user.
func (l *lifetime) closeUnused() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closeUnusedLocked()
}

func (l *lifetime) closeUnusedLocked() {
	if l.users == 0 && !l.dead {
		l.dead = true
		close(l.gone)
	}
	l.unusedLocked()
}
