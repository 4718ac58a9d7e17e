package shm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/session"
)

// postRetry is the pause before a message is sent again to a peer whose queue is full,
// with some hundred messages unread.
const postRetry = time.Millisecond

// tick is how often a link checks whether it, or a ring that has grown, is idle. What was
// idle for two ticks is given back. It is a variable for tests.
var tick = time.Second

// link is one end of the connection between a dialing and an accepting process.
// Up to three goroutines serve it: serve reads the socket, answer waits for the doorbell,
// and watch, if there is a pidfd, for the peer's death. dismantle waits for them to end.
type link struct {
	side    int // 0: dialing, 1: accepting
	cfg     Config
	conn    *net.UnixConn
	rawConn syscall.RawConn
	pid     int    // of the peer, 0: not visible here
	uid     uint32 // of the peer

	bellIn   *bell // rung by the peer
	bellOut  *bell
	eventIn  *os.File // eventfd behind bellIn
	eventOut int      // the peer's; -1: ring by message
	pidfd    *os.File // nil: only the socket tells of the peer's death

	// accept takes a connection at the accepting end and returns the code to
	// answer with. It does not block.
	accept acceptFunc

	slots   atomic.Pointer[[]*slot] // grows by copying
	shut    atomic.Bool             // the listener at the other end is closed
	segment chan struct{}           // held while a new segment is on offer
	gone    chan struct{}           // closed when the link is dead
	work    sync.WaitGroup          // goroutines

	mu       sync.Mutex // guards what follows; no system call under it
	maps     []mapping
	live     int     // endpoints of this end, connects under way, and others that need the mapping
	free     []*slot // dialing end: slots that nobody uses
	pending  map[uint32]chan uint8
	offered  mapping    // dialing end: a segment that the peer has not answered for
	said     chan uint8 // … and where the answer goes; nil: none on offer
	dead     bool       // no new connections; gone is closed
	torn     bool       // dismantle runs or ran
	after    func()     // called by release
	released bool
	idle     int // ticks without a connection
	timer    *time.Timer
	timing   bool // the timer is set or tick is running
	grew     bool // a ring has grown since tick last looked
}

// errLinkGone: the link ended before it answered. Another one may.
var errLinkGone = errors.New("shm: the link has ended")

type acceptFunc func(l *link, s *slot, m *message, fds []int) (code uint8)

// serve handles messages from the socket until it ends.
func (l *link) serve() {
	defer l.work.Done()
	for {
		var m message
		fds, err := receive(l.conn, &m)
		switch {
		case err == nil || errors.Is(err, errCut):
			if err = l.act(&m, fds, err); isGone(err) {
				err = errPeerGone // before it got our answer
			} else if err != nil {
				err = fmt.Errorf("shm: the peer broke the link: %v: %w", err, syscall.ECONNRESET)
			}
		case errors.Is(err, errMessage):
			err = fmt.Errorf("%v: %w", err, syscall.ECONNRESET)
		default:
			err = errPeerGone // EOF, or a reset if messages of ours were unread
		}
		closeAll(fds)
		if err != nil {
			l.die(err)
			return
		}
	}
}

// act handles one message. cut is nil or errCut. An error means that the peer broke the
// protocol or is gone.
func (l *link) act(m *message, fds []int, cut error) error {
	// Look at the bell on every message: one that found the queue full was not sent.
	l.bellIn.asleep.Store(1) // the next bell has to ring
	l.bellIn.take(l.deliver)
	switch {
	case m.kind == msgBell:
	case m.kind == msgSegment && l.side == 1:
		return l.takeSegment(m, fds, cut)
	case m.kind == msgConnect && l.side == 1:
		slots := *l.slots.Load()
		if int64(m.number) >= int64(len(slots)) || slots[m.number].ep.Load() != nil {
			return fmt.Errorf("a connect to slot %d", m.number)
		}
		code := uint8(codeResources)
		if cut == nil {
			code = l.accept(l, slots[m.number], m, fds)
		}
		return l.reply(&message{kind: msgResult, number: m.number, code: code})
	case m.kind == msgResult && l.side == 0:
		if !l.answered(m.number, m.code) {
			return errors.New("an answer without a question")
		}
	case m.kind == msgMapped && l.side == 0:
		if !l.mapped(nil, m.code) {
			return errors.New("an answer about no segment")
		}
	default:
		return fmt.Errorf("message %d", m.kind)
	}
	return nil
}

// reply posts an answer, and waits as long as the link lives: a peer that does not read
// may only be stopped, and its connections are to go on afterwards. Until then serve reads
// no further messages.
func (l *link) reply(m *message) error { return l.post(context.Background(), m) }

// post sends a message without blocking in the socket: if the queue is full or memory is
// short, it pauses and tries again until ctx or the link ends.
func (l *link) post(ctx context.Context, m *message, fds ...int) error {
	b := m.encode()
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	for {
		var err error
		if e := l.rawConn.Control(func(fd uintptr) {
			err = unix.Sendmsg(int(fd), b, oob, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		}); e != nil {
			return e
		}
		switch err {
		case unix.EAGAIN, unix.EINTR, unix.ENOBUFS, unix.ENOMEM:
		default:
			return err
		}
		select {
		case <-time.After(postRetry):
		case <-l.gone:
			return errPeerGone
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// answer waits for the doorbell. It sets asleep before every look, inside the wait,
// because each ring clears it.
func (l *link) answer(event syscall.RawConn) {
	defer l.work.Done()
	// Made once: in the loop they would be allocated for each wake-up.
	//
	// The eventfd is not read: each write to it is an edge for epoll, and the peer
	// could make a read block.
	ready := func(uintptr) bool {
		l.bellIn.asleep.Store(1)
		return l.bellIn.pending()
	}
	deliver := l.deliver
	for event.Read(ready) == nil {
		l.bellIn.take(deliver)
	}
}

// deliver wakes a slot's session, or frees a slot that both sides are done with.
func (l *link) deliver(number int, ev session.Events) {
	slots := *l.slots.Load()
	if number >= len(slots) {
		return
	}
	s := slots[number]
	if e := s.ep.Load(); e != nil {
		if state := e.theirs.load(); state != stateOpen {
			e.peerState(state)
		}
		e.wake(ev)
	} else if l.side == 0 {
		l.mu.Lock()
		l.reap(s)
		l.mu.Unlock()
	}
}

var one = [8]byte{1} // what a ring adds to an eventfd: not 0 in either byte order

// ring tells the peer that a slot has news.
func (l *link) ring(number int, ev session.Events) {
	if !l.bellOut.set(number, ev) {
		return
	}
	if l.eventOut >= 0 {
		for {
			// It would block only after 2^64 rings, and another user's process,
			// which could fill the counter, does not share an eventfd (see trusted).
			_, _, errno := unix.RawSyscall(unix.SYS_WRITE, uintptr(l.eventOut), uintptr(unsafe.Pointer(&one[0])), 8)
			if errno != unix.EINTR {
				return
			}
		}
	}
	b := (&message{kind: msgBell}).encode()
	l.rawConn.Control(func(fd uintptr) {
		// If the queue is full the message is not needed: the peer looks at the bell
		// whenever it reads one.
		_ = unix.Sendto(int(fd), b, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, nil)
	})
}

// watch waits for the end of the peer's process. The socket may hide it: a forked child
// can keep it open.
func (l *link) watch(pidfd syscall.RawConn) {
	defer l.work.Done()
	err := pidfd.Read(func(fd uintptr) bool {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(p, 0)
		return n > 0 && err == nil
	})
	if err == nil {
		l.die(errPeerGone)
	}
}

// die ends the link: the peer is gone or broke the rules.
func (l *link) die(cause error) {
	l.mu.Lock()
	if l.dead {
		l.mu.Unlock()
		return
	}
	l.dead = true
	close(l.gone)
	l.live++ // keeps the mapping
	l.mu.Unlock()
	l.conn.Close() // a peer that lives need not wait until our endpoints have retired
	for _, s := range *l.slots.Load() {
		if e := s.ep.Load(); e != nil {
			e.linkDied(cause)
		}
	}
	l.leave()
}

// leave takes one off live.
func (l *link) leave() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.live--
	l.rest()
}

// rest is called when the link may be unused. It has a dead link dismantled, and starts a
// dialing end's idle time. mu is held.
func (l *link) rest() {
	if l.live > 0 || l.torn {
		return
	}
	if l.dead {
		l.torn = true
		go l.dismantle()
	} else if l.side == 0 {
		l.idle = 0
		l.startTimer()
	}
}

// retire ends a link that has no connection.
func (l *link) retire() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.live == 0 && !l.dead {
		l.dead = true
		close(l.gone)
	}
	l.rest()
}

// onGone arranges for f to be called once the link has given everything back.
func (l *link) onGone(f func()) {
	l.mu.Lock()
	if !l.released {
		l.after = f
		f = nil
	}
	l.mu.Unlock()
	if f != nil {
		f()
	}
}

// ended reports whether no more connections can be made.
func (l *link) ended() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.dead
}

// startTimer is called with mu held.
func (l *link) startTimer() {
	if l.timing || l.torn {
		return
	}
	l.timing = true
	if l.timer == nil {
		l.timer = time.AfterFunc(tick, l.tick)
	} else {
		l.timer.Reset(tick)
	}
}

// ringGrew asks the janitor to look at this link's rings.
func (l *link) ringGrew() {
	l.mu.Lock()
	l.grew = true
	l.startTimer()
	l.mu.Unlock()
}

// tick is the janitor: it gives back memory of rings, in use or not, and ends a dialing
// end that has no connections. That takes nothing from the peer: what it has yet to read
// is in its own mapping.
func (l *link) tick() {
	l.mu.Lock()
	if l.torn {
		l.mu.Unlock()
		return
	}
	l.grew = false
	l.work.Add(1)
	l.mu.Unlock()
	defer l.work.Done()

	again := l.cool()
	for _, s := range *l.slots.Load() {
		if e := s.ep.Load(); e != nil && e.shrink() {
			again = true
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.timing = false
	if l.side == 0 && l.live == 0 {
		l.idle++
		again = true
		if l.idle > 1 && !l.dead {
			l.dead = true
			close(l.gone)
			l.rest()
			return
		}
	}
	if again || l.grew {
		l.startTimer()
	}
}

// dismantle gives back everything that a dead link holds.
func (l *link) dismantle() {
	l.conn.Close()
	l.eventIn.Close()
	if l.pidfd != nil {
		l.pidfd.Close()
	}
	if l.timer != nil {
		l.timer.Stop()
	}
	l.work.Wait()
	l.release()
}

// release closes and unmaps everything. Files may have been closed before.
func (l *link) release() {
	l.conn.Close()
	if l.eventIn != nil {
		l.eventIn.Close()
	}
	if l.pidfd != nil {
		l.pidfd.Close()
	}
	if l.eventOut >= 0 {
		unix.Close(l.eventOut)
	}
	for _, s := range *l.slots.Load() {
		budget.Return(s.inherit())
	}
	l.mu.Lock()
	maps := append(l.maps, l.offered)
	l.maps, l.offered, l.said = nil, mapping{}, nil
	l.mu.Unlock()
	for _, m := range maps {
		m.unmap()
	}
	l.mu.Lock()
	l.released = true
	after := l.after
	l.mu.Unlock()
	if after != nil {
		after()
	}
	links.remove(l)
}
