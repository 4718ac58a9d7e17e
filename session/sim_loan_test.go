package session_test

import (
	"bytes"
	"errors"
	"math/rand/v2"

	"github.com/sanconn/san/session"
)

// The simulation's actors that write and read in lent memory.

// errShortLoan means that a loan had room for only a part.
var errShortLoan = errors.New("room for a part")

// usedRoom fills lent room that is not part of the stream.
const usedRoom = 0x55

// lends decides whether the next Write or Read is one in lent memory.
func (p *party) lends(r *rand.Rand) bool { return p.lent > 0 && r.Float64() < p.lent }

// hold keeps a loan for some time, possibly until this end has been closed.
func (p *party) hold(r *rand.Rand) {
	switch r.IntN(8) {
	case 0, 1:
		p.rest(r)
	case 2:
		if p.id == p.who && (p.end == earlyClose || p.end == earlyAbort) {
			<-p.ended
			p.rest(r)
		}
	}
}

// stillThere checks that the lent memory was not changed, and that the session has not ended.
func (p *party) stillThere(what string, b, want []byte) {
	if !bytes.Equal(b, want) {
		p.errorf("%d: what %s lent was touched before the end of the loan", p.id, what)
	}
	select {
	case <-p.s.Closed():
		p.errorf("%d: closed while %s has lent memory", p.id, what)
	default:
	}
}

// writesLent is a Write of b, or a part from its front, in lent memory.
func (p *party) writesLent(r *rand.Rand, b []byte) (int, error) {
	room, err := p.s.Reserve(len(b))
	if err != nil {
		return 0, err
	}
	if len(room) == 0 || len(room) > len(b) || cap(room) > len(room) {
		p.errorf("%d: Reserve(%d) gave %d of %d bytes", p.id, len(b), len(room), cap(room))
	}
	n := len(room)
	if r.IntN(4) == 0 {
		n = r.IntN(n + 1)
	}
	fill(room[copy(room, b[:n]):], usedRoom)
	want := bytes.Clone(room)
	p.hold(r)
	p.stillThere("Reserve", room, want)
	if r.IntN(20) == 0 {
		if err := p.s.Commit(len(room) + 1 + r.IntN(2)); !errors.Is(err, session.ErrTooMuch) {
			p.errorf("%d: Commit of too much: %v", p.id, err)
		}
		return 0, errShortLoan
	}
	err = p.s.Commit(n)
	p.logf("%d: Reserve %d: %d, Commit %d: %v", p.id, len(b), len(room), n, err)
	switch {
	case err != nil:
		return 0, err
	case n < len(b):
		return n, errShortLoan
	}
	return n, nil
}

// readsLent is a Read in lent memory.
func (p *party) readsLent(r *rand.Rand) error {
	b, err := p.s.Peek()
	if err != nil {
		p.logf("%d: Peek: %v", p.id, err)
		return p.readEnd(r, err)
	}
	if len(b) == 0 || cap(b) > len(b) || !p.isNext(b) {
		p.errorf("%d: Peek gave %d of %d bytes", p.id, len(b), cap(b))
		return errWrongBytes
	}
	want := bytes.Clone(b)
	p.hold(r)
	p.stillThere("Peek", b, want)
	if r.IntN(4) == 0 {
		p.peeksAgain(want)
	}
	n := len(b)
	if r.IntN(4) == 0 {
		n = r.IntN(n + 1)
	}
	err = p.s.Discard(n)
	p.logf("%d: Peek: %d, Discard %d: %v", p.id, len(b), n, err)
	if err != nil {
		p.errorf("%d: Discard of %d of %d bytes: %v", p.id, n, len(want), err)
	}
	p.received += int64(n)
	return p.readEnd(r, nil)
}

// peeksAgain checks that a second Peek returns the same bytes as the first, unless reading has ended.
func (p *party) peeksAgain(want []byte) {
	b, err := p.s.Peek()
	if err == nil && !bytes.Equal(b, want) {
		p.errorf("%d: a second Peek gave %d other bytes than the first, %d", p.id, len(b), len(want))
	}
}

// lendsForEver takes a loan of room that is given back only after Close.
func (p *party) lendsForEver(r *rand.Rand) {
	if !p.lends(r) {
		return
	}
	room, err := p.s.Reserve(1000)
	p.logf("%d: Reserve for ever: %v", p.id, err)
	if err != nil {
		return
	}
	fill(room, usedRoom)
	want := bytes.Clone(room)
	p.giveBack = func() {
		p.rest(r)
		p.stillThere("Reserve", room, want)
		if err := p.s.Commit(len(room)); err == nil {
			p.errorf("%d: Commit after Close has sent %d bytes", p.id, len(room))
		}
	}
}
