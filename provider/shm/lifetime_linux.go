package shm

import "sync"

// lifetime counts who uses a link. It is dead from when nobody may become a user, and dismantled
// when it is dead and the last user has gone.
type lifetime struct {
	gone      chan struct{} // closed when the link is dead
	dismantle func()        // called once, in a goroutine of its own
	idled     func()        // called, under mu, to look later again: whether it is unused, or unread any more
	unread    func() bool   // called under mu: the peer may read yet what this end has written

	mu     sync.Mutex // guards what follows; no system call under it
	users  int        // endpoints, connects under way, and others that need the memory
	dead   bool       // no new connections; gone is closed
	broken bool       // … and the peer has ended it, or it has failed here
	reader peerEnd
	torn   bool // dismantle runs or ran
	idle   int  // ticks without a user
}

// peerEnd is how a link has ended for the peer, and so what that may still read.
type peerEnd uint8

const (
	peerThere  peerEnd = iota // all that was committed
	peerHungUp                // what it held when it did
	peerGone                  // nothing: its process has ended
)

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
// starts the idle time of one that lives. Of a link that is broken stays what a peer that lives may read:
// its connections end behind that.
func (l *lifetime) unusedLocked() {
	switch {
	case l.users > 0 || l.torn:
	case !l.dead:
		l.idle = 0
		l.idled()
	case l.broken && l.unread():
		l.idled()
	default:
		l.torn = true
		go l.dismantle()
	}
}

// over reports whether no more connections can be made.
func (l *lifetime) over() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.dead
}

// kill ends the life of a link that the peer has ended, or that has failed, and adds a user, for whom its
// memory stays. It returns false if the link is dead already.
func (l *lifetime) kill(reader peerEnd) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.dead {
		return false
	}
	l.dead, l.broken, l.reader = true, true, reader
	close(l.gone)
	l.users++
	return true
}

// peerEnded notes that the peer's process has ended.
func (l *lifetime) peerEnded() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.reader = peerGone
	l.unusedLocked()
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
