package shm

import "sync"

// lifetime counts who uses a link. It is dead from when nobody may become a user, and dismantled
// when it is dead and the last user has gone.
type lifetime struct {
	gone      chan struct{} // closed when the link is dead
	dismantle func()        // called once, in a goroutine of its own
	idled     func()        // called, under mu, when a link that lives may be unused

	mu       sync.Mutex // guards what follows; no system call under it
	users    int        // endpoints, connects under way, and others that need the memory
	dead     bool       // no new connections; gone is closed
	peerGone bool       // … and the peer has ended it: it reads no more, or what it likes
	torn     bool       // dismantle runs or ran
	idle     int        // ticks without a user
}

// acquire adds a user, for whom the link's memory stays. It fails if the link is dead.
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

// unusedLocked is called when the link may be unused. It has a dead link dismantled, and
// starts the idle time of one that lives.
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

// over reports whether no more connections can be made.
func (l *lifetime) over() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.dead
}

// kill ends the life of a link that the peer has ended, and adds a user, for whom its memory stays.
// It returns false if the link is dead already.
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

// closeUnused ends a link that has no user.
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
