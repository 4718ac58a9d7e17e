package shm

import (
	"context"
	"fmt"
	"net/netip"
	"runtime"
	"sync/atomic"

	"github.com/sanconn/san/provider/shm/internal/ring"
	"github.com/sanconn/san/session"
)

// slot is a connection's place in a segment. The dialing end hands slots out, and reuses
// one only when both sides have retired from it.
type slot struct {
	number  int
	control *slotControl
	rings   [2][]byte
	ep      atomic.Pointer[endpoint] // until it retires
	left    atomic.Uint64            // bytes of unused pages that the last connection left in this end's ring; or cooling
	warm    atomic.Int32             // ticks for which they stay
	lame    bool                     // dialing end, guarded by the link's mu: this end is done, the peer may not be
}

// warmTicks is how many ticks a ring keeps the pages that a connection has left, for the
// next one. Programs that connect for each request would otherwise fault in every page
// again, which takes twice as long as the request.
const warmTicks = 2

// cooling is the value of left while the janitor gives the pages back.
const cooling = ^uint64(0)

// connect makes a connection from the dialing end. bound is -1, or the socket that holds
// the connection's address; on success the endpoint owns it.
func (l *link) connect(ctx context.Context, bound int, dialed netip.AddrPort) (*endpoint, error) {
	s, err := l.take(ctx)
	if err != nil {
		return nil, err
	}
	answer := make(chan uint8, 1)
	l.mu.Lock()
	l.pending[uint32(s.number)] = answer
	l.mu.Unlock()

	m := &message{kind: msgConnect, number: uint32(s.number), addr: dialed}
	if bound >= 0 {
		err = l.post(ctx, m, bound)
	} else {
		err = l.post(ctx, m)
	}
	if err != nil {
		l.answered(m.number, codeRefused) // the peer was never asked
		l.leave()
		return nil, linkError(err)
	}
	select {
	case code := <-answer:
		switch code {
		case codeOK:
		case codeClosed: // another listener may have taken over the socket
			l.shut.Store(true)
			l.leave()
			return nil, fmt.Errorf("%w: %w", errLinkGone, codeError(code))
		default:
			l.leave()
			return nil, codeError(code)
		}
		e := newEndpoint(l, s, bound)
		if !l.attach(e) {
			e.forgo()
			l.leave()
			return nil, errLinkGone
		}
		l.leave() // attach counted it again
		return e, nil
	case <-l.gone:
		err = errLinkGone
	case <-ctx.Done():
		err = &session.Unavailable{Reason: session.ReasonTimeout, Err: ctx.Err()}
	}
	l.mu.Lock()
	if len(answer) == 0 || <-answer == codeOK {
		// If the peer accepts later, it finds the connection aborted. If it already
		// has, the bell below tells it.
		s.control.state[0].v.Store(stateAborted) // and not held
		s.lame = true
	}
	l.mu.Unlock()
	l.ring(s.number, session.RecvReady|session.SendReady)
	l.leave()
	return nil, err
}

// answered passes on the peer's answer about a slot, and frees the slot if it refused.
func (l *link) answered(number uint32, code uint8) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	answer := l.pending[number]
	if answer == nil {
		return false
	}
	delete(l.pending, number)
	if code != codeOK {
		l.vacate((*l.slots.Load())[number])
	}
	answer <- code // never blocks: buffered
	return true
}

// attach lets the bell find an endpoint, and counts it. It fails if the link is dead.
func (l *link) attach(e *endpoint) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.dead {
		return false
	}
	l.live++
	e.slot.ep.Store(e)
	if e.out.Pages() > ring.Start {
		l.grew = true
		l.startTimer()
	}
	return true
}

// detach removes an endpoint that has retired from its slot.
func (l *link) detach(s *slot) {
	l.ring(s.number, session.RecvReady|session.SendReady) // the slot may be free now
	l.mu.Lock()
	defer l.mu.Unlock()
	l.live--
	if s.left.Load() > ring.Start {
		l.grew = true // in case a running tick is past cool
		l.startTimer()
	}
	if l.side == 0 {
		s.lame = true
		l.reap(s)
	}
	l.rest()
}

// reap frees a slot that both sides are done with. It is called with mu held.
func (l *link) reap(s *slot) {
	if !s.lame || l.pending[uint32(s.number)] != nil || !s.control.state[1].retired() {
		return
	}
	l.vacate(s)
}

// vacate frees a slot. It is the first to be used again. mu is held.
func (l *link) vacate(s *slot) {
	s.lame = false
	l.free = append(l.free, s)
}

// leave keeps the pages of a ring, of which n bytes may have memory, for the next
// connection. They count in the budget until the janitor gives them back.
func (s *slot) leave(n uint64) {
	s.warm.Store(warmTicks)
	s.left.Store(n)
}

// inherit takes over what is left. It waits for a janitor that is giving it back, which
// takes less than a millisecond.
func (s *slot) inherit() uint64 {
	for {
		n := s.left.Load()
		if n == cooling {
			runtime.Gosched()
		} else if s.left.CompareAndSwap(n, 0) {
			return n
		}
	}
}

// cool gives back the pages that connections left in this end's rings warmTicks ago. It
// reports whether it has to run again.
func (l *link) cool() (again bool) {
	for _, s := range *l.slots.Load() {
		n := s.left.Load()
		if n <= ring.Start {
			continue
		}
		if s.warm.Add(-1) > 0 || !s.left.CompareAndSwap(n, cooling) {
			again = true
			continue
		}
		// No connection begins here now: inherit waits. The peer may still be reading
		// what the last one sent, or hold it; a peer that lies about its progress loses it.
		unread := !l.ended() && !s.control.state[1-l.side].retired() && !s.control.ring[l.side].Drained()
		if !unread && giveBack(s.rings[l.side], n) {
			n = 0
		}
		s.left.Store(n)
		again = again || n > 0
	}
	return again
}

// take returns a fresh slot, from a new segment if need be, and counts it as live.
func (l *link) take(ctx context.Context) (*slot, error) {
	for {
		l.mu.Lock()
		if l.dead {
			l.mu.Unlock()
			return nil, errLinkGone
		}
		if len(l.free) == 0 {
			// The peer may be done with some, though its bell was not handled yet.
			for _, s := range *l.slots.Load() {
				l.reap(s)
			}
		}
		if n := len(l.free); n > 0 {
			s := l.free[n-1]
			l.free = l.free[:n-1]
			l.live++
			l.mu.Unlock()
			s.reset()
			return s, nil
		}
		l.live++ // so that the link is not torn down meanwhile
		l.mu.Unlock()
		err := l.extend(ctx)
		l.leave()
		if err != nil {
			return nil, err
		}
	}
}

// reset prepares a slot for its next connection.
func (s *slot) reset() {
	for dir := range s.control.ring {
		s.control.ring[dir].Reset()
	}
	s.control.state[0].v.Store(stateOpen)
	s.control.state[1].v.Store(stateOpen)
}
