package shm

import "sync"

// lifetime counts the users of a link. A dead link gets no new users, and is dismantled when its last
// user has gone.
type lifetime struct {
	gone      chan struct{} // closed when the link is dead
	dismantle func()        // called once, in its own goroutine
	idled     func()        // called with mu held if the link has to be looked at again later: it may be unused, or keep memory that the peer may still read
	unread    func() bool   // called with mu held: the peer may still read what this end has written

	mu     sync.Mutex // guards the fields below; no system call is made with it held
	users  int        // endpoints, connects in progress, and others that need the memory
	dead   bool       // no new connections
	broken bool       // … and the peer has ended the link, or the link has failed here
	reader peerEnd
	torn   bool // dismantle was started
	idle   int  // ticks without a user
}

// peerEnd is how the link has ended for the peer, which bounds what the peer may still read.
type peerEnd uint8

const (
	peerThere  peerEnd = iota // all that was committed
	peerHungUp                // the messages that the peer held when it hung up
	peerGone                  // nothing: its process has ended
)

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
// time of any other one. A link that is broken keeps the memory that a peer may still read.
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

// over reports whether no new connection can be made.
func (l *lifetime) over() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.dead
}

// kill makes a link dead that the peer has ended, or that has failed, and adds a user, for whom its
// memory stays mapped. It returns false if the link is dead already.
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
