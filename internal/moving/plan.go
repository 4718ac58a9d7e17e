package moving

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"syscall"
	"time"

	"github.com/sanconn/san/internal/hello"
	"github.com/sanconn/san/internal/movers"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/reason"
	"github.com/sanconn/san/internal/tcpid"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

const (
	// FirstUse is the use in bytes after which a connection moves: 32 turns, as sanconn counts them. By
	// then a connection of round trips has lost to TCP about as much time as the move costs. So whether
	// it ends soon or goes on, it costs at most twice what was best for it. For a stream of large
	// Writes the move pays later, from 4 to 16 MiB on. See docs/PERFORMANCE.md, "When it pays to move".
	FirstUse = 1 << 20

	// MoreUse is the factor by which the use for the next attempt grows after each failure. A busy
	// connection soon fails a few times, while its peer is stopped or out of descriptors for seconds,
	// although it gains most from a move. A terabyte of use makes ten attempts.
	MoreUse = 4
)

// Plan is how a dialer's connections move.
type Plan struct {
	Choice
	AtOnce bool // they move without having been used
	Either bool // this may be the accepted end, for which it is no failure that no process is found
}

// Begin makes a Conn around a TCP connection whose dial began at the time began.
func (p *Plan) Begin(tcp *net.TCPConn, began time.Time) *sanconn.Conn {
	l := &Life{dialed: true, Plan: p}
	l.why.Store(unused)
	if slices.ContainsFunc(p.Providers, func(by Provider) bool { return by.NeedsStamp(tcp, p.Settings) }) {
		l.proof.Dialed(tcp, began)
	}
	c := newconn.New(tcp, newconn.Config{Threshold: FirstUse, Life: l})
	Count(func(n *Counters) { n.Dialed[TCP]++ })
	return c.(*sanconn.Conn)
}

// MoveAtOnce moves a connection before it has been used, if the plan is AtOnce.
func (p *Plan) MoveAtOnce(c *sanconn.Conn) {
	if p.AtOnce {
		h := newconn.HandleOf(c)
		h.CallUse(newconn.Never)
		p.moveLater(h, true, false)
	}
}

// move tries each provider in turn until the connection moves. Otherwise it returns the first
// provider's reason, as that one is preferred, or the reason of a provider by which the other end has
// refused. If a provider has found the other end's host, but the other end has not been accepted yet,
// no further provider is tried: a connection within a host would go through the NIC.
func (p *Plan) move(ctx context.Context, h newconn.Handle) *session.Unavailable {
	if lifeOf(h).proof.Guessed() {
		return errTooManyGuesses
	}
	var why *session.Unavailable
	for _, provider := range p.Providers {
		err := provider.Move(ctx, h, p.Settings)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, newconn.ErrNoAnswer), // it may still move, and to no other provider
			errors.Is(err, newconn.ErrClaimed), // so for every provider
			errors.Is(err, hello.ErrNotAccepted), errors.Is(err, hello.ErrUnknown), errors.Is(err, hello.ErrUndecided), errors.Is(err, newconn.ErrNotTaken):
			return reason.Of(err)
		case why == nil, reason.Is(err, session.ReasonRefused): // a refused connection is not tried again
			why = reason.Of(err)
		}
	}
	return why
}

// moveOpen is move for a dial that waits. It fails for good if the other end has closed or reset the
// connection meanwhile.
func (p *Plan) moveOpen(ctx context.Context, h newconn.Handle) *session.Unavailable {
	why := p.move(ctx, h)
	if why == nil || !reason.Is(why, session.ReasonNoListener, session.ReasonNotServed, session.ReasonTimeout) || errors.Is(why, newconn.ErrNoAnswer) {
		return why
	}
	if open, err := tcpid.IsOpen(h.TCP()); err != nil || open {
		return why
	}
	return &session.Unavailable{Reason: session.ReasonStays, Err: fmt.Errorf("the other end has ended the TCP connection: %w; before that: %v", syscall.ECONNRESET, why)}
}

// MoveNow moves a connection that must not be used before. It waits for the connection's turn, and
// until its other end has been accepted.
func (p *Plan) MoveNow(ctx context.Context, c *sanconn.Conn) *session.Unavailable {
	h := newconn.HandleOf(c)
	done := make(chan *session.Unavailable, 1)
	j := p.inTurn(ctx, h, p.moveOpen, true, func(why *session.Unavailable) { done <- why })
	select {
	case why := <-done:
		if why == nil {
			if err := h.Moved(ctx); err != nil {
				why = reason.Of(err)
			}
		}
		return why
	case <-ctx.Done(): // the job ends then, too
		if why := j.Passing(); why != nil {
			return &session.Unavailable{Reason: why.Reason, Err: fmt.Errorf("%w: %w", ctx.Err(), why.Err)}
		}
		return reason.Of(ctx.Err())
	}
}

// moveLater moves a connection in the background. atOnce: it waits until the other end has been
// accepted. urgent: likewise, as the program waits for the move; its failure does not make later
// attempts rarer.
func (p *Plan) moveLater(h newconn.Handle, atOnce, urgent bool) {
	l := lifeOf(h)
	p.inTurn(context.Background(), h, p.move, atOnce || urgent, func(why *session.Unavailable) {
		if why == nil {
			l.tries.Store(0)
			return
		}
		if h.Shut() { // then the attempt shows nothing about the other end, which may have gone
			if l.why.Load() != unused {
				return
			}
			why = ErrShut
		}
		if errors.Is(why, newconn.ErrClaimed) {
			h.CallUse(FirstUse)
			return
		}
		if p.Either && why.Reason == session.ReasonNoListener {
			l.why.CompareAndSwap(cmp.Or(l.own, unused), notProposed) // the reason that an accepted end has
		} else {
			l.own = why
			l.Failed(why)
		}
		if why.Reason != session.ReasonRefused {
			if !urgent {
				l.tries.Add(1)
			}
			use := int64(FirstUse)
			for range l.tries.Load() {
				use *= MoreUse
			}
			h.CallUse(use)
		}
	})
}

// Queue schedules all moves: those that a dial waits for and those in the background.
var Queue movers.Scheduler

// inTurn calls move for a connection when it is the connection's turn.
func (p *Plan) inTurn(ctx context.Context, h newconn.Handle, move func(context.Context, newconn.Handle) *session.Unavailable, waits bool, done func(*session.Unavailable)) *movers.Job {
	j := &movers.Job{
		Peer:      h.TCP().RemoteAddr().(*net.TCPAddr).AddrPort(),
		Move:      func(ctx context.Context) *session.Unavailable { return move(ctx, h) },
		Done:      done,
		Ctx:       ctx,
		Remaining: p.Settings.Attempt,
		Waits:     waits,
	}
	Queue.Add(j)
	return j
}
