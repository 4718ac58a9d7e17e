package sanconn

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"syscall"
	"time"

	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/session"
)

// Bounds of how much memory a peer can take of this end. Once the peer has stopped writing, no more is
// read from a session than the peer can have left there: mostOfRing, or session.MostLeft. mostReturned
// bounds the bytes that the peer returns, because it decides itself how many it has room for.
const (
	mostReturned = 64 << 20
	mostOfRing   = 4 << 20
)

var (
	errStarved = &session.Unavailable{Reason: session.ReasonResources, Err: errors.New("a Write waited for memory that other connections have used up")}
	errNotBack = fmt.Errorf("the SAN connection ended on the way back to TCP: %w", syscall.ECONNRESET)
	errStays   = fmt.Errorf("the peer does not leave the SAN: %w", syscall.ETIMEDOUT)
	errUnread  = errors.New("bytes that came by the SAN have not been read, and the descriptor cannot have them")
	errTooFew  = errors.New("fewer bytes are left on the session than the peer has said")
	errTooMany = errors.New("more bytes are left on the session than it can hold")
)

// backLocked makes TCP carry the connection. mu is held, and released meanwhile.
func (c *Conn) backLocked() error {
	end := time.Now().Add(backTimeout.get())
	for c.state.phase != onTCP {
		if c.closed.Load() {
			return net.ErrClosed
		}
		switch c.state.phase {
		case leaving:
			c.state.asked = true
		case onSAN:
			if err := c.leaveLocked(true, nil); err != nil {
				return err
			}
		}
		if !c.awaitLocked(end) {
			return errStays
		}
		if c.inVain != nil {
			return c.inVain
		}
	}
	return nil
}

// leaveLocked begins to leave the session. why is nil if either program wants that. mu is held.
func (c *Conn) leaveLocked(asked bool, why error) error {
	if c.inVain != nil { // the session has ended, and operations that are to find out how must not be taken from it again
		return errNotBack
	}
	if err := c.state.leave(asked); err != nil {
		return err
	}
	c.steppedLocked()
	go c.leave(c.session, why) // ends with the session, which Close ends
	return nil
}

// starves makes TCP carry the connection, because a Write on the session waits for memory that other
// connections have used up. Two ends that write before they read would wait for each other for ever,
// whereas TCP, which has memory of the kernel's, takes what they write. A connection that never had a
// byte on TCP stays on the session, because either end may have the policy Require. So does one whose
// unread bytes would find no room.
func (c *Conn) starves(s *session.Session) {
	c.mu.Lock()
	defer c.mu.Unlock()
	byTCP := c.in.bytes.Load() > 0 || c.out.written.Load() > 0
	if c.session != s || !byTCP || c.closed.Load() || c.state.phase != onSAN || !c.takeRoomLocked(s.Spare()) {
		return // while a Write starves, starves is called again
	}
	if c.leaveLocked(false, errStarved) != nil {
		c.countKeptLocked()
	}
}

// peerLeaves handles the peer's note that it leaves the session.
func (c *Conn) peerLeaves(s *session.Session, at uint64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.session != s:
		return errNotAgreed
	case c.state.phase == leaving:
	case c.closed.Load():
		return nil // the session's end, which has begun, is the answer
	default:
		if err := c.leaveLocked(false, nil); err != nil {
			return err
		}
	}
	defer c.steppedLocked()
	return c.state.peerLeaves(at)
}

// taken is what is taken from the session.
type taken struct {
	unread   []byte // the peer's bytes that this end's application has not read
	back     int    // or how many of these bytes were returned to the peer
	returned []byte // bytes of this end's application that the peer has returned
}

// leave takes both directions back to TCP. Each end does the same. An end is "asked" if its own
// application wants the descriptor:
//
//	take both directions from the application; tell where this end's bytes end on the session (NoteLeave)
//	wait for the peer's NoteLeave, and read up to there, or to the end of a peer that has closed
//	if asked: return to the peer what the application has not read, and end the stream
//	otherwise: keep it for the application
//	read what the peer returns, up to the end of its stream
//	send that by TCP before anything else
//
// So the descriptor of an end that is asked has every byte that its application has not read, and no
// such byte is anywhere else.
func (c *Conn) leave(s *session.Session, why error) {
	t, err := c.exchange(s)
	c.in.op.Lock()
	c.out.op.Lock()
	c.mu.Lock()
	if len(t.unread) > 0 && c.state.in.begun { // otherwise it is not known which bytes of TCP precede them, and they belong to no stream
		c.in.rest = &rest{t.unread, c.state.in.at}
	}
	c.inVain = err
	if err == nil {
		c.leftLocked(t, why)
	} else {
		// Each operation meets the session's end by itself, after what had come. Reads meet it once
		// they turn to the session again. A Read that has met it before this may be late, and would
		// pass over what was read meanwhile.
		c.state.leftInVain()
		if c.state.peerMayHaveLeft() {
			c.tcp.SetLinger(0)
		}
		c.out.san.Store(s)
		s.GiveBackWrite()
	}
	c.countKeptLocked()
	flushes, shut := c.state.phase == flushing, c.state.out.shut
	if err != nil { // after Close the peer must find a reset, and no end before it
		shut = !c.state.peerMayHaveLeft() && !c.closed.Load()
	}
	c.steppedLocked()
	c.mu.Unlock()
	c.out.unlock(c) // each may be about to move again
	c.in.unlock(c)
	switch {
	case flushes:
		c.out.flush(c)
	case shut:
		c.tcp.CloseWrite() // fails only if TCP is closed
	}
}

// exchange leaves the session.
func (c *Conn) exchange(s *session.Session) (t taken, err error) {
	if s.TakeWrite() {
		c.out.addCuts(c, 1)
	}
	c.mu.Lock()
	c.out.deadline.hold(c.tcp)
	c.mu.Unlock()
	c.out.op.Lock()
	c.out.beginLocked(c, s, false)
	if !c.closed.Load() { // otherwise TakeWrite may not have waited for lent room, whose Commit uses san
		c.out.san.Store(nil)
	}
	c.out.op.Unlock()
	s.TakeRead() // before the peer knows and returns bytes
	c.in.nudge(c)
	c.in.op.Lock()
	if !c.closed.Load() {
		c.in.san.Store(nil)
	}
	c.in.op.Unlock()
	// SendNote fails if the session has ended, perhaps before the peer's last notes were handled. These
	// are waited for: without the peer's begin it is not known which bytes of TCP precede its bytes
	// here.
	told := s.SendNote(positionNote(newconn.NoteLeave, s.WritePosition()))

	// Wait at the session as a Read does, because the idle poller would be late. A peer that has closed
	// does not answer, and may wait until its bytes are read. Any other peer answers, and writes no
	// more meanwhile than there is room for.
	answered := func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.state.over || c.state.mayLeave()
	}
	from, most, back := s.ReadPosition(), uint64(mostOfRing), uint64(mostOfRing)
	if !s.Limits().Ring() {
		most, back = s.MostLeft(), mostReturned
		wait := answerTime.get()
		late := time.Now().Add(wait)
		defer time.AfterFunc(wait, s.LookAgain).Stop()
		s.AwaitTaken(func() bool { return answered() || !time.Now().Before(late) })
		t.unread = readUntil(s, most, answered)
	}
	s.AwaitTaken(answered)
	c.mu.Lock()
	for !c.state.over && !c.state.mayLeave() {
		c.awaitLocked(time.Time{}) // the session has ended, and its last notes are being handled
	}
	both, until := c.state.mayLeave(), c.state.until
	returns := c.state.asked && !c.state.out.shut
	c.mu.Unlock()
	if !both || told != nil {
		return alone(s, t, most, cmp.Or(told, errNoSession))
	}

	if until-from >= toTheEnd/2 { // also if until is less than from
		return t, s.Fail(errBegin)
	}
	if n := until - from; n < uint64(len(t.unread)) {
		t.unread, t.returned = t.unread[:n], t.unread[n:]
	} else if t.unread, err = readTaken(s, t.unread, n-uint64(len(t.unread)), most+uint64(len(t.unread))); err != nil {
		return t, err
	}
	wrote := make(chan error, 1)
	go func() { // in parallel, as two ends that both return bytes would wait for each other
		var err error
		if returns && len(t.unread) > 0 {
			_, err = s.WriteTaken(t.unread)
		}
		s.CloseWrite()
		wrote <- err
	}()
	t.returned, err = readTaken(s, t.returned, toTheEnd, min(back, s.WritePosition()))
	if err = errors.Join(err, <-wrote); err != nil { // what fails the Read ends the Write as well
		return t, err
	}
	// If this process ends now, what goes by TCP from here on must not come without what went by the
	// session.
	s.Close()
	<-s.Closed() // bounded by Options.CloseTimeout
	if !s.Delivered() {
		return t, errStays
	}
	if returns {
		t.unread, t.back = nil, len(t.unread)
	}
	return t, nil
}

// alone leaves a session that the peer has closed: nothing comes back, and TCP has its end as well.
// After any other end it returns why.
func alone(s *session.Session, t taken, most uint64, why error) (taken, error) {
	if !errors.Is(s.Over(), syscall.EPIPE) {
		return t, why
	}
	var err error
	if t.unread, err = readTaken(s, t.unread, toTheEnd, most+uint64(len(t.unread))); err == nil {
		s.Close()
	}
	return t, err
}

// toTheEnd is larger than any stream.
const toTheEnd = 1 << 63

// readUntil reads what comes from a session until done or the session's end, at most most bytes. A peer
// that goes on writing then waits.
func readUntil(s *session.Session, most uint64, done func() bool) (all []byte) {
	b := make([]byte, 16<<10)
	for uint64(len(all)) < most && !done() {
		n, err := s.ReadTaken(b, done)
		all = append(all, b[:n]...)
		if err != nil {
			break
		}
	}
	return all
}

// readTaken reads n more bytes from a session, or the rest of its stream; most bounds all of them.
func readTaken(s *session.Session, all []byte, n, most uint64) ([]byte, error) {
	if n < toTheEnd/2 { // otherwise append would leave several times as much to the garbage collector
		all = slices.Grow(all, int(min(n, most, mostOfRing))) // no more, as only the peer has told n
	}
	b := make([]byte, min(n, 64<<10))
	for n > 0 {
		if uint64(len(all)) > most {
			return all, s.Fail(errTooMany)
		}
		k, err := s.ReadTaken(b[:min(n, uint64(len(b)))], nil)
		all = append(all, b[:k]...)
		n -= uint64(k)
		switch {
		case err == io.EOF && n > toTheEnd/2:
			return all, nil
		case err == io.EOF:
			return all, s.Fail(errTooFew)
		case err != nil:
			return all, err
		}
	}
	return all, nil
}

// leftLocked makes TCP carry the connection again. in.op, out.op and mu are held.
func (c *Conn) leftLocked(t taken, why error) {
	st := c.session.Stats()
	both := uint64(t.back + len(t.returned)) // these bytes went by the session, and go by TCP as well
	st.BytesSent -= both
	st.BytesReceived -= both
	if c.past == nil {
		c.past = new(past)
	}
	c.past.add(st)
	var urgent [MaxUrgent]byte
	if n, err := c.session.ReadUrgent(urgent[:]); err == nil {
		c.past.urgent = urgent[:n]
	}
	c.cleanUpLocked(nil)
	c.life.Left(why)
	c.session = nil
	if c.state.asked { // the descriptor is wanted for a moment, as far as is known: otherwise it is pinned
		c.use.again(c.threshold)
	} else {
		c.use.again(againAfter)
	}
	if c.state.in.shut { // nobody will read it; the connection does not move again
		c.in.thrown = c.in.rest != nil
		c.in.rest = nil
		c.tcp.CloseRead() // the descriptor must show that
	}
	c.state.left(uint64(t.back), len(t.returned) > 0)
	c.in.deadline.toTCP(c.tcp)
	c.out.deadline.toTCP(c.tcp)
	if len(t.returned) > 0 {
		c.out.back = t.returned
		c.out.deadline.held = true // the application has handed these bytes over, so its deadline does not bound them
		c.tcp.SetWriteDeadline(time.Time{})
	}
}

// againAfter is how many bytes a connection must be used for on TCP before it tries to move again, if
// the peer has called it back.
const againAfter = 16 << 20

// flush sends what came back.
func (o *outgoing) flush(c *Conn) {
	o.op.Lock()
	n, err := c.tcp.Write(o.back)
	err = o.wroteLocked(c, int64(n), err)
	o.back = nil
	c.mu.Lock()
	c.state.flushed()
	c.state.out.broken = c.state.out.broken || err != nil
	c.state.tcpFailed(err) // for Reads to find
	o.deadline.restore(c.tcp)
	shut := c.state.out.shut
	c.steppedLocked()
	c.mu.Unlock()
	o.unlock(c) // as in leave
	if err == nil && shut {
		c.tcp.CloseWrite()
	}
}
