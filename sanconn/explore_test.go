package sanconn

import (
	"flag"
	"fmt"
	"hash/maphash"
	"math/rand/v2"
	"strings"
	"testing"
)

var (
	exploreMore  = flag.Bool("conn.explore", false, "explore all orders, which takes longer")
	exploreSeeds = flag.Uint64("conn.walks", 20_000, "random walks through larger scenarios")
	exploreFirst = flag.Uint64("conn.walk", 0, "the first one's seed; 0: a random one")
)

// The explorer goes through all orders in which two ends, each with a handover, and what lies
// between them can act: TCP and a session, each way a queue, and the programs at both ends.
// Its ends do what Conn does, step by step, but by no other means than plain values: so all
// states can be enumerated, and a mutant of a step be tried.
//
// It checks that each reader gets the bytes that were written, in order; that a stream ends
// with io.EOF only when it is whole; and that nobody waits when nothing can happen any more.

// scenario is what the programs may do.
type scenario struct {
	writes    [2]int  // bytes to be written by each end; then it ends its stream
	proposals int     // by end 0
	asks      [2]int  // for the way back to TCP
	close     [2]bool // it may close at any time
	kill      [2]bool // it may die at any time
	lossy     bool    // what is on its way on the session is lost then
	cut       bool    // a session may fail at any time, and what is on its way is lost
}

// mutant is a bug that the explorer has to find.
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
)

const mostSessions = 4 // one more than are proposed

// model is a state.
type model struct {
	ends [2]modelEnd
	tcp  [2]string               // from each end: bytes, and '$', its end
	ses  [mostSessions][2]string // from each end, by session: bytes, notes, ends
	buf  [mostSessions][2]string // of them, bytes and the end of the stream that have come, and were not read
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
	shut        bool // CloseWrite, or a Write has failed
	failed      bool // … it was that
	sesShut     bool // the stream on the session has ended
	closed      bool
	aborts      bool // … with bytes unread
	dead        bool
	over        bool
	end         byte // what the reader got: 'E' io.EOF, '!' an error
	asks        int
	leave       int // 1: said, 2: what was unread is returned or kept
	asked       bool
	peerLeaves  bool
	peerAt      int
	rest        string
	restAt      int
	unread      string // what is being returned
	returned    int    // that many bytes were
	back        string // flush has to send it
}

// explorer explores a scenario.
type explorer struct {
	scenario
	mutant
	seen map[uint64]struct{} // by their hashes: two that share one are rarer than a bug here
	most int                 // states
}

// found is what is wrong.
type found string

func (x *explorer) run() (problem string, states int) {
	x.seen = make(map[uint64]struct{})
	hash := maphash.MakeSeed()
	var first model
	for i := range first.ends {
		first.ends[i].asks = x.asks[i]
	}
	stack := []model{first}
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
		next := x.successors(m)
		if len(next) == 0 {
			x.final(m)
		}
		for _, n := range next {
			h := maphash.Comparable(hash, n)
			if _, ok := x.seen[h]; !ok {
				x.seen[h] = struct{}{}
				stack = append(stack, n)
			}
		}
	}
	return "", len(x.seen)
}

func (m *model) fail(format string, args ...any) {
	panic(found(fmt.Sprintf(format, args...) + fmt.Sprintf("\n%+v", *m)))
}

// final checks a state in which nothing more happens.
func (x *explorer) final(m model) {
	broken, died := m.cut > 0, m.cut > 0
	for _, e := range m.ends {
		broken = broken || e.dead || e.closed
		died = died || e.dead
	}
	for i, e := range m.ends {
		p := m.ends[1-i]
		switch {
		case e.dead:
		case e.h.phase == leaving, e.h.phase == proposed:
			m.fail("end %d waits on %v", i, e.h.phase)
		case e.closed:
		case e.end == 0:
			m.fail("the reader of end %d waits", i)
		case !broken && (e.end != 'E' || e.read != p.wrote || p.failed):
			m.fail("end %d reads %d of %d, and %c", i, e.read, p.wrote, e.end)
		case !died && p.closed && !p.aborts && e.end != 'E':
			m.fail("end %d reads %d of %d, and %c; the peer has closed in order", i, e.read, p.wrote, e.end)
		}
	}
}

// successors are the states that follow.
func (x *explorer) successors(m model) (next []model) {
	for what := range m.steps() {
		n := m
		if x.step(&n, what) {
			next = append(next, n)
		}
	}
	return next
}

// endSteps are what one end may do, beside taking what comes by a session.
var endSteps = [...]func(*explorer, *model, int) bool{
	(*explorer).write, (*explorer).begin, (*explorer).closeWrite, closes: (*explorer).doClose,
	(*explorer).readOne, (*explorer).turn, (*explorer).ask, (*explorer).take, (*explorer).finish, (*explorer).flush,
	dies: (*explorer).die,
}

const closes, dies = 3, 10

// steps is how many there are, of which some can be taken.
func (m *model) steps() int { return 2 + 2*(len(endSteps)+m.last) }

// step takes one of them, if that can happen now. Otherwise it leaves the state as it is.
func (x *explorer) step(m *model, what int) bool {
	switch what {
	case 0:
		return x.proposal(m)
	case 1:
		return x.fail(m)
	}
	i, what := what%2, what/2-1
	switch {
	case m.ends[i].dead:
		return false
	case what < len(endSteps):
		return endSteps[what](x, m, i)
	}
	return x.deliver(m, i, what-len(endSteps)+1)
}

// say sends something by the session, if that has not failed.
func (m *model) say(i int, what string) {
	if s := m.ends[i].session; s != m.cut {
		m.ses[s][i] += what
	}
}

// fin ends TCP.
func (m *model) fin(i int) {
	if !strings.HasSuffix(m.tcp[i], "$") {
		m.tcp[i] += "$"
	}
}

func at(n int) string { return string(rune('a' + n)) }

// crosses is beginLocked.
func (m *model) crosses(i int) {
	if e := &m.ends[i]; !e.h.out.begun {
		e.h.begin(uint64(e.tcpOut))
		m.say(i, "B"+at(e.tcpOut))
	}
}

func (x *explorer) write(m *model, i int) bool {
	e := &m.ends[i]
	if e.wrote == x.writes[i] || e.shut || e.closed || e.h.phase == leaving || e.back != "" && x.mutant != writesBeforeWhatCameBack {
		return false
	}
	b := at(e.wrote)
	if e.h.phase == onSAN {
		m.crosses(i)
		if e.over {
			e.shut, e.failed, e.h.out.ended = true, true, true
			return true
		}
		m.say(i, b)
		e.sesOut++
	} else {
		m.tcp[i] += b
		e.tcpOut++
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

// endStream is endStream with CloseWrite.
func (m *model) endStream(i int) {
	m.crosses(i)
	if e := &m.ends[i]; !e.sesShut {
		e.sesShut = true
		m.say(i, "E")
	}
}

func (x *explorer) closeWrite(m *model, i int) bool {
	e := &m.ends[i]
	if e.wrote < x.writes[i] || e.shut || e.closed {
		return false
	}
	e.shut, e.h.out.ended = true, true
	switch e.h.phase {
	case onTCP:
		if e.back == "" {
			m.fin(i)
		}
	case onSAN:
		m.endStream(i)
	}
	return true
}

func (x *explorer) doClose(m *model, i int) bool {
	e := &m.ends[i]
	if !x.close[i] || e.closed {
		return false
	}
	e.closed = true
	switch e.h.phase {
	case onTCP:
		if e.back == "" {
			m.fin(i)
		}
	case onSAN, proposed:
		if x.mutant != closesWithoutBegin {
			m.crosses(i)
		}
		if m.buf[e.session][1-i] != "" || e.rest != "" {
			m.say(i, "R")
			e.aborts = true
		} else {
			m.say(i, "C")
		}
		m.fin(i)
	}
	return true
}

// die is the end of a process.
func (x *explorer) die(m *model, i int) bool {
	if !x.kill[i] {
		return false
	}
	m.ends[i].dead = true
	m.fin(i)
	for s := 1; s <= m.last; s++ {
		if x.lossy {
			m.ses[s][i] = "Y"
		} else {
			m.ses[s][i] += "X"
		}
	}
	return true
}

// fail is the end of the newest session.
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

func (x *explorer) proposal(m *model) bool {
	e := &m.ends[0]
	if m.last == x.proposals || e.dead || !x.commit(m, 0, proposed, m.last+1) {
		return false
	}
	m.last++
	m.say(0, "O")
	if m.ends[1].dead {
		m.ses[m.last][1] = "X" // no session can be made
	}
	return true
}

// commit is commitLocked.
func (x *explorer) commit(m *model, i int, to phase, s int) bool {
	e := &m.ends[i]
	if e.closed || e.back != "" || e.rest != "" && x.mutant != movesWithBytesKept || e.h.commit(to) != nil {
		return false
	}
	e.session, e.sesIn, e.sesOut = s, 0, 0
	e.sesShut, e.over, e.peerLeaves, e.leave, e.asked = false, false, false, 0, false
	return true
}

// readOne reads a byte, or an end.
func (x *explorer) readOne(m *model, i int) bool {
	e := &m.ends[i]
	if e.end != 0 || e.closed || e.h.phase == leaving && !(x.mutant == takesReaderLate && e.turned && e.leave == 1) {
		return false
	}
	got := func(b byte) {
		if want := at(e.read)[0]; b != want {
			m.fail("end %d reads %c, not %c", i, b, want)
		}
		e.read++
	}
	ends := func(how byte) {
		if e.end = how; how == 'E' && e.read != m.ends[1-i].wrote {
			m.fail("end %d reads %d of %d, and io.EOF", i, e.read, m.ends[1-i].wrote)
		}
	}
	if e.rest != "" && (e.tcpIn == e.restAt || x.mutant == readsTheKeptBeforeTCP) {
		got(e.rest[0])
		e.rest = e.rest[1:]
		return true
	}
	if e.turned {
		b := &m.buf[e.session][1-i]
		switch {
		case *b == "":
			return false
		case (*b)[0] == 'E' || (*b)[0] == '!':
			ends((*b)[0])
			return true
		}
		got((*b)[0])
		*b = (*b)[1:]
		e.sesIn++
		return true
	}
	b := &m.tcp[1-i]
	switch {
	case *b == "":
		return false
	case (*b)[0] == '$':
		switch e.h.endOf(uint64(e.tcpIn)) {
		case endIsEnd:
			ends('E')
		case endIsCut:
			ends('!')
		case endOpen:
			if x.mutant != takesAnEndWhileProposed {
				return false
			}
			ends('E')
		case endTurns:
			return false // turn does
		}
		return true
	case e.h.turns(uint64(e.tcpIn)):
		return false
	}
	got((*b)[0])
	*b = (*b)[1:]
	e.tcpIn++
	return true
}

func (x *explorer) turn(m *model, i int) bool {
	e := &m.ends[i]
	if e.turned || e.session == 0 || e.rest != "" || !e.h.in.begun {
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

// ended is sessionEnded.
func (x *explorer) ended(m *model, i int, whole bool) {
	e := &m.ends[i]
	wasProposed := e.h.phase == proposed
	lost := e.h.lost
	over := e.h.sessionEnded(whole)
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
		e.over = true
		if !e.closed && x.mutant != keepsTCPOpen {
			m.fin(i)
		}
	case e.h.phase == leaving: // if the peer's notes and bytes have come, nothing is missing
		have := strings.TrimRight(m.buf[e.session][1-i], "E!")
		if e.leave == 1 && (!e.peerLeaves || !e.h.in.begun || e.sesIn+len(have) < e.peerAt) {
			x.stays(m, i)
		}
	}
}

// stays is the end of leaving in vain.
func (x *explorer) stays(m *model, i int) {
	e := &m.ends[i]
	e.h.stays()
	if e.leave == 2 {
		if e.unread != "" {
			e.rest, e.restAt, e.unread = e.unread, int(e.h.in.at), ""
		}
		m.buf[e.session][1-i] = "!"
	}
	e.over, e.leave = true, 0
	m.fin(i)
	if e.closed {
		e.h.phase = onTCP
	}
}

// deliver has what comes next by a session come.
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
		return true // of one that has been left, or refused
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
		if e.h.phase != onSAN && e.h.phase != leaving {
			m.fail("end %d: a begin that was not agreed", i)
		}
		if err := e.h.peerBegins(uint64(pos), uint64(e.tcpIn)); err != nil {
			m.fail("end %d: %v", i, err)
		}
	case 'L':
		switch {
		case e.leave == 0 && e.closed:
		case e.h.phase == onSAN:
			if x.mutant == leavesAlone {
				return true
			}
			x.leaves(m, i)
			fallthrough
		case e.h.phase == leaving:
			e.peerLeaves, e.peerAt = true, pos
		default:
			m.fail("end %d: a leave out of place", i)
		}
	case 'C':
		m.buf[s][1-i] += "E"
		x.ended(m, i, true)
	case 'R', 'Y':
		m.buf[s][1-i] += "!"
		x.ended(m, i, kind == 'R')
	case 'X':
		m.buf[s][1-i] += "E"
		x.ended(m, i, true)
	default:
		m.buf[s][1-i] += string(kind)
	}
	return true
}

// leaves is the beginning of leave.exchange.
func (x *explorer) leaves(m *model, i int) {
	e := &m.ends[i]
	e.h.leave()
	m.crosses(i)
	m.say(i, "L"+at(e.sesOut))
	e.leave = 1
	if x.mutant != takesReaderLate {
		e.turned = false
	}
}

func (x *explorer) ask(m *model, i int) bool {
	e := &m.ends[i]
	if e.asks == 0 || e.closed {
		return false
	}
	switch {
	case e.h.phase == onSAN && e.over:
		e.asks--
		return true
	case e.h.phase == onSAN:
		x.leaves(m, i)
	case e.h.phase == leaving && e.leave == 1:
	default:
		return false
	}
	e.asked = true
	e.asks--
	return true
}

// take takes what is unread, and returns it or keeps it.
func (x *explorer) take(m *model, i int) bool {
	e := &m.ends[i]
	if e.leave != 1 || !e.peerLeaves || !e.h.in.begun {
		return false
	}
	if e.peerAt < e.sesIn {
		m.fail("end %d has read %d bytes of the session, and %d are the application's", i, e.sesIn, e.peerAt)
	}
	b := &m.buf[e.session][1-i]
	n := e.peerAt - e.sesIn
	if len(strings.TrimRight(*b, "E!")) < n {
		return false
	}
	unread := (*b)[:n]
	*b = (*b)[n:]
	e.sesIn = e.peerAt
	e.turned = false
	if e.returned = 0; e.asked && !e.h.out.ended {
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

// finish takes what the peer returns, up to its end.
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
		x.stays(m, i) // it is not known that the peer has all
		return true
	} else if sound && (x.lossy || x.cut) && m.ses[e.session][i] != "" {
		if m.ends[1-i].dead {
			x.stays(m, i)
			return true
		}
		return false // the session's Close waits
	}
	e.back = b[:n]
	m.buf[e.session][1-i] = ""
	e.session, e.leave, e.sesIn, e.sesOut, e.unread = 0, 0, 0, 0, ""
	if x.mutant == forgetsWhatWasReturned {
		e.returned = 0
	}
	e.h.left(uint64(e.returned))
	e.sesShut, e.peerLeaves, e.peerAt, e.asked = false, false, 0, false
	if e.back == "" && (e.shut || e.closed) {
		m.fin(i)
	}
	return true
}

func (x *explorer) flush(m *model, i int) bool {
	e := &m.ends[i]
	if e.back == "" {
		return false
	}
	m.tcp[i] += e.back
	e.tcpOut += len(e.back)
	e.back = ""
	if e.shut || e.closed {
		m.fin(i)
	}
	return true
}

// scenarios are what is explored.
var scenarios = map[string]scenario{
	"a move":                           {writes: [2]int{3, 2}, proposals: 1},
	"two moves":                        {writes: [2]int{2, 1}, proposals: 2, asks: [2]int{1, 0}},
	"a way back, by the dialer":        {writes: [2]int{2, 2}, proposals: 1, asks: [2]int{1, 0}},
	"a way back, by the acceptor":      {writes: [2]int{2, 2}, proposals: 1, asks: [2]int{0, 1}},
	"a way back, by both":              {writes: [2]int{2, 2}, proposals: 1, asks: [2]int{1, 1}},
	"the session fails":                {writes: [2]int{2, 1}, proposals: 1, asks: [2]int{1, 0}, cut: true},
	"two ways back":                    {writes: [2]int{2, 1}, proposals: 2, asks: [2]int{1, 1}},
	"the dialer closes":                {writes: [2]int{2, 1}, proposals: 1, asks: [2]int{0, 1}, close: [2]bool{true, false}},
	"the acceptor closes":              {writes: [2]int{1, 2}, proposals: 1, asks: [2]int{1, 0}, close: [2]bool{false, true}},
	"both close":                       {writes: [2]int{1, 1}, proposals: 1, asks: [2]int{1, 0}, close: [2]bool{true, true}},
	"the dialer dies":                  {writes: [2]int{2, 1}, proposals: 1, asks: [2]int{0, 1}, kill: [2]bool{true, false}},
	"the acceptor dies":                {writes: [2]int{1, 2}, proposals: 1, asks: [2]int{1, 0}, kill: [2]bool{false, true}},
	"the dialer dies, between hosts":   {writes: [2]int{2, 1}, proposals: 1, asks: [2]int{0, 1}, kill: [2]bool{true, false}, lossy: true},
	"the acceptor dies, between hosts": {writes: [2]int{1, 2}, proposals: 2, asks: [2]int{1, 0}, kill: [2]bool{false, true}, lossy: true},
}

// most bounds the states of a scenario, and mostQuick in a run that is not to take long.
const (
	most      = 20_000_000
	mostQuick = 30_000
)

func TestAllOrders(t *testing.T) {
	for name, s := range scenarios {
		t.Run(name, func(t *testing.T) {
			x := explorer{scenario: s, most: mostQuick}
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

// walk goes one way through a scenario that a seed makes: longer than all ways can be.
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
	switch r.IntN(4) { // else both ends live, and end in order
	case 0:
		x.close = [2]bool{one(), one()}
	case 1:
		x.kill[r.IntN(2)], x.lossy = true, one()
	case 2:
		x.cut = one()
	}
	var m model
	for i := range m.ends {
		m.ends[i].asks = x.asks[i]
	}
	// What ends a connection comes seldom, or few walks got far.
	seldom := func(what int) bool { return what == 1 || what/2-1 == closes || what/2-1 == dies }
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

// Walks find each mutant, too.
func TestWalksFindMutants(t *testing.T) {
	for m := sound + 1; m <= goesOnBeforeThePeerHasAll; m++ {
		seed := uint64(1)
		for ; seed < 200_000 && walk(seed, m) == ""; seed++ {
		}
		if seed == 200_000 {
			t.Errorf("mutant %d is not found", m)
		} else if testing.Verbose() {
			t.Logf("mutant %d is found by seed %d", m, seed)
		}
	}
}

// Each mutant is found, in this scenario.
func TestMutantsAreFound(t *testing.T) {
	for m, tt := range map[mutant]struct{ name, scenario string }{
		beginsBeforeAnswer:        {"begins before the answer", "a move"},
		leavesAlone:               {"leaves alone", "a way back, by the dialer"},
		readsTheKeptBeforeTCP:     {"reads what was kept before TCP", "a way back, by the dialer"},
		writesBeforeWhatCameBack:  {"writes before what came back", "a way back, by the dialer"},
		takesReaderLate:           {"takes the reader when the peer knows already", "a way back, by the dialer"},
		takesAnEndWhileProposed:   {"takes an end of TCP while proposed", "the acceptor closes"},
		closesWithoutBegin:        {"closes without begin", "the dialer closes"},
		forgetsWhatMayBeLost:      {"forgets what may be lost", "the acceptor dies, between hosts"},
		turnsAtOnce:               {"turns at once", "a move"},
		movesWithBytesKept:        {"moves with bytes kept", "two ways back"},
		keepsTCPOpen:              {"keeps TCP open when the session has ended", "the session fails"},
		forgetsWhatWasReturned:    {"forgets what was returned", "the acceptor dies"},
		goesOnBeforeThePeerHasAll: {"goes on by TCP before the peer has all", "the acceptor dies, between hosts"},
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
