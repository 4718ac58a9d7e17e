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

	"github.com/sanconn/san/provider/shm/internal/quota"
	"github.com/sanconn/san/provider/shm/internal/ring"
	"github.com/sanconn/san/session"
)

// link is one end of what a dialing and an accepting process share. Its parts have a lock each.
//
// Up to three goroutines serve it: one receives from the control socket; one waits at the doorbell when
// no sleeper does (waiters_linux.go); and one waits for the end of the peer's process, if there is a
// pidfd. dismantle waits for all of them.
type link struct {
	lifetime
	role      int // 0: dialing, 1: accepting
	cfg       Config
	peer      peerProcess
	payer     account // to whom this process charges the link
	peerUser  account // the peer's user, for descriptors that it passes
	counted   bool    // this end has charged linkDescriptors to the peer's user; for an accepted link the listener does so
	control   controlSocket
	door      doorbell
	waiters   waiters // of door
	slots     slotTable
	extending extending
	reclaim   reclaimer

	// mayPunch: memory of rings may be given back while the link lives. That takes the lock of the
	// segment's file (shmem_fallocate in Linux's mm/shmem.c). A process that writes to the file holds
	// this lock as long as the memory that it writes from is not available, as in a file of a FUSE
	// server. A thread of this process would be stuck meanwhile, and even SIGKILL would not end it. A
	// process of another user cannot write to the file. One of this user could stop this process
	// anyway, except from another container, as is possible with a directory.
	mayPunch bool

	// accept takes a connection at the accepting end, and returns codeOK or the code that refuses it.
	// It does not block.
	accept acceptFunc

	listenerClosed atomic.Bool    // the other end's listener is closed, or the link takes no more connections for another reason
	work           sync.WaitGroup // goroutines
	onClose        func()         // called at the end of teardown; nil: the link was never started
}

type acceptFunc func(l *link, s *slot) (code uint8)

// fdTableMu lets one goroutine at a time make a link's descriptors. While the kernel enlarges the
// process's table of descriptors, which takes milliseconds (expand_fdtable in Linux's fs/file.c), each
// further goroutine that needs one would block a thread.
var fdTableMu sync.Mutex

// newLink makes a link from its socket and what the kernel knows about the peer. The caller is a user
// of the link until start. If newLink fails, it closes the socket.
func newLink(role int, conn *net.UnixConn, cfg Config) (*link, error) {
	l := &link{role: role, cfg: cfg, mayPunch: cfg.Dir == ""}
	l.lifetime = lifetime{users: 1, gone: make(chan struct{}), dismantle: l.dismantle, idled: l.reclaim.schedule,
		unread: func() bool { return l.mayPunch && l.slots.unread(l.reader) }} // without mayPunch the memory stays in any case
	l.slots.init()
	l.extending.turn = make(chan struct{}, 1)
	l.reclaim.sweep = l.sweep
	fdTableMu.Lock()
	var err error
	l.control = controlSocket{UnixConn: conn, gone: l.gone}
	if l.control.raw, err = conn.SyscallConn(); err == nil {
		l.peer, err = newPeerProcess(l.control.raw)
	}
	if l.payer, l.peerUser = ownAccount(), accountOf(l.peer.uid); role == 1 {
		l.payer = l.peerUser
	}
	l.slots.memory = budget().Of(l.ringUser())
	l.door.toPass, l.door.peer = -1, -1
	if err == nil && !l.slots.memory.HasSure() {
		err = errNoMemory
	}
	if err == nil && role == 0 && l.ringUser() != quota.Own {
		if l.counted = l.peerUser.descriptors.Take(l.peerUser.user, linkDescriptors); !l.counted {
			err = errNoDescriptors
		}
	}
	if err == nil {
		err = l.door.create()
	}
	fdTableMu.Unlock()
	if err != nil {
		if role == 1 {
			refuseLink(conn, l.peerUser)
		}
		l.teardown()
		return nil, unavailable(err)
	}
	l.waiters.init(&l.door, l.deliver)
	return l, nil
}

// ringUser returns the holder to whom this end's rings are charged: the peer's user, as the peer has to
// read them. A peer that could stop this process anyway counts as this process itself, but not one of
// another container, as is possible with a directory.
func (l *link) ringUser() quota.Holder {
	if l.peer.uid == uint32(os.Geteuid()) && l.cfg.Dir == "" {
		return quota.Own
	}
	return l.peerUser.user
}

// start begins to serve the link. The caller of newLink is no user of it any more. onClose is called
// when the link has given everything back.
func (l *link) start(onClose func()) {
	l.onClose = onClose
	l.work.Go(l.serve)
	l.work.Go(l.waiters.run)
	l.work.Go(func() {
		if l.peer.wait() == nil {
			l.die(errPeerGone)
			l.peerEnded()
		}
	})
	l.release()
}

// serve handles messages from the control socket until it ends.
func (l *link) serve() {
	for {
		var m message
		fds, err := receive(l.control.UnixConn, &m)
		switch {
		case err == nil || errors.Is(err, errCut):
			if err = l.handle(&m, fds, err); isGone(err) {
				err = errPeerGone // the peer has ended before it received the reply
			} else if err != nil {
				err = fmt.Errorf("shm: the peer broke the link: %v: %w", err, syscall.ECONNRESET)
			}
		case isGone(err):
			err = errPeerGone // end of file, or a reset if the peer had not read all messages
		default: // not a message, or this process may no longer receive
			err = fmt.Errorf("%v: %w", err, syscall.ECONNRESET)
		}
		l.peerUser.closeUntrusted(fds...)
		if err != nil {
			l.die(err)
			return
		}
	}
}

// handle handles one message. cut is nil or errCut. An error means that the peer broke the protocol or
// has gone. After the handshake, only messages about segments have descriptors.
func (l *link) handle(m *message, fds []int, cut error) error {
	switch {
	case m.kind == msgSegment && l.role == 1:
		return l.handleSegment(m, fds, cut)
	case m.kind == msgSegmentReply && l.role == 0:
		if cut == nil && (len(fds) == 1) != (m.code == codeOK) {
			return fmt.Errorf("a reply to a segment with %d descriptors", len(fds))
		}
		return l.segmentReplied(m.code, fds)
	}
	if cut != nil || len(fds) > 0 {
		return fmt.Errorf("message %d with descriptors", m.kind)
	}
	switch {
	case m.kind == msgConnect && l.role == 1:
		return l.handleConnect(m)
	case m.kind == msgRefuse && l.role == 0:
		return l.refused(m)
	}
	return fmt.Errorf("message %d", m.kind)
}

// handleConnect accepts or refuses a connection.
func (l *link) handleConnect(m *message) error {
	s := l.slots.at(m.number)
	if s == nil || s.ep.Load() != nil {
		return fmt.Errorf("a connect to slot %d", m.number)
	}
	if code := l.accept(l, s); code != codeOK {
		return l.reply(&message{kind: msgRefuse, number: m.number, code: code})
	}
	return nil
}

// refused ends a connection that the peer has refused.
func (l *link) refused(m *message) error {
	s := l.slots.at(m.number)
	if s == nil || m.code == codeOK {
		return fmt.Errorf("slot %d refused with code %d", m.number, m.code)
	}
	e := s.ep.Load() // read first: after noteRefused another connection may have the slot
	if !l.slots.noteRefused(s) {
		return fmt.Errorf("slot %d refused, which it has, or was not given", m.number)
	}
	err := codeError(m.code)
	if m.code == codeClosed { // another process may have the name by now
		l.listenerClosed.Store(true)
		err = linkGone(err)
	}
	if e != nil {
		e.fail(err)
	}
	return nil
}

// reply posts a reply, and waits for room as long as the link lives: a peer that does not read may only
// be stopped, and its connections have to go on afterwards. Meanwhile serve reads no further messages.
func (l *link) reply(m *message, fds ...int) error {
	return l.control.post(context.Background(), m, fds...)
}

// deliver wakes the session of the slot's connection.
func (l *link) deliver(number int, ev session.Events) {
	if s := l.slots.at(uint32(number)); s != nil {
		if e := s.ep.Load(); e != nil {
			e.wake(ev)
		}
	}
}

// attach makes an endpoint its slot's, so that the doorbell wakes it. The endpoint is a user of the
// link until detach. The code is codeClosed if the link is dead; and codeResources at the accepting
// end, if the peer's user has too many connections, or has so much unread that the endpoint's ring
// could not grow.
func (l *link) attach(e *endpoint) (code uint8) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.dead {
		return codeClosed
	}
	if l.role == 1 && !e.out.MayGrow() {
		return codeResources
	}
	if l.role == 1 && !e.slot.charged {
		if !l.payer.connections.Take(l.payer.user, 1) {
			return codeResources
		}
		e.slot.charged = !l.mayPunch // the slot's memory cannot be given back, so it counts until the link's end
	}
	l.users++
	e.slot.ep.Store(e)
	if e.out.Pages() > ring.Start {
		l.reclaim.schedule()
	}
	return codeOK
}

// detach removes a retired endpoint from its slot.
func (l *link) detach(s *slot) {
	if s.pages.any() {
		l.reclaim.schedule()
	}
	if l.role == 0 {
		l.slots.giveBack(s)
	} else if l.mayPunch {
		l.payer.connections.Return(l.payer.user, 1)
	}
	l.mu.Lock()
	others := l.users > 1
	l.mu.Unlock()
	if others {
		l.waiters.Rest() // the endpoint's sleeper may have waited at the doorbell for the others
	}
	l.release()
}

// die makes the link dead: the peer has gone or broke the protocol, or this process cannot receive any more.
func (l *link) die(cause error) {
	reader := peerThere
	switch {
	case l.peer.pidfd == nil: // nothing will show the end of its process
		reader = peerGone
	case cause == errPeerGone:
		reader = peerHungUp
	}
	if !l.kill(reader) {
		return
	}
	defer l.release()
	for _, s := range l.slots.list() {
		if e := s.ep.Load(); e != nil {
			e.linkDied(cause)
		}
	}
	hangUp(l.control.UnixConn) // a peer that lives need not wait until the endpoints here have retired
}

// idleTicks is for how many ticks a link lives without a connection, at the dialing and the accepting
// end. Usually the dialing end closes it; the accepting end closes a link that a dialer only holds. It
// is a variable for tests.
var idleTicks = [2]int{2, 5}

// closeIdle closes a link that has been idle for idleTicks, unless the peer has bytes left to read:
// these are accounted for until the peer has read them or has ended. It reports whether it has to be
// called again.
func (l *link) closeIdle() (again bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.dead:
		l.unusedLocked()
		return false
	case l.users > 0:
		return false
	}
	if l.idle++; l.idle >= idleTicks[l.role] && !l.slots.unread(l.reader) {
		l.closeUnusedLocked()
	}
	return true
}

// dismantle stops the goroutines of a dead link, and gives everything back.
func (l *link) dismantle() {
	hangUp(l.control.UnixConn)
	l.waiters.stop()
	l.peer.pidfd.Close()
	l.reclaim.stop()
	l.work.Wait()
	l.teardown()
}

// teardown closes and unmaps everything.
func (l *link) teardown() {
	l.peerUser.closeLater(func() { l.control.Close() })
	l.door.close(l.peerUser)
	l.peer.pidfd.Close()
	if p := l.extending.half.Swap(nil); p != nil {
		p.unmapKept(l.slots.memory, 0)
	}
	l.slots.unmap(l.mayPunch, l.reader)
	l.mu.Lock()
	for _, s := range l.slots.list() {
		if s.charged {
			l.payer.connections.Return(l.payer.user, 1)
		}
	}
	l.mu.Unlock()
	if l.counted {
		l.peerUser.descriptors.Return(l.peerUser.user, linkDescriptors)
	}
	if l.onClose != nil {
		l.onClose()
	}
}
