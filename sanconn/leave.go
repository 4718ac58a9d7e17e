package sanconn

import (
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"time"

	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/session"
)

// leave is the way of both directions back to TCP. Each end does the same, the one that asks
// and the one that is asked:
//
//	take both directions from the application; say where its bytes end on the session (NoteLeave)
//	wait for the same of the peer, and read up to there, or to the end of one that has closed
//	asking: return to the peer what the application has not read; its stream ends behind that
//	otherwise: keep it for the application
//	read what the peer returns, up to the end of its stream
//	send that by TCP before anything else
//
// So the descriptor of the end that has asked has every byte that its application has not
// read, and no byte of it lies elsewhere.
type leave struct {
	session *session.Session

	// Conn.mu guards what follows.
	asked  bool  // by this end's application
	why    error // else, or nil: the peer's wish
	peer   bool  // the peer leaves, too, and peerAt is its position
	peerAt uint64
	given  bool // up, by Close
	err    error
}

// backTimeout bounds how long the descriptor's user waits for a peer that is to leave the
// session, too: it needs some 100 µs, and processor time. Tests have more of it.
var backTimeout = 5 * time.Second

// mostTaken bounds the bytes that are taken from a session, each way, once its peer has stopped:
// they fit into a ring, or into a send and a receive buffer. Before, half as many are at most.
const mostTaken = 64 << 20

var (
	errStarved = &session.Unavailable{Reason: session.ReasonResources, Err: errors.New("a Write waited for memory that other connections have used up")}
	errStays   = fmt.Errorf("the peer does not leave the SAN: %w", syscall.ETIMEDOUT)
	errUnread  = errors.New("bytes that came by the SAN have not been read, and the descriptor cannot have them")
	errTooFew  = errors.New("fewer bytes are left on the session than the peer has said")
	errTooMany = errors.New("more bytes are left on the session than it can hold")
)

// backLocked has TCP carry the connection. mu is held, and released meanwhile.
func (c *Conn) backLocked() error {
	end := time.Now().Add(backTimeout)
	for c.state.phase != onTCP || c.out.flushing {
		switch {
		case c.closed.Load():
			return net.ErrClosed
		case c.leave != nil:
			c.leave.asked = true
		case c.state.phase == onSAN:
			c.leaveLocked(true)
		}
		l := c.leave
		if !c.awaitLocked(end) {
			return errStays
		}
		if l != nil && l.err != nil {
			return l.err
		}
	}
	return nil
}

// leaveLocked begins to leave the session. mu is held.
func (c *Conn) leaveLocked(asked bool) error {
	if err := c.state.leave(); err != nil {
		return err
	}
	c.leave = &leave{session: c.session, asked: asked}
	c.in.suspended.Store(true)
	c.out.suspended.Store(true)
	c.out.next.Store(nil)
	c.changedLocked()
	go c.leave.run(c) // it ends with the session, which Close ends
	return nil
}

// starves has TCP carry the connection, which has memory of the kernel's: a Write on the session waits
// for memory that other connections have used up. Two ends that write before they read would wait for
// each other for ever, where TCP takes what they write. One that has had no byte on TCP keeps to the
// session: either end may have the policy Require.
func (c *Conn) starves(s *session.Session) {
	c.mu.Lock()
	defer c.mu.Unlock()
	byTCP := c.in.bytes.Load() > 0 || c.out.written.Load() > 0
	if c.session != s || c.leave != nil || c.closed.Load() || !byTCP {
		return
	}
	if c.leaveLocked(false) == nil { // else the connection is over
		c.leave.why = errStarved
	}
}

// peerLeaves takes the peer's word that it leaves the session.
func (c *Conn) peerLeaves(s *session.Session, at uint64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.session != s, c.leave != nil && c.leave.peer:
		return errNotAgreed
	case c.leave == nil && c.closed.Load():
		return nil // the session's end, which is under way, is the answer
	case c.leave == nil:
		if err := c.leaveLocked(false); err != nil {
			return err
		}
	}
	c.leave.peer, c.leave.peerAt = true, at
	c.changedLocked()
	return nil
}

// taken is what is taken from the session.
type taken struct {
	unread   []byte // the peer's bytes that this end's application has still to read
	back     int    // or that so many were returned to the peer
	returned []byte // bytes of this end's application that the peer returns
}

func (l *leave) run(c *Conn) {
	t, err := l.exchange(c)
	c.in.op.Lock()
	c.out.op.Lock()
	c.mu.Lock()
	if r := c.in.rest; r != nil { // of an earlier way back, which was in vain
		t.unread = append(r.bytes, t.unread...)
	}
	if len(t.unread) > 0 {
		c.in.rest = &rest{t.unread, c.state.in.at}
	}
	if l.err = err; err == nil {
		l.leftLocked(c, t)
	} else {
		l.staysLocked(c)
	}
	c.leave = nil
	c.in.suspended.Store(false)
	c.out.suspended.Store(c.out.flushing)
	flushing, ended := c.out.flushing, c.state.out.ended
	if err != nil { // behind Close the peer is reset, and is not to find an end before
		ended = !c.closed.Load()
	}
	c.out.op.Unlock()
	c.in.op.Unlock() // before mu: File, which waits for this, has to find what is unread
	c.changedLocked()
	c.mu.Unlock()
	switch {
	case flushing:
		c.out.flush(c)
	case ended:
		c.tcp.CloseWrite() // fails only if it has been closed
	}
}

// exchange leaves the session.
func (l *leave) exchange(c *Conn) (t taken, err error) {
	s := l.session
	if s.TakeWrite() {
		c.out.addCuts(c, 1)
	}
	c.mu.Lock()
	c.out.deadline.hold(c.tcp)
	c.mu.Unlock()
	c.out.op.Lock()
	c.out.beginLocked(c, s)
	c.out.san.Store(nil)
	c.out.op.Unlock()
	s.TakeRead() // before the peer knows, and returns bytes
	c.in.nudge(c)
	c.in.op.Lock()
	c.in.san.Store(nil)
	c.in.op.Unlock()
	if err = s.SendNote(positionNote(newconn.NoteLeave, s.WritePosition())); err != nil {
		return l.alone(t, err)
	}

	// Its session is waited for as a Read does: the idle poller would take its time. What comes is
	// read meanwhile, as a peer that has closed, and does not answer, may wait for just that.
	answered := func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return l.given || l.peer && c.state.in.begun
	}
	from := s.ReadPosition()
	t.unread = readUntil(s, answered)
	s.AwaitTaken(answered)
	c.mu.Lock()
	for !l.given && !c.over && !(l.peer && c.state.in.begun) {
		c.awaitLocked(time.Time{}) // it is over, and its last notes are on their way
	}
	left := l.peer && c.state.in.begun
	returns := l.asked && !c.state.out.ended
	c.mu.Unlock()
	if !left {
		return l.alone(t, errNoSession)
	}

	if l.peerAt < from {
		return t, s.Fail(errBegin)
	}
	if n := l.peerAt - from; n < uint64(len(t.unread)) {
		t.unread, t.returned = t.unread[:n], t.unread[n:]
	} else if t.unread, err = readTaken(s, t.unread, n-uint64(len(t.unread))); err != nil {
		return t, err
	}
	wrote := make(chan error, 1)
	go func() { // while this end reads, or two ends that ask would wait for each other
		var err error
		if returns && len(t.unread) > 0 {
			_, err = s.WriteTaken(t.unread)
		}
		s.CloseWrite()
		wrote <- err
	}()
	t.returned, err = readTaken(s, t.returned, toTheEnd)
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
func (l *leave) alone(t taken, why error) (taken, error) {
	s := l.session
	if !errors.Is(s.Over(), syscall.EPIPE) {
		return t, why
	}
	var err error
	if t.unread, err = readTaken(s, t.unread, toTheEnd); err == nil {
		s.Close()
	}
	return t, err
}

// toTheEnd is beyond all streams.
const toTheEnd = 1 << 63

// readUntil reads what comes from a session until done, or its end. A peer that goes on writing
// it leaves waiting, as a Read does.
func readUntil(s *session.Session, done func() bool) (all []byte) {
	b := make([]byte, 16<<10)
	for len(all) < mostTaken/2 && !done() {
		n, err := s.ReadTaken(b, done)
		all = append(all, b[:n]...)
		if err != nil {
			break
		}
	}
	return all
}

// readTaken reads so many bytes more from a session, or the rest of its stream.
func readTaken(s *session.Session, all []byte, n uint64) ([]byte, error) {
	b, had := make([]byte, min(n, 64<<10)), len(all)
	for n > 0 {
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
		case len(all)-had > mostTaken:
			return all, s.Fail(errTooMany)
		}
	}
	return all, nil
}

// leftLocked has TCP carry the connection again. in.op, out.op and mu are held.
func (l *leave) leftLocked(c *Conn, t taken) {
	st := l.session.Stats()
	both := uint64(t.back + len(t.returned)) // they went by the session, and go by TCP, too
	st.BytesSent -= both
	st.BytesReceived -= both
	if c.past == nil {
		c.past = new(Stats)
	}
	c.past.add(st)
	c.cleanUpLocked(nil)
	c.life.Left(l.why)
	c.session, c.left = nil, true
	c.in.begun.Store(false)
	if c.state.in.ended { // nobody will read it
		c.in.thrown = c.in.thrown || c.in.rest != nil
		c.in.rest = nil
		c.tcp.CloseRead() // as the descriptor is to show
	}
	c.state.left(uint64(t.back))
	c.in.deadline.toTCP(c.tcp)
	c.out.deadline.toTCP(c.tcp)
	if len(t.returned) > 0 {
		c.out.back, c.out.flushing = t.returned, true
		c.out.deadline.held = true // these bytes have been taken from the application: its deadline does not bound them
		c.tcp.SetWriteDeadline(time.Time{})
	}
	if l.asked { // for a moment, as far as is known yet
		c.use.again(c.threshold)
	} else {
		c.use.again(againAfter)
	}
}

// staysLocked has each operation find what the session has to say of its end, behind what had
// come: Reads once they turn to it again, as one that has found it before this may be late, and
// would pass over what was read meanwhile. in.op, out.op and mu are held.
func (l *leave) staysLocked(c *Conn) {
	c.state.stays()
	c.out.san.Store(l.session)
	l.session.GiveBackWrite()
}

// againAfter is for how many bytes a connection is used by TCP that the peer has called back,
// before it tries to move again.
const againAfter = 16 << 20

// flush sends what came back.
func (o *outgoing) flush(c *Conn) {
	o.op.Lock()
	n, err := c.tcp.Write(o.back)
	o.count(c, int64(n))
	o.back = nil
	c.mu.Lock()
	o.flushing = false
	o.suspended.Store(false)
	if errors.Is(err, syscall.ECONNRESET) { // which TCP tells but once, and Reads are to find it
		c.state.lost = true
	}
	o.deadline.release(c.tcp)
	ended := c.state.out.ended
	c.changedLocked()
	c.mu.Unlock()
	o.op.Unlock()
	if err == nil && ended {
		c.tcp.CloseWrite()
	}
}
