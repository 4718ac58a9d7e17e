package sanconn

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"syscall"
	"time"
	"weak"

	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/session"
)

// takeTimeout is how long a process may leave a proposal untouched before it is withdrawn and made to
// another process.
const takeTimeout = 500 * time.Millisecond

var (
	errSilent    = fmt.Errorf("the process that was asked has not answered: %w", syscall.ETIMEDOUT)
	errBadNote   = errors.New("sanconn: a note that is not understood")
	errNoSession = fmt.Errorf("the SAN connection ended before the peer moved: %w", syscall.ECONNRESET)
)

// handle is newconn.Handle, which documents its methods.
type handle struct{ *Conn }

func (c handle) TCP() *net.TCPConn   { return c.tcp }
func (c handle) Life() newconn.Life  { return c.life }
func (c handle) CallUse(bytes int64) { c.use.again(bytes) }

func (c handle) Stays() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state.pinned && c.state.phase == onTCP
}

func (c handle) Shut() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	committed := c.state.phase == proposed || c.state.phase == onSAN // then a direction ends on the session, after the move
	return c.closed.Load() || !committed && (c.state.out.shut || c.state.in.shut)
}

func (c handle) Propose(ctx context.Context, s *session.Session, hello []byte, judge func(answer []byte) error) error {
	if !s.Limits().Ring() { // the credits for the note come with the peer's first message
		if err := s.Negotiate(ctx); err != nil {
			return errNegotiating(err)
		}
	}
	exposed, err := c.fd.check(c.Conn)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.commitLocked(s, proposed, exposed, append([]byte{newconn.NoteProposal}, hello...)); err != nil {
		return err
	}
	c.judge = judge
	go negotiate(weak.Make(c.Conn), s)
	stop := c.wakeWhenDone(ctx)
	defer stop()
	taken := time.Now().Add(takeTimeout)
	for c.state.phase == proposed && c.session == s {
		late := !taken.IsZero() && !time.Now().Before(taken)
		switch {
		case c.closed.Load(): // Close ends the session
			return newconn.ErrNoAnswer
		case (late || ctx.Err() != nil) && s.Withdraw():
			c.state.answered(false)
			c.dropLocked(newconn.ErrNotTaken)
		case ctx.Err() != nil:
			return newconn.ErrNoAnswer
		case late:
			taken = time.Time{} // the peer has the proposal, and will answer
		default:
			c.awaitLocked(taken)
		}
	}
	if c.session != s {
		return c.refused
	}
	return nil
}

// negotiate waits for the peer's part of the negotiation, however long that takes, because the peer has
// the proposal, too. It ends with the session.
func negotiate(conn weak.Pointer[Conn], s *session.Session) {
	err := s.Negotiate(context.Background())
	if err == nil || errors.Is(err, session.ErrClosed) {
		return
	}
	if c := conn.Value(); c != nil {
		// No byte of the stream has come, as a ring hands out all that the peer has sent, unless messages were lost.
		c.sessionOver(s, !errors.Is(err, session.ErrLost), errNegotiating(err))
	}
}

func errNegotiating(err error) error { return fmt.Errorf("negotiating: %w", err) }

// wakeWhenDone wakes all that wait for a change of state when ctx ends.
func (c *Conn) wakeWhenDone(ctx context.Context) (stop func() bool) {
	return context.AfterFunc(ctx, func() {
		c.mu.Lock()
		c.changedLocked()
		c.mu.Unlock()
	})
}

func (c handle) Accept(s *session.Session, answer []byte) error {
	exposed, err := c.fd.check(c.Conn)
	if err != nil {
		return err
	}
	c.mu.Lock()
	err = c.commitLocked(s, onSAN, exposed, append([]byte{newconn.NoteAnswer}, answer...))
	if err == nil {
		c.life.Moved(s.Limits().Provider)
	}
	c.mu.Unlock()
	c.out.nudge(c.Conn)
	return err
}

// commitLocked commits this end to a session. It sends the peer the note about that before anything
// else can find the session and send other notes. exposed is tcpDescriptor.check's result.
func (c *Conn) commitLocked(s *session.Session, to phase, exposed uint64, note []byte) error {
	switch {
	case c.closed.Load():
		return errClosing
	case c.state.pinned:
		return errPinned
	case c.fd.users > 0, c.fd.exposed.Load() != exposed, c.use.claimed():
		return newconn.ErrClaimed
	case c.in.rest != nil:
		return errKept
	}
	before := c.state
	if err := c.state.commit(to); err != nil {
		return err
	}
	if err := s.SendNote(note); err != nil {
		c.state = before
		return err
	}
	c.session, c.refused = s, nil
	c.steppedLocked()
	c.name(s)
	s.SetKeepAlive(c.keep)
	if resetsAtClose(c.tcp) { // set by the descriptor, perhaps, or before the Conn was made
		c.reset.Store(true)
		s.ResetAtDeath(true)
	}
	c.cleanUpLocked(s)
	return nil
}

func (c handle) Notes() func(s *session.Session, note []byte) {
	weakly := weak.Make(c.Conn)
	return func(s *session.Session, note []byte) {
		c := weakly.Value()
		switch {
		case c == nil:
		case note == nil:
			c.sessionOver(s, s.Limits().Ring() && errors.Is(s.Over(), syscall.EPIPE), errNoSession)
		case len(note) == 0:
			c.starves(s)
		default:
			if err := c.note(s, note); err != nil {
				s.Fail(err)
			}
		}
	}
}

func (c *Conn) note(s *session.Session, note []byte) error {
	if len(note) > 0 && note[0] == newconn.NoteAnswer {
		return c.answered(s, note[1:])
	}
	if len(note) != 1+8 {
		return errBadNote
	}
	switch at := binary.LittleEndian.Uint64(note[1:]); note[0] {
	case newconn.NoteBegin:
		return c.peerBegins(s, at)
	case newconn.NoteLeave:
		return c.peerLeaves(s, at)
	}
	return errBadNote
}

func positionNote(kind byte, at uint64) []byte {
	return binary.LittleEndian.AppendUint64([]byte{kind}, at)
}

// answered handles the answer to this end's proposal.
func (c *Conn) answered(s *session.Session, answer []byte) error {
	c.mu.Lock()
	if c.session != s || c.state.phase != proposed {
		c.mu.Unlock()
		return errNotAgreed
	}
	judge := c.judge
	c.mu.Unlock()
	refused := judge(answer)
	c.mu.Lock()
	if c.session != s { // boundAnswerLocked has ended the proposal meanwhile; nothing else can, as notes come one at a time
		c.mu.Unlock()
		return errNotAgreed
	}
	c.judge = nil
	c.state.answered(refused == nil)
	if refused != nil {
		c.dropLocked(refused)
		c.mu.Unlock()
		s.Abort()
		return nil
	}
	shut := c.state.out.shut
	c.life.Moved(s.Limits().Provider)
	c.steppedLocked()
	c.mu.Unlock()
	c.out.nudge(c)
	if shut {
		c.endStream(s, (*session.Session).CloseWrite)
	}
	return nil
}

// boundAnswerLocked is called when the end of either stream begins to wait for the answer to a proposal.
// After silentTimeout without an answer the proposal is given up. The peer may have moved, so from then
// on TCP's end is a cut. mu is held.
func (c *Conn) boundAnswerLocked() {
	if c.state.phase != proposed || c.state.bounded {
		return
	}
	c.state.bounded = true
	s := c.session
	giveUp := func() {
		c.mu.Lock()
		proposing := c.session == s && c.state.phase == proposed
		if proposing {
			c.state.sessionOver(false)
			c.dropLocked(errSilent)
			c.steppedLocked()
		}
		c.mu.Unlock()
		if proposing {
			s.Abort()
		}
	}
	// In two halves: a process that was stopped has time for an answer that has come meanwhile.
	half := silentTimeout.get() / 2
	time.AfterFunc(half, func() { time.AfterFunc(half, giveUp) })
}

// dropLocked gives up a proposal. mu is held.
func (c *Conn) dropLocked(why error) {
	c.session, c.judge, c.refused = nil, nil, why
	c.cleanUpLocked(nil)
	if !c.closed.Load() {
		c.in.deadline.restore(c.tcp)
		c.out.deadline.restore(c.tcp)
		if c.state.out.shut { // CloseWrite and CloseRead have left this to the end of the proposal
			c.tcp.CloseWrite()
		}
	}
	if c.state.in.shut {
		c.tcp.CloseRead()
	}
	c.changedLocked()
}

// peerBegins handles the position at which the peer's direction moves.
func (c *Conn) peerBegins(s *session.Session, at uint64) error {
	c.mu.Lock()
	err := errNotAgreed
	if c.session == s {
		err = c.state.peerBegins(at, c.in.bytes.Load())
	}
	c.steppedLocked()
	c.mu.Unlock()
	if err == nil {
		c.in.nudge(c)
	}
	return err
}

// sessionOver is called when the session has ended, after its last note. whole: all that the peer has
// sent by it has come (a ring outlives the peer's process). why: the reason for the end of a proposal on
// it.
func (c *Conn) sessionOver(s *session.Session, whole bool, why error) {
	c.mu.Lock()
	if c.session != s {
		c.mu.Unlock()
		return
	}
	proposing := c.state.phase == proposed
	ends := c.state.sessionOver(whole) && !c.closed.Load()
	if proposing {
		c.dropLocked(why)
	}
	c.steppedLocked()
	c.mu.Unlock()
	if proposing {
		s.Abort()
	}
	// A peer that waits for what this end has sent on the session, or would have sent, finds the end of
	// TCP, and then ends TCP as well.
	if ends {
		c.tcp.CloseWrite()
	}
}

// Moved implements newconn.Handle.
func (c handle) Moved(ctx context.Context) error {
	stop := c.wakeWhenDone(ctx)
	defer stop()
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		s := c.in.san.Load()
		switch err := c.state.hasMoved(s != nil && c.out.san.Load() == s); {
		case err != errLook:
			return err
		case c.closed.Load():
			return net.ErrClosed
		case c.session == nil && c.refused != nil:
			return c.refused
		case ctx.Err() != nil:
			return ctx.Err()
		}
		c.awaitLocked(time.Time{})
	}
}
