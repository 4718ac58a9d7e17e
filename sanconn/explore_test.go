package sanconn

import (
	"flag"
	"fmt"
	"hash/maphash"
	"math/rand/v2"
	"strings"
	"syscall"
	"testing"
	"unicode"
)

var (
	exploreMore  = flag.Bool("conn.explore", false, "explore all orders, which takes longer")
	exploreSeeds = flag.Uint64("conn.walks", 20_000, "random walks through larger scenarios")
	exploreFirst = flag.Uint64("conn.walk", 0, "the first one's seed; 0: a random one")
)

// The explorer goes through all orders in which two ends, each with a handover, and what connects them
// can act: TCP and a session, each with a queue in each direction, and the programs at both ends. Its
// ends do what Conn does, step by step, but with plain values only. So all states can be enumerated, and
// mutants of a step can be tried.
//
// It checks that each reader gets the bytes that were written, in order, that a stream ends with io.EOF
// only if it is complete, and that nothing waits when no step is possible any more.

// scenario limits what the programs may do.
type scenario struct {
	writes    [2]int  // bytes that each end writes before it ends its stream
	proposals int     // by end 0
	either    bool    // … or 1
	asks      [2]int  // how often each end asks for the way back to TCP
	close     [2]bool // it may close at any time
	kill      [2]bool // it may die at any time
	lossy     bool    // not a ring: when a process dies, bytes in flight on the session are lost
	cut       bool    // a session may fail at any time, with the loss of bytes in flight
	files     [2]bool // asking is by File …
	controls  [2]bool // … or Control
	starve    bool    // … or a Write that starves
	requires  [2]bool // the policy Require: the program gets the connection only once it has moved
	withdraws bool    // a proposal that the peer has not taken may be withdrawn
	bounded   bool    // the way back reads only a part of what has come, until it knows how much is the peer's
}

// mutant is a fault that the explorer has to find.
type mutant int

const (
	sound mutant = iota
	beginsBeforeAnswer
	leavesAlone
	readsTheKeptBeforeTCP
	writesBeforeWhatCameBack
	takesReaderLate
	takesAnEndWhileProposed
	closesWithoutBegin
	forgetsWhatMayBeLost
	turnsAtOnce
	movesWithBytesKept
	keepsTCPOpen
	forgetsWhatWasReturned
	goesOnBeforeThePeerHasAll
	takesTheEndForALoss
	passesTheLastNotesBy
	waitsForWhoHasGone
	agreesWhileProposed
	forgetsAResetOfFlush
	forgetsAResetOfRead
	movesThoughPinned
	movesBesideControl
	believesItsCounts
	countsWhatIsReadElsewhere
	turnsBeforeTheKept
	withdrawsWhatWasTaken
	hasMovedOnceItLeaves
	showsTheEndOfAReset

	mutants
)

const mostSessions = 4 // one more than proposals

// model is a state of the two ends and what is between them.
type model struct {
	ends [2]modelEnd
	tcp  [2]string               // from each end: bytes, '$' for its end, '!' for a reset
	ses  [mostSessions][2]string // from each end, by session: bytes, notes and ends in flight
	buf  [mostSessions][2]string // of these, bytes and the stream's end that have come and were not read
	last int                     // the newest session
	cut  int                     // the session that has failed
}

// modelEnd is one end. Its bytes are 'a', 'b' and so on.
type modelEnd struct {
	h           handover
	session     int // 0: none
	wrote, read int
	tcpIn       int
	tcpOut      int
	sesOut      int
	sesIn       int
	turned      bool
	shut        bool // by CloseWrite, or because a Write has failed
	failed      bool // … because a Write has failed
	sesShut     bool // the stream on the session has ended
	closed      bool
	aborts      bool // it has closed or died with bytes unread, or because it has not moved
	resets      bool // … and TCP had not ended before
	told        bool // a Write has returned the reset
	elsewhere   bool // the program has had the descriptor
	lacks       bool // the reader lacks bytes that were returned to the peer
	dead        bool
	end         byte // what the reader got in the end: 'E' io.EOF, '!' an error
	asks        int
	leave       int // 1: leave was sent, 2: what was unread is returned or kept, 3: leave cannot be sent, as the session has ended
	inVain      bool
	took        string // bytes that leave has taken from the session
	rest        string
	restAt      int
	front       string
	fd          use
	rawIn       int // bytes by the descriptor, which are not counted
	rawOut      int
	awaits      bool   // the program waits in Moved
	begins      bool   // a direction has moved
	early       bool   // bytes went by TCP before a direction has moved
	unread      string // what is being returned
	returned    int    // how many bytes were returned
	back        string // what flush has to send
}

// use is the program's use of TCP's descriptor.
type use byte

const (
	unused  use = iota
	wanted      // the program waits until TCP carries the connection
	lentOut     // Control has it
	kept        // File has returned it
)

// explorer explores a scenario.
type explorer struct {
	scenario
	mutant
	seen map[uint64]struct{} // hashes of the states: a collision is rarer than a fault in the explorer
	most int                 // bound of the number of states
}

// found describes a fault.
type found string

func (x *explorer) run() (problem string, states int) {
	x.seen = make(map[uint64]struct{})
	hash := maphash.MakeSeed()
	stack := []model{x.first()}
	defer func() {
		if p := recover(); p != nil {
			f, ok := p.(found)
			if !ok {
				panic(p)
			}
			problem, states = string(f), len(x.seen)
		}
	}()
	for len(stack) > 0 && len(x.seen) < x.most {
		m := stack[len(stack)-1]
		stack = stack[:len(stack)-1]
		rests := true // no step is possible other than asking for the way back, or giving up
		n := m
		for what := range m.steps() {
			if !x.step(&n, what) {
				continue
			}
			rests = rests && ((what-1)/2 == asks || (what-1)/2 == givesUp)
			h := maphash.Comparable(hash, n)
			if _, ok := x.seen[h]; !ok {
				x.seen[h] = struct{}{}
				stack = append(stack, n)
			}
			n = m
		}
		if rests {
			x.final(m)
		}
	}
	return "", len(x.seen)
}

func (x *explorer) first() (m model) {
	for i := range m.ends {
		m.ends[i].asks, m.ends[i].awaits = x.asks[i], x.requires[i]
	}
	return m
}

func (m *model) fail(format string, args ...any) {
	panic(found(fmt.Sprintf(format, args...) + fmt.Sprintf("\n%+v", *m)))
}

// final checks a state in which no step is possible any more.
func (x *explorer) final(m model) {
	broken, died := m.cut > 0, m.cut > 0
	for _, e := range m.ends {
		broken = broken || e.dead || e.closed || e.awaits
		died = died || e.dead
	}
	for i, e := range m.ends {
		p := m.ends[1-i]
		switch {
		case e.dead:
		case e.h.phase == leaving, e.h.phase == proposed:
			m.fail("end %d waits on %v", i, e.h.phase)
		case e.fd == wanted:
			m.fail("end %d waits for the descriptor on %v", i, e.h.phase)
		case e.awaits && e.h.phase != onTCP:
			m.fail("end %d waits until it has moved on %v", i, e.h.phase)
		case e.closed, e.awaits, p.awaits:
		case e.end == 0:
			m.fail("the reader of end %d waits", i)
		case !broken && (e.end != 'E' || e.read != p.wrote || p.failed):
			m.fail("end %d reads %d of %d, and %c", i, e.read, p.wrote, e.end)
		case !died && p.closed && !p.aborts && e.end != 'E':
			m.fail("end %d reads %d of %d, and %c; the peer has closed in order", i, e.read, p.wrote, e.end)
		case p.dead && !p.aborts && !x.lossy && m.cut == 0 && e.end != 'E' && !e.lacks: // with lacks, bytes that were returned to the dead peer are lost
			m.fail("end %d reads %d of %d, and %c; the peer has died in order", i, e.read, p.wrote, e.end)
		}
	}
}

// endSteps are the steps of one end, in addition to deliver.
var endSteps = [...]func(*explorer, *model, int) bool{
	(*explorer).write, (*explorer).begin, (*explorer).closeWrite, closes: (*explorer).doClose,
	(*explorer).readOne, (*explorer).turn, asks: (*explorer).ask, (*explorer).take, (*explorer).finish, (*explorer).flush,
	dies: (*explorer).die, (*explorer).proposal, (*explorer).withdraw, (*explorer).gather,
	(*explorer).have, (*explorer).release, (*explorer).rawWrite, (*explorer).rawRead, (*explorer).moved, givesUp: (*explorer).giveUp,
}

const closes, asks, dies, givesUp = 3, 6, 10, 19

// steps returns the number of steps, not all of which are possible.
func (m *model) steps() int { return 1 + 2*(len(endSteps)+m.last) }

// step takes a step, if it is possible now. Otherwise it leaves the state unchanged.
func (x *explorer) step(m *model, what int) bool {
	if what == 0 {
		return x.fail(m)
	}
	i, what := what%2, (what-1)/2
	switch {
	case m.ends[i].dead:
		return false
	case what < len(endSteps):
		return endSteps[what](x, m, i)
	}
	return x.deliver(m, i, what-len(endSteps)+1)
}

// say sends something by the session, unless that has failed.
func (m *model) say(i int, what string) {
	if s := m.ends[i].session; s != m.cut {
		m.ses[s][i] += what
	}
}

// ended reports whether end i has ended its TCP stream.
func (m *model) ended(i int) bool {
	return strings.HasSuffix(m.tcp[i], "$") || strings.HasSuffix(m.tcp[i], "!")
}

// fin ends TCP's stream from end i.
func (m *model) fin(i int) {
	if !m.ended(i) {
		m.tcp[i] += "$"
	}
}

// holds reports whether an end has bytes that were taken from a carrier and not read.
func (e *modelEnd) holds() bool { return e.front != "" || e.rest != "" }

// closeTCP ends TCP in both directions. A reset may overtake what was sent before it.
func (m *model) closeTCP(i int, reset bool) {
	unread := m.ends[i].holds() || strings.TrimRight(m.tcp[1-i], "$!") != ""
	if !reset && !unread {
		m.fin(i)
		return
	}
	m.ends[i].aborts = true
	if !m.ended(i) {
		m.tcp[i], m.ends[i].resets = "!", true
	}
}

// findsReset reports whether TCP was reset by the peer, which an end finds only once.
func (m *model) findsReset(i int) bool {
	b, is := strings.CutSuffix(m.tcp[1-i], "!")
	if is {
		m.tcp[1-i] = b + "$"
	}
	return is
}

func at(n int) string { return string(rune('a' + n)) }

// crosses is the model of beginLocked.
func (m *model) crosses(i int) {
	if e := &m.ends[i]; !e.h.out.begun {
		e.begins = true
		e.h.begin(uint64(e.tcpOut))
		m.say(i, "B"+at(e.tcpOut))
	}
}

func (x *explorer) write(m *model, i int) bool {
	e := &m.ends[i]
	if e.awaits || e.wrote == x.writes[i] || e.shut || e.closed || e.h.phase == leaving || e.h.phase == flushing && x.mutant != writesBeforeWhatCameBack {
		return false
	}
	b := at(e.wrote)
	if e.h.phase == onSAN {
		m.crosses(i)
		if e.h.over {
			e.shut, e.failed, e.h.out.shut = true, true, true
			return true
		}
		m.say(i, b)
		e.sesOut++
	} else if m.findsReset(i) {
		e.shut, e.failed, e.told, e.h.out.shut = true, true, true, true
		return true
	} else {
		m.tcp[i] += b
		e.tcpOut++
		e.early = !e.begins
	}
	e.wrote++
	return true
}

func (x *explorer) begin(m *model, i int) bool {
	e := &m.ends[i]
	if e.h.phase != onSAN || e.h.out.begun || e.closed {
		return false
	}
	m.crosses(i)
	return true
}

// endStream is the model of endStream and the session's CloseWrite.
func (m *model) endStream(i int) {
	m.crosses(i)
	if e := &m.ends[i]; !e.sesShut {
		e.sesShut = true
		m.say(i, "E")
	}
}

func (x *explorer) closeWrite(m *model, i int) bool {
	e := &m.ends[i]
	if e.awaits || e.wrote < x.writes[i] || e.shut || e.closed {
		return false
	}
	e.shut, e.h.out.shut = true, true
	switch e.h.phase {
	case onTCP:
		m.fin(i)
	case onSAN:
		m.endStream(i)
	}
	return true
}

func (x *explorer) doClose(m *model, i int) bool {
	e := &m.ends[i]
	if e.awaits || !x.close[i] || e.closed {
		return false
	}
	e.closed, e.fd = true, unused
	switch e.h.phase {
	case onTCP:
		m.closeTCP(i, false)
	case onSAN, proposed:
		if x.mutant != closesWithoutBegin {
			m.crosses(i)
		}
		if m.buf[e.session][1-i] != "" || e.holds() || !e.turned && strings.TrimRight(m.tcp[1-i], "$!") != "" {
			m.say(i, "R")
			e.aborts = true
		} else {
			m.say(i, "C")
		}
		m.closeTCP(i, false)
	}
	return true
}

// die ends the end's process.
func (x *explorer) die(m *model, i int) bool {
	if !x.kill[i] {
		return false
	}
	m.ends[i].dead, m.ends[i].front, m.ends[i].rest = true, "", ""
	m.closeTCP(i, false)
	for s := 1; s <= m.last; s++ {
		switch {
		case x.lossy:
			m.ses[s][i] = "Y"
		case s == m.ends[i].session && strings.ContainsFunc(m.ses[s][1-i]+m.buf[s][1-i], unicode.IsLower):
			m.ends[i].aborts = true
			m.ses[s][i] += "Y"
		default:
			m.ses[s][i] += "X"
		}
	}
	return true
}

// fail ends the newest session.
func (x *explorer) fail(m *model) bool {
	if !x.cut || m.cut > 0 || m.last == 0 {
		return false
	}
	m.cut = m.last
	for i := range m.ends {
		m.ses[m.last][i] = "Y"
	}
	return true
}

func (x *explorer) proposal(m *model, i int) bool {
	if i == 1 && !x.either || m.last == x.proposals || m.ends[i].awaits && m.last > 0 || !x.commit(m, i, proposed, m.last+1) {
		return false
	}
	m.last++
	m.say(i, "O")
	if m.ends[1-i].dead {
		m.ses[m.last][1-i] = "X" // no session can be made
	}
	return true
}

// withdraw is the model of Propose when its time is over, or the peer does nothing.
func (x *explorer) withdraw(m *model, i int) bool {
	e := &m.ends[i]
	if !x.withdraws || e.h.phase != proposed || e.closed || m.ses[e.session][i] != "O" && x.mutant != withdrawsWhatWasTaken {
		return false
	}
	if m.ses[e.session][i] == "O" {
		m.ses[e.session][i] = ""
	} else {
		m.say(i, "Y")
	}
	e.h.answered(false)
	e.session = 0
	if e.shut {
		m.fin(i)
	}
	return true
}

// commit is the model of commitLocked.
func (x *explorer) commit(m *model, i int, to phase, s int) bool {
	e := &m.ends[i]
	switch {
	case e.closed,
		e.rest != "" && x.mutant != movesWithBytesKept,
		e.fd != unused && e.fd != kept && x.mutant != movesBesideControl,
		e.rawIn+e.rawOut > 0 && x.mutant != believesItsCounts:
		return false
	}
	if x.mutant == movesThoughPinned && e.h.phase == onTCP {
		e.h.pinned = false
	}
	if x.mutant == agreesWhileProposed && e.h.phase == proposed && to == onSAN {
		e.h.phase = onTCP
	}
	if e.h.commit(to) != nil {
		return false
	}
	e.session, e.sesIn, e.sesOut = s, 0, 0
	e.sesShut, e.leave = false, 0
	return true
}

// readOne reads a byte or an end.
func (x *explorer) readOne(m *model, i int) bool {
	e := &m.ends[i]
	if e.end != 0 || e.closed || e.awaits {
		return false
	}
	if e.h.phase == leaving && !(x.mutant == takesReaderLate && e.turned && e.leave == 1) {
		return e.leave == 1 && x.looks(m, i) // a Read that was in TCP
	}
	if e.turned {
		b := &m.buf[e.session][1-i]
		switch {
		case *b == "":
			return false
		case (*b)[0] == 'E' || (*b)[0] == '!':
			m.readsEnd(i, (*b)[0])
			return true
		}
		m.got(i, (*b)[0])
		*b = (*b)[1:]
		e.sesIn++
		return true
	}
	if e.rest != "" && e.front == "" && (e.tcpIn == e.restAt || x.mutant == readsTheKeptBeforeTCP) {
		e.front, e.rest = e.rest, ""
	}
	if e.front != "" {
		m.got(i, e.front[0])
		e.front = e.front[1:]
		return true
	}
	b := &m.tcp[1-i]
	switch {
	case *b == "":
		return false
	case (*b)[0] == '$', (*b)[0] == '!':
		switch e.h.endOf(uint64(e.tcpIn)) {
		case endIsEnd:
			how := byte('E')
			if m.findsReset(i) {
				how = '!'
			}
			m.readsEnd(i, how)
		case endIsCut:
			e.lacks = e.tcpIn < int(e.h.least)
			m.readsEnd(i, '!')
		case endOpen:
			if x.mutant == takesAnEndWhileProposed && (*b)[0] == '$' {
				m.readsEnd(i, 'E')
				return true
			}
			return x.looks(m, i) // until its deadline
		case endTurns:
			return false // the step turn does that
		}
		return true
	case e.h.turns(uint64(e.tcpIn)):
		return false
	}
	m.got(i, (*b)[0])
	*b = (*b)[1:]
	e.tcpIn++
	return true
}

// got handles a byte that was read.
func (m *model) got(i int, b byte) {
	e := &m.ends[i]
	if want := at(e.read)[0]; b != want {
		m.fail("end %d reads %c, not %c", i, b, want)
	}
	e.read++
}

// readsEnd handles an end that was read.
func (m *model) readsEnd(i int, how byte) {
	e, p := &m.ends[i], &m.ends[1-i]
	e.end = how
	switch {
	case how != 'E' || e.told || e.elsewhere && (p.dead || m.cut > 0): // see readElsewhere
	case e.read != p.wrote:
		m.fail("end %d reads %d of %d, and io.EOF", i, e.read, p.wrote)
	case p.resets && (!p.shut || p.failed) && !(p.dead && e.turned): // the session's end is that of the stream which came by it
		m.fail("end %d reads io.EOF, and the peer was reset", i)
	}
}

// looks is a Read that finds a reset, and does not return it.
func (x *explorer) looks(m *model, i int) bool {
	if e := &m.ends[i]; m.tcp[1-i] != "!" || e.turned || e.holds() {
		return false
	}
	m.findsReset(i)
	if x.mutant != forgetsAResetOfRead {
		m.ends[i].h.tcpFailed(syscall.ECONNRESET)
	}
	return true
}

func (x *explorer) turn(m *model, i int) bool {
	e := &m.ends[i]
	if e.turned || e.session == 0 || e.holds() && x.mutant != turnsBeforeTheKept || !e.h.in.begun {
		return false
	}
	if e.h.phase != onSAN {
		return false
	}
	if e.h.beyond(uint64(e.tcpIn)) {
		m.fail("end %d has read more of TCP than there is", i)
	}
	if !e.h.turns(uint64(e.tcpIn)) && x.mutant != turnsAtOnce {
		return false
	}
	e.turned = true
	return true
}

// ended is the model of sessionOver.
func (x *explorer) ended(m *model, i int, whole bool) {
	e := &m.ends[i]
	wasProposed := e.h.phase == proposed
	lost := e.h.lost
	over := e.h.sessionOver(whole && x.mutant != takesTheEndForALoss)
	if x.mutant == forgetsWhatMayBeLost {
		e.h.lost = lost
	}
	switch {
	case wasProposed:
		e.session = 0
		if e.shut {
			m.fin(i)
		}
	case over:
		if !e.closed && x.mutant != keepsTCPOpen {
			m.fin(i)
		}
	case e.leave == 3 || e.leave == 1 && !e.h.mayLeave():
		x.alone(m, i)
	case e.leave == 1: // if the peer's bytes have come, nothing is missing
		have := strings.TrimRight(m.buf[e.session][1-i], "E!")
		if e.sesIn+len(have) < int(e.h.until) {
			x.stays(m, i)
		}
	}
}

// alone is the model of alone.
func (x *explorer) alone(m *model, i int) {
	if x.mutant == waitsForWhoHasGone {
		return
	}
	if !strings.HasSuffix(m.buf[m.ends[i].session][1-i], "E") {
		x.stays(m, i)
		return
	}
	for x.gathers(m, i) {
	}
	x.keep(m, i)
	x.left(m, i, 0, "")
}

// gather is the model of readUntil for one byte.
func (x *explorer) gather(m *model, i int) bool {
	return x.bounded && (m.ends[i].leave == 1 || m.ends[i].leave == 3) && x.gathers(m, i)
}

func (x *explorer) gathers(m *model, i int) bool {
	e, b := &m.ends[i], &m.buf[m.ends[i].session][1-i]
	if strings.TrimRight(*b, "E!") == "" {
		return false
	}
	e.took += (*b)[:1]
	*b = (*b)[1:]
	e.sesIn++
	return true
}

// keep keeps what leave has taken and the program has not read.
func (x *explorer) keep(m *model, i int) {
	if e := &m.ends[i]; e.took != "" {
		e.rest, e.restAt, e.took = e.rest+e.took, int(e.h.in.at), ""
	}
}

// left ends leave.
func (x *explorer) left(m *model, i, returned int, back string) {
	e := &m.ends[i]
	m.buf[e.session][1-i] = ""
	e.session, e.leave, e.sesIn, e.sesOut, e.unread, e.back = 0, 0, 0, 0, "", back
	e.h.left(uint64(returned), back != "")
	e.sesShut = false
	if back == "" {
		m.endsTCP(i)
	}
}

// endsTCP ends TCP if the program has ended the stream meanwhile.
func (m *model) endsTCP(i int) {
	if e := &m.ends[i]; e.closed {
		m.closeTCP(i, false)
	} else if e.shut {
		m.fin(i)
	}
}

// stays is the end of a leave in vain.
func (x *explorer) stays(m *model, i int) {
	e := &m.ends[i]
	if e.end == 'E' && !x.lossy && !x.cut && !m.ends[1-i].aborts {
		m.fail("end %d has read all, and cannot leave", i)
	}
	e.h.leftInVain()
	if e.leave != 2 {
		if !x.bounded {
			for x.gathers(m, i) {
			}
		}
		x.keep(m, i)
	} else {
		if e.unread != "" {
			e.rest, e.restAt, e.unread = e.unread, int(e.h.in.at), ""
		}
		m.buf[e.session][1-i] = "!"
	}
	e.leave, e.inVain = 0, true
	if e.closed {
		e.h.phase = onTCP
		m.closeTCP(i, true)
	} else {
		m.fin(i)
	}
}

// deliver takes what comes next by a session.
func (x *explorer) deliver(m *model, i, s int) bool {
	e, q := &m.ends[i], &m.ses[s][1-i]
	if *q == "" {
		return false
	}
	kind := (*q)[0]
	pos := 0
	if kind == 'B' || kind == 'L' {
		pos = int((*q)[1] - 'a')
		*q = (*q)[1:]
	}
	*q = (*q)[1:]
	if kind == 'O' {
		if !x.commit(m, i, onSAN, s) {
			m.ses[s][i] += "N"
			return true
		}
		if x.mutant == beginsBeforeAnswer {
			m.crosses(i)
		}
		m.say(i, "A")
		return true
	}
	if s != e.session {
		return true // the session was left, or refused
	}
	switch kind {
	case 'A', 'N':
		if e.h.answered(kind == 'A') != nil {
			m.fail("end %d: an answer to no proposal", i)
		}
		switch {
		case kind == 'N':
			e.session = 0
			if e.shut && !e.closed {
				m.fin(i)
			}
		case e.shut && !e.closed:
			m.endStream(i)
		}
	case 'B':
		if err := e.h.peerBegins(uint64(pos), uint64(e.tcpIn)); err != nil && !e.closed {
			m.fail("end %d: %v", i, err)
		}
	case 'L':
		switch {
		case e.leave == 0 && e.closed:
		case e.h.phase == onSAN:
			if x.mutant == leavesAlone {
				return true
			}
			x.leaves(m, i, false)
			fallthrough
		default:
			if err := e.h.peerLeaves(uint64(pos)); err != nil {
				m.fail("end %d: a leave: %v", i, err)
			}
		}
	case 'C':
		m.buf[s][1-i] += "E"
		x.ended(m, i, !x.lossy)
	case 'R', 'Y':
		m.buf[s][1-i] += "!"
		x.ended(m, i, kind == 'R' && !x.lossy)
	case 'X':
		m.buf[s][1-i] += "E"
		x.ended(m, i, true)
	default:
		m.buf[s][1-i] += string(kind)
	}
	return true
}

// leaves is the model of exchange's beginning.
func (x *explorer) leaves(m *model, i int, asked bool) {
	e := &m.ends[i]
	e.h.leave(asked)
	m.crosses(i)
	if x.mutant != takesReaderLate {
		e.turned = false
	}
	come := m.ses[e.session][1-i]
	if over := e.h.over || strings.ContainsAny(come[max(0, len(come)-1):], "CRXY"); !over {
		m.say(i, "L"+at(e.sesOut))
		e.leave = 1
		return
	}
	if e.leave = 3; e.h.over { // otherwise the session's end is awaited, after the last notes
		x.alone(m, i)
	} else if x.mutant == passesTheLastNotesBy {
		for m.ses[e.session][1-i] != "" && e.leave == 3 {
			if q := &m.ses[e.session][1-i]; (*q)[0] == 'B' || (*q)[0] == 'L' {
				*q = (*q)[2:]
				continue
			}
			x.deliver(m, i, e.session)
		}
	}
}

func (x *explorer) ask(m *model, i int) bool {
	e := &m.ends[i]
	if e.asks == 0 || e.closed || e.awaits || e.fd != unused {
		return false
	}
	if x.files[i] || x.controls[i] {
		e.fd = wanted
		e.asks--
		return true
	}
	switch {
	case e.h.phase == onSAN:
		x.leaves(m, i, !x.starve)
	case e.h.phase == leaving && e.leave != 2 && !x.starve:
		e.h.asked = true
	default:
		return false
	}
	e.asks--
	return true
}

// have is the model of backLocked and what follows it.
func (x *explorer) have(m *model, i int) bool {
	e := &m.ends[i]
	if e.fd != wanted {
		return false
	}
	switch e.h.phase {
	case onTCP:
		if e.fd = lentOut; x.files[i] && e.holds() || e.h.failed != 0 && x.mutant != showsTheEndOfAReset {
			e.fd = unused
			return true
		} else if x.files[i] {
			e.fd, e.h.pinned = kept, true
		}
		if x.mutant != countsWhatIsReadElsewhere {
			e.h.readElsewhere()
			e.elsewhere = true
		}
	case onSAN:
		if e.inVain { // there is no second attempt
			e.fd = unused
			return true
		}
		x.leaves(m, i, true)
	case leaving:
		if e.h.asked {
			return false
		}
		e.h.asked = true
	default:
		return false
	}
	return true
}

// release ends Control.
func (x *explorer) release(m *model, i int) bool {
	e := &m.ends[i]
	if e.fd != lentOut {
		return false
	}
	e.fd = unused
	return true
}

// rawWrite and rawRead use the descriptor.
func (x *explorer) rawWrite(m *model, i int) bool {
	e := &m.ends[i]
	if e.fd != lentOut && e.fd != kept || e.wrote == x.writes[i] || e.shut || m.ended(i) {
		return false
	}
	if m.findsReset(i) {
		e.shut, e.failed, e.told, e.h.out.shut = true, true, true, true
		return true
	}
	m.tcp[i] += at(e.wrote)
	e.wrote++
	e.rawOut++
	return true
}

func (x *explorer) rawRead(m *model, i int) bool {
	e, b := &m.ends[i], &m.tcp[1-i]
	if e.fd != lentOut && e.fd != kept || e.end != 0 || e.holds() || *b == "" {
		return false
	}
	switch (*b)[0] {
	case '$':
		m.readsEnd(i, 'E')
	case '!':
		m.findsReset(i)
		m.readsEnd(i, '!')
	default:
		m.got(i, (*b)[0])
		*b = (*b)[1:]
		e.rawIn++
	}
	return true
}

// moved is the model of Moved, after which the program has the connection, or it is reset.
func (x *explorer) moved(m *model, i int) bool {
	e := &m.ends[i]
	if !e.awaits {
		return false
	}
	err := e.h.hasMoved(e.turned && e.h.phase == onSAN && e.h.out.begun)
	if x.mutant == hasMovedOnceItLeaves && (e.h.hasLeft || e.h.phase == leaving) {
		err = nil
	}
	switch {
	case err == errLook:
		return false
	case err != nil:
		return x.giveUp(m, i)
	}
	if e.awaits = false; m.ends[1-i].early {
		m.fail("end %d has moved, behind bytes of the peer's on TCP", i)
	}
	return true
}

// giveUp ends Moved when its time is over.
func (x *explorer) giveUp(m *model, i int) bool {
	e := &m.ends[i]
	if !e.awaits {
		return false
	}
	e.awaits, e.closed = false, true
	if e.session != 0 {
		m.say(i, "Y")
		if e.h.phase == leaving { // as closeLeaving does
			e.h.sessionOver(false)
			x.stays(m, i)
		}
	}
	m.closeTCP(i, true)
	return true
}

// take takes what is unread, and returns or keeps it.
func (x *explorer) take(m *model, i int) bool {
	e := &m.ends[i]
	if e.leave != 1 || !e.h.mayLeave() {
		return false
	}
	n := int(e.h.until) - e.sesIn + len(e.took)
	if n < 0 {
		m.fail("end %d has read %d bytes of the session, and %d are the application's", i, e.sesIn-len(e.took), e.h.until)
	}
	b := &m.buf[e.session][1-i]
	all := e.took + *b
	if len(strings.TrimRight(all, "E!")) < n {
		return false
	}
	unread := all[:n]
	*b, e.took = all[n:], ""
	e.sesIn = int(e.h.until)
	e.turned = false
	if e.returned = 0; e.h.asked && !e.h.out.shut {
		m.say(i, unread)
		e.returned, e.unread = n, unread
	} else {
		e.rest, e.restAt = unread, int(e.h.in.at)
	}
	if !e.sesShut {
		m.say(i, "E")
	}
	e.leave = 2
	return true
}

// finish takes what the peer returns, up to the end of that.
func (x *explorer) finish(m *model, i int) bool {
	e := &m.ends[i]
	if e.leave != 2 {
		return false
	}
	b := m.buf[e.session][1-i]
	n := strings.IndexByte(b, 'E')
	if n < 0 {
		if strings.HasSuffix(b, "!") {
			x.stays(m, i)
			return true
		}
		return false
	}
	if sound := x.mutant != goesOnBeforeThePeerHasAll; sound && m.cut == e.session {
		x.stays(m, i) // whether the peer has everything is not known
		return true
	} else if sound && (x.lossy || x.cut) && m.ses[e.session][i] != "" {
		if m.ends[1-i].dead {
			x.stays(m, i)
			return true
		}
		return false // the session's Close waits
	}
	if x.mutant == forgetsWhatWasReturned {
		e.returned = 0
	}
	x.left(m, i, e.returned, b[:n])
	return true
}

func (x *explorer) flush(m *model, i int) bool {
	e := &m.ends[i]
	if e.h.phase != flushing {
		return false
	}
	reset := m.findsReset(i)
	if !reset {
		m.tcp[i] += e.back
		e.tcpOut += len(e.back)
	}
	e.back = ""
	if e.h.flushed(); reset && x.mutant != forgetsAResetOfFlush {
		e.h.tcpFailed(syscall.ECONNRESET)
	}
	m.endsTCP(i)
	return true
}

// scenarios are those that are explored.
var scenarios = map[string]scenario{
	"a move":                           {writes: [2]int{3, 2}, proposals: 1},
	"two moves":                        {writes: [2]int{2, 1}, proposals: 2, asks: [2]int{1, 0}},
	"a way back, by the dialer":        {writes: [2]int{2, 2}, proposals: 1, asks: [2]int{1, 0}},
	"a way back, by the acceptor":      {writes: [2]int{2, 2}, proposals: 1, asks: [2]int{0, 1}},
	"a way back, by both":              {writes: [2]int{2, 2}, proposals: 1, asks: [2]int{1, 1}},
	"the session fails":                {writes: [2]int{2, 1}, proposals: 1, asks: [2]int{1, 0}, cut: true},
	"two ways back":                    {writes: [2]int{2, 1}, proposals: 2, asks: [2]int{1, 1}},
	"the dialer closes":                {writes: [2]int{2, 1}, proposals: 1, asks: [2]int{0, 1}, close: [2]bool{true, false}},
	"the dialer closes, between hosts": {writes: [2]int{2, 1}, proposals: 1, asks: [2]int{0, 1}, close: [2]bool{true, false}, lossy: true},
	"the acceptor closes":              {writes: [2]int{1, 2}, proposals: 1, asks: [2]int{1, 0}, close: [2]bool{false, true}},
	"both close":                       {writes: [2]int{1, 1}, proposals: 1, asks: [2]int{1, 0}, close: [2]bool{true, true}},
	"the dialer dies":                  {writes: [2]int{2, 1}, proposals: 1, asks: [2]int{0, 1}, kill: [2]bool{true, false}},
	"the acceptor dies":                {writes: [2]int{1, 2}, proposals: 1, asks: [2]int{1, 0}, kill: [2]bool{false, true}},
	"the dialer dies, between hosts":   {writes: [2]int{2, 1}, proposals: 1, asks: [2]int{0, 1}, kill: [2]bool{true, false}, lossy: true},
	"either proposes":                  {writes: [2]int{1, 1}, proposals: 2, either: true, asks: [2]int{1, 0}},
	"the acceptor dies, between hosts": {writes: [2]int{1, 2}, proposals: 2, asks: [2]int{1, 0}, kill: [2]bool{false, true}, lossy: true},
	"what came back meets a reset":     {writes: [2]int{2, 1}, proposals: 1, asks: [2]int{0, 1}, close: [2]bool{false, true}},
	"… of an end with its file":        {writes: [2]int{2, 1}, proposals: 1, asks: [2]int{1, 1}, close: [2]bool{false, true}, files: [2]bool{true, false}},
	"the dialer has its file":          {writes: [2]int{2, 2}, proposals: 2, either: true, asks: [2]int{1, 0}, files: [2]bool{true, false}},
	"one has its file, one dies":       {writes: [2]int{1, 1}, proposals: 1, asks: [2]int{0, 1}, files: [2]bool{false, true}, kill: [2]bool{true, false}},
	"the descriptor for a while":       {writes: [2]int{2, 2}, proposals: 2, asks: [2]int{1, 0}, controls: [2]bool{true, false}},
	"both starve":                      {writes: [2]int{2, 2}, proposals: 2, asks: [2]int{1, 1}, starve: true},
	"a way back in vain":               {writes: [2]int{3, 0}, proposals: 1, asks: [2]int{0, 2}, cut: true, bounded: true},
	"the acceptor requires":            {writes: [2]int{2, 1}, proposals: 2, asks: [2]int{1, 0}, requires: [2]bool{false, true}},
	"the dialer requires":              {writes: [2]int{1, 2}, proposals: 1, asks: [2]int{0, 1}, requires: [2]bool{true, false}},
	"a proposal is withdrawn":          {writes: [2]int{2, 1}, proposals: 2, withdraws: true},
}

// most bounds the states of a scenario, and mostQuick those of all scenarios in a quick run.
const (
	most      = 20_000_000
	mostQuick = 720_000
)

func TestAllOrders(t *testing.T) {
	for name, s := range scenarios {
		t.Run(name, func(t *testing.T) {
			x := explorer{scenario: s, most: mostQuick / len(scenarios)}
			if *exploreMore {
				x.most = most
			}
			problem, states := x.run()
			if problem != "" {
				t.Error(problem)
			}
			if testing.Verbose() {
				t.Logf("%d states, all: %v", states, states < x.most)
			}
		})
	}
}

// walk goes one way through a scenario that the seed determines, and which is too long to explore in all
// orders.
func walk(seed uint64, mutant mutant) (problem string) {
	defer func() {
		if p := recover(); p != nil {
			f, ok := p.(found)
			if !ok {
				panic(p)
			}
			problem = string(f)
		}
	}()
	r := rand.New(rand.NewPCG(seed, 0))
	one := func() bool { return r.IntN(4) == 0 }
	x := explorer{mutant: mutant, scenario: scenario{
		writes:    [2]int{r.IntN(9), r.IntN(9)},
		proposals: 1 + r.IntN(mostSessions-1),
		asks:      [2]int{r.IntN(3), r.IntN(3)},
	}}
	switch r.IntN(4) { // otherwise both ends live, and end in order
	case 0:
		x.close, x.lossy = [2]bool{one(), one()}, one()
	case 1:
		x.kill[r.IntN(2)], x.lossy = true, one()
	case 2:
		x.cut = one()
	}
	x.either, x.withdraws, x.bounded = one(), one(), one()
	switch i := r.IntN(2); r.IntN(12) {
	case 0:
		x.files[i] = true
	case 1:
		x.controls[i] = true
	case 2:
		x.requires[i] = true
	case 3:
		x.starve = true
	}
	m := x.first()
	// What ends a connection is chosen seldom, so that many walks go far.
	seldom := func(what int) bool {
		return what == 0 || (what-1)/2 == closes || (what-1)/2 == dies || (what-1)/2 == givesUp
	}
	for {
		moved := false
		for _, what := range r.Perm(m.steps()) {
			if !(seldom(what) && r.IntN(20) > 0) && x.step(&m, what) {
				moved = true
				break
			}
		}
		for what := 0; !moved && what < m.steps(); what++ {
			moved = x.step(&m, what)
		}
		if !moved {
			x.final(m)
			return ""
		}
	}
}

func TestWalks(t *testing.T) {
	first := *exploreFirst
	if first == 0 {
		first = rand.Uint64() >> 1
	}
	for seed := first; seed < first+*exploreSeeds; seed++ {
		if problem := walk(seed, sound); problem != "" {
			t.Fatalf("-conn.walks 1 -conn.walk %d: %s", seed, problem)
		}
	}
}

// Walks find each mutant.
func TestWalksFindMutants(t *testing.T) {
	first := map[mutant]uint64{movesWithBytesKept: 103_000, goesOnBeforeThePeerHasAll: 287_000, showsTheEndOfAReset: 332_000} // one walk in 100,000 or fewer finds these
	for m := sound + 1; m < mutants; m++ {
		seed := first[m]
		last := seed + 50_000
		for ; seed < last && walk(seed, m) == ""; seed++ {
		}
		if seed == last {
			t.Errorf("mutant %d is not found", m)
		} else if testing.Verbose() {
			t.Logf("mutant %d is found by seed %d", m, seed)
		}
	}
}

// Exploring finds each mutant in the given scenario.
func TestMutantsAreFound(t *testing.T) {
	for m, tt := range map[mutant]struct{ name, scenario string }{
		beginsBeforeAnswer:        {"begins before the answer", "a move"},
		leavesAlone:               {"leaves alone", "a way back, by the dialer"},
		readsTheKeptBeforeTCP:     {"reads what was kept before TCP", "a way back, by the dialer"},
		writesBeforeWhatCameBack:  {"writes before what came back", "a way back, by the dialer"},
		takesReaderLate:           {"takes the reader when the peer knows already", "a way back, by the dialer"},
		takesAnEndWhileProposed:   {"takes an end of TCP while proposed", "the acceptor closes"},
		closesWithoutBegin:        {"closes without begin", "the dialer closes, between hosts"},
		forgetsWhatMayBeLost:      {"forgets what may be lost", "the acceptor dies, between hosts"},
		turnsAtOnce:               {"turns at once", "a move"},
		movesWithBytesKept:        {"moves with bytes kept", "two ways back"},
		keepsTCPOpen:              {"keeps TCP open when the session has ended", "the session fails"},
		forgetsWhatWasReturned:    {"forgets what was returned", "the acceptor dies"},
		goesOnBeforeThePeerHasAll: {"goes on by TCP before the peer has all", "the acceptor dies, between hosts"},
		takesTheEndForALoss:       {"takes the end of a process for a loss", "the dialer dies"},
		passesTheLastNotesBy:      {"leaves a peer that has closed before its last notes", "the acceptor closes"},
		waitsForWhoHasGone:        {"waits for a peer that has closed to leave", "the acceptor closes"},
		agreesWhileProposed:       {"agrees while it has proposed", "either proposes"},
		forgetsAResetOfFlush:      {"forgets a reset that what came back meets", "what came back meets a reset"},
		forgetsAResetOfRead:       {"forgets a reset that a Read finds, and does not return", "the acceptor closes"},
		movesThoughPinned:         {"moves though the program has the descriptor for good", "the dialer has its file"},
		movesBesideControl:        {"moves while Control has the descriptor", "the descriptor for a while"},
		believesItsCounts:         {"moves though bytes went by the descriptor", "the descriptor for a while"},
		countsWhatIsReadElsewhere: {"waits for bytes that the descriptor has had", "the dialer has its file"},
		turnsBeforeTheKept:        {"turns to the session before what was kept", "a way back in vain"},
		withdrawsWhatWasTaken:     {"withdraws a proposal that was taken", "a proposal is withdrawn"},
		showsTheEndOfAReset:       {"gives the descriptor of a reset that was found", "… of an end with its file"},
		hasMovedOnceItLeaves:      {"has moved once it leaves", "the acceptor requires"},
	} {
		x := explorer{scenario: scenarios[tt.scenario], mutant: m, most: most}
		problem, states := x.run()
		if problem == "" {
			t.Errorf("not found: one that %s, in %d states", tt.name, states)
		} else if testing.Verbose() {
			what, _, _ := strings.Cut(problem, "\n")
			t.Logf("%s: %d states: %s", tt.name, states, what)
		}
	}
}
