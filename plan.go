package san

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/sanconn/san/internal/hello"
	"github.com/sanconn/san/internal/movers"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/reason"
	"github.com/sanconn/san/sanconn"
)

const (
	// firstUse is for how much use a connection by TCP moves: 32 turns, as sanconn counts them.
	// By then it has cost about as much more than on a SAN as the move costs, so one that ends
	// soon, or goes on, costs at most twice what was best for it. See docs/PERFORMANCE.md, "When
	// it pays to move".
	firstUse = 1 << 20

	// A move that fails is tried again after four times as much use, this often.
	moreUse   = 4
	mostTries = 4

	// moveTimeout bounds an attempt, requireTimeout one for which the program waits, as there
	// is nothing else to do: it must not fail only because processors are busy.
	moveTimeout    = 2 * time.Second
	requireTimeout = 10 * time.Second
)

// plan is how a dialer's connections move.
type plan struct {
	choice
	atOnce bool
	either bool // it may as well be the accepted end, for which it is no failure that nobody is found
}

// begin makes a connection of one that has been dialed by TCP; began: since when.
func (p *plan) begin(tcp *net.TCPConn, began time.Time) (*sanconn.Conn, newconn.Handle, *life) {
	l := &life{dialed: true, plan: p}
	l.why.Store(unused)
	if slices.ContainsFunc(p.providers, func(by provider) bool { return by.needsStamp(tcp, p.settings) }) {
		l.proof.Dialed(tcp, began)
	}
	c, h := newconn.New(tcp, newconn.Config{Threshold: firstUse, Life: l})
	count(func(n *Counters) { n.Dialed[providerTCP]++ })
	return c.(*sanconn.Conn), h, l
}

// moveAtOnce moves a connection without waiting until it has been used, if that is wanted.
func (p *plan) moveAtOnce(h newconn.Handle, l *life) {
	if p.atOnce {
		h.CallUse(never)
		p.moveLater(h, l, true)
	}
}

// never is more than any connection is used for.
const never = int64(1) << 60

// move tries each provider in turn. It returns why the first, which is preferred, does not
// carry the connection, if none does; or, if the other end refuses one, that. One that has found
// the other end's host, and may carry it as soon as that has been accepted, is the last: or a
// connection within a host went by its NIC.
func (p *plan) move(ctx context.Context, h newconn.Handle, l *life) *Unavailable {
	if l.proof.Guessed() {
		return errTooManyGuesses
	}
	var why *Unavailable
	for _, provider := range p.providers {
		err := provider.move(ctx, h, p.settings)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, newconn.ErrNoAnswer), // it may move yet, and nowhere else
			errors.Is(err, newconn.ErrClaimed), // whoever is tried
			errors.Is(err, hello.ErrNotAccepted), errors.Is(err, hello.ErrUnknown), errors.Is(err, hello.ErrUndecided), errors.Is(err, newconn.ErrNotTaken):
			return reason.Of(err)
		case why == nil, reason.Is(err, ReasonRefused): // it is not tried again
			why = reason.Of(err)
		}
	}
	return why
}

// moveNow moves a connection that must not be used before, in its turn and once its other end
// has been accepted.
func (p *plan) moveNow(ctx context.Context, h newconn.Handle, l *life) *Unavailable {
	done := make(chan *Unavailable, 1)
	j := p.inTurn(ctx, h, l, true, func(why *Unavailable) { done <- why })
	select {
	case why := <-done:
		if why == nil {
			if err := h.Moved(ctx); err != nil {
				why = reason.Of(err)
			}
		}
		return why
	case <-ctx.Done(): // the job ends with it
		if why := j.Passing(); why != nil {
			return &Unavailable{Reason: why.Reason, Err: fmt.Errorf("%w: %w", ctx.Err(), why.Err)}
		}
		return reason.Of(ctx.Err())
	}
}

// moveLater moves a connection in the background. atOnce: as soon as its other end has been
// accepted.
func (p *plan) moveLater(h newconn.Handle, l *life, atOnce bool) {
	p.inTurn(context.Background(), h, l, atOnce, func(why *Unavailable) {
		if why == nil {
			return
		}
		if h.Ended() { // so nothing has been found out of its other end, which may have gone
			if l.why.Load() != unused {
				return
			}
			why = errEnded
		}
		if errors.Is(why, newconn.ErrClaimed) {
			h.CallUse(firstUse)
			return
		}
		if !p.either || why.Reason != ReasonNoListener {
			l.failed(why)
		}
		if n := l.tries.Add(1); n < mostTries && why.Reason != ReasonRefused {
			use := int64(firstUse)
			for range n {
				use *= moreUse
			}
			h.CallUse(use)
		}
	})
}

// queue has connections move, those that a dial waits for and those in the background.
var queue movers.Pool

// inTurn moves a connection when it is its turn.
func (p *plan) inTurn(ctx context.Context, h newconn.Handle, l *life, waits bool, done func(*Unavailable)) *movers.Job {
	j := &movers.Job{
		Peer:  h.TCP().RemoteAddr().(*net.TCPAddr).AddrPort(),
		Move:  func(ctx context.Context) *Unavailable { return p.move(ctx, h, l) },
		Done:  done,
		Ctx:   ctx,
		Left:  p.settings.attempt,
		Waits: waits,
	}
	queue.Add(j)
	return j
}
