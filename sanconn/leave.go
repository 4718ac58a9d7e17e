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

// backTimeout bounds how long the descriptor's user waits for a peer that is to leave the
// session, too: that takes some 100 µs, and processor time. Tests set it higher.
var backTimeout = 5 * time.Second

// Of the peer's bytes no more are taken from a session, once the peer has stopped, than it can have
// left: mostOfRing, or session.MostLeft. mostReturned bounds what it returns: it has room for as much as
// its own configuration says. So a peer has no more of this end's memory.
const (
	mostReturned = 64 << 20
	mostOfRing   = 4 << 20
)

// answerTime is how long a peer is left without more room before what comes is read while it has not
// answered. That is less than its Close waits for. It is a variable for tests.
var answerTime = 100 * time.Millisecond

var (
	errStarved = &session.Unavailable{Reason: session.ReasonResources, Err: errors.New("a Write waited for memory that other connections have used up")}
	errNotBack = fmt.Errorf("the SAN connection ended on the way back to TCP: %w", syscall.ECONNRESET)
	errStays   = fmt.Errorf("the peer does not leave the SAN: %w", syscall.ETIMEDOUT)
	errUnread  = errors.New("bytes that came by the SAN have not been read, and the descriptor cannot have them")
	errTooFew  = errors.New("fewer bytes are left on the session than the peer has said")
	errTooMany = errors.New("more bytes are left on the session than it can hold")
)

// backLocked has TCP carry the connection. mu is held, and released meanwhile.
func (c *Conn) backLocked() error {
	end := time.Now().Add(backTimeout)
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

// leaveLocked begins to leave the session. why: unless it is a wish of either program. mu is held.
func (c *Conn) leaveLocked(asked bool, why error) error {
	if c.inVain != nil { // the session has ended, and is not taken from those again that are to find how
		return errNotBack
	}
	if err := c.state.leave(asked); err != nil {
		return err
	}
	c.steppedLocked()
	go c.leave(c.session, why) // it ends with the session, which Close ends
	return nil
}

// starves has TCP carry the connection, which has memory of the kernel's: a Write on the session waits
// for memory that other connections have used up. Two ends that write before they read would wait for
// each other for ever, where TCP takes what they write. One that has had no byte on TCP keeps to the
// session: either end may have the policy Require. So does one for whose unread bytes there is no room.
func (c *Conn) starves(s *session.Session) {
	c.mu.Lock()
	defer c.mu.Unlock()
	byTCP := c.in.bytes.Load() > 0 || c.out.written.Load() > 0
	if c.session != s || !byTCP || c.closed.Load() || c.state.phase != onSAN || !c.takeRoomLocked(s.Spare()) {
		return // a Write that starves on has it called again
	}
	if c.leaveLocked(false, errStarved) != nil {
		c.countKeptLocked()
	}
}

// peerLeaves takes the peer's note that it leaves the session.
func (c *Conn) peerLeaves(s *session.Session, at uint64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.session != s:
		return errNotAgreed
	case c.state.phase == leaving:
	case c.closed.Load():
		return nil // the session's end, which is under way, is the answer
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
	unread   []byte // the peer's bytes that this end's application has still to read
	back     int    // or that so many were returned to the peer
	returned []byte // bytes of this end's application that the peer returns
}

// leave takes both directions back to TCP. Each end does the same; it is asked if its own application
// wants the descriptor:
//
//	take both directions from the application; send where its bytes end on the session (NoteLeave)
//	wait for the same of the peer, and read up to there, or to the end of one that has closed
//	asked: return to the peer what the application has not read; its stream ends behind that
//	otherwise: keep it for the application
//	read what the peer returns, up to the end of its stream
//	send that by TCP before anything else
//
// So the descriptor of an end that is asked has every byte that its application has not
// read, and no byte of it lies elsewhere.
func (c *Conn) leave(s *session.Session, why error) {
	t, err := c.exchange(s)
	c.in.op.Lock()
	c.out.op.Lock()
	c.mu.Lock()
	if len(t.unread) > 0 && c.state.in.begun { // else it is not known behind what they come, and no stream's
		c.in.rest = &rest{t.unread, c.state.in.at}
	}
	c.inVain = err
	over := false
	if err == nil {
		c.leftLocked(t, why)
	} else {
		// Each operation finds the session's end by itself, behind what had come. Reads find it once they
		// turn to the session again: one that has met it before this may be late, and would pass over
		// what was read meanwhile.
		if over = c.state.leftInVain(); !over {
			c.tcp.SetLinger(0) // to a peer that has left, an end of TCP is a reset
		}
		c.out.san.Store(s)
		s.GiveBackWrite()
	}
	c.countKeptLocked()
	flushes, shut := c.state.phase == flushing, c.state.out.shut
	if err != nil { // behind Close the peer is reset, and is not to find an end before
		shut = over && !c.closed.Load()
	}
	c.steppedLocked()
	c.mu.Unlock()
	c.out.unlock(c) // each may have been agreed to move again by now
	c.in.unlock(c)
	switch {
	case flushes:
		c.out.flush(c)
	case shut:
		c.tcp.CloseWrite() // fails only if it has been closed
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
	if !c.closed.Load() { // else TakeWrite may not have waited for what is lent, which comes back by it
		c.out.san.Store(nil)
	}
	c.out.op.Unlock()
	s.TakeRead() // before the peer knows, and returns bytes
	c.in.nudge(c)
	c.in.op.Lock()
	if !c.closed.Load() {
		c.in.san.Store(nil)
	}
	c.in.op.Unlock()
	// It fails if the session has ended, perhaps ahead of the peer's last notes, which are waited for:
	// without its begin it is not known behind what of TCP its bytes come.
	told := s.SendNote(positionNote(newconn.NoteLeave, s.WritePosition()))

	// It waits at the session as a Read does: the idle poller would be late. A peer that has closed
	// does not answer, and may wait until what comes is read; any other answers, and writes no more
	// meanwhile than there is room for.
	answered := func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.state.over || c.state.mayLeave()
	}
	from, most, back := s.ReadPosition(), uint64(mostOfRing), uint64(mostOfRing)
	if !s.Limits().Ring() {
		most, back = s.MostLeft(), mostReturned
		late := time.Now().Add(answerTime)
		defer time.AfterFunc(answerTime, s.LookAgain).Stop()
		s.AwaitTaken(func() bool { return answered() || !time.Now().Before(late) })
		t.unread = readUntil(s, most, answered)
	}
	s.AwaitTaken(answered)
	c.mu.Lock()
	for !c.state.over && !c.state.mayLeave() {
		c.awaitLocked(time.Time{}) // it is over, and its last notes are on their way
	}
	both, until := c.state.mayLeave(), c.state.until
	returns := c.state.asked && !c.state.out.shut
	c.mu.Unlock()
	if !both || told != nil {
		return alone(s, t, most, cmp.Or(told, errNoSession))
	}

	if until-from >= toTheEnd/2 { // as also where it is less
		return t, s.Fail(errBegin)
	}
	if n := until - from; n < uint64(len(t.unread)) {
		t.unread, t.returned = t.unread[:n], t.unread[n:]
	} else if t.unread, err = readTaken(s, t.unread, n-uint64(len(t.unread)), most+uint64(len(t.unread))); err != nil {
		return t, err
	}
	wrote := make(chan error, 1)
	go func() { // while this end reads, or two ends that both return bytes would wait for each other
		var err error
		if returns && len(t.unread) > 0 {
			_, err = s.WriteTaken(t.unread)
		}
		s.CloseWrite()
		wrote <- err
	}()
	t.returned, err = readTaken(s, t.returned, toTheEnd, min(back, s.WritePosition()))
	if err != nil {
		s.Abort() // ends the Write
	}
	if err = errors.Join(err, <-wrote); err != nil {
		return t, err
	}
	// What goes by TCP from here on must not come without what went by the session, should this
	// process end now.
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

// alone leaves a session whose peer has closed it: nothing comes back, and TCP has its end as
// well. On any other end the error is why.
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

// toTheEnd is beyond all streams.
const toTheEnd = 1 << 63

// readUntil reads what comes from a session until done, or its end; most at the most. A peer that
// goes on writing then waits.
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

// readTaken reads so many bytes more from a session, or the rest of its stream; most is for all of them.
func readTaken(s *session.Session, all []byte, n, most uint64) ([]byte, error) {
	if n < toTheEnd/2 { // or append would leave several times as much to the garbage collector
		all = slices.Grow(all, int(min(n, most, mostOfRing))) // no more, as nothing but the peer says so
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

// leftLocked has TCP carry the connection again. in.op, out.op and mu are held.
func (c *Conn) leftLocked(t taken, why error) {
	st := c.session.Stats()
	both := uint64(t.back + len(t.returned)) // they went by the session, and go by TCP, too
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
	if c.state.asked { // the descriptor is wanted for a moment, as far as is known: else it is pinned
		c.use.again(c.threshold)
	} else {
		c.use.again(againAfter)
	}
	if c.state.in.shut { // nobody will read it; the connection does not move again
		c.in.thrown = c.in.rest != nil
		c.in.rest = nil
		c.tcp.CloseRead() // as the descriptor is to show
	}
	c.state.left(uint64(t.back), len(t.returned) > 0)
	c.in.deadline.toTCP(c.tcp)
	c.out.deadline.toTCP(c.tcp)
	if len(t.returned) > 0 {
		c.out.back = t.returned
		c.out.deadline.held = true // these bytes have been taken from the application: its deadline does not bound them
		c.tcp.SetWriteDeadline(time.Time{})
	}
}

// againAfter is for how many bytes a connection is used by TCP that the peer has called back,
// before it tries to move again.
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
	c.state.tcpFailed(err) // which Reads are to find
	o.deadline.restore(c.tcp)
	shut := c.state.out.shut
	c.steppedLocked()
	c.mu.Unlock()
	o.unlock(c) // as in leave
	if err == nil && shut {
		c.tcp.CloseWrite()
	}
}
