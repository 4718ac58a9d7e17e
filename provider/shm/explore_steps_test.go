package shm

// model is a state of the explorer: the content of the memory, and where each goroutine is.
type model struct {
	conns   [2]modelConn
	ends    [2]modelEnd
	idle    modelIdle
	threads [mostThreads]thread
}

// modelAlarm is the word of a ring.Alarm, or what a ring.Rung remembers of one.
type modelAlarm struct {
	set          bool
	place, count uint8
}

// modelConn is a ring, with one cell.
type modelConn struct {
	tail, cells    uint8 // published by the writer
	head, freed    uint8 // freed by the reader
	want, sleep    modelAlarm
	mem            [mostRoom]uint8
	cellMsg, after uint8

	w struct { // as in ring.Writer
		tail, head, cells, freed uint8
		rung                     modelAlarm
	}
	r struct { // as in ring.Reader
		scan, tail, head, cells, freed uint8
		polled, kept                   uint8
		rung                           modelAlarm
		locked                         bool // rxMu
	}
}

// modelEnd is one process's end of the link.
type modelEnd struct {
	slots  [2]bool // of its bell, like group and asleep: news that the other end has not seen
	group  bool
	asleep modelAlarm
	rung   modelAlarm // for the other's asleep

	edge, queue, late bool // of its doorbell: an event, a ring in the queue, and a deadline that has passed

	led, roused, dispatch bool // as in waiters, whose sleepers are sleeps: 1 asleep, 2 woken
	leader, unwoken       uint8
	sleeps                [2]uint8

	sides [2]struct{ wants, asleep, wake, stop bool } // as in session's side, by slot
}

// modelIdle is session's idleState, of the reader that the idle poller serves.
type modelIdle struct {
	away, listed, serving, served bool
	seen                          uint8
}

// thread is a goroutine.
type thread struct {
	at        step    // its next step
	back      [2]step // where to go on after a call
	depth     uint8
	end, slot uint8
	writes    bool
	keeps     bool  // takes messages, and keeps them for others to read
	to        uint8 // the slot that it looks at in the bell, or signals
	done      uint8 // messages that it has written or read
	n         uint8
	word      modelAlarm

	armed, leads bool // as in await, and in waiters' Sleep
	fine         bool // the doorbell was read
	got          bool // a message
}

const (
	mostThreads = 8
	mostRoom    = 3
	headBatch   = 3 // a message may need more room than is left at the ring's end
)

var threadNames = [...]string{
	"end 0, slot 0", "end 0, slot 1", "end 1, slot 0", "end 1, slot 1",
	"end 0's dispatcher", "end 1's dispatcher", "the idle poller", "the service", "",
}

// begin returns the first state.
func (x *explorer) begin() (m model) {
	for i, op := range x.ops {
		t := &m.threads[i]
		t.end, t.slot, t.writes = uint8(i/2), uint8(i%2), op == "w"
		t.goes(pick(op == "", "over", "begin"))
	}
	for i := range m.ends {
		t := &m.threads[4+i]
		t.end = uint8(i)
		m.ends[i].led = !x.leads
		t.goes("dispatch")
		if !x.leads && !x.direct[i] {
			t.call("prepare", "dispatched")
		}
	}
	for i, does := range []string{"poll idle", "serve"} {
		t := &m.threads[6+i]
		t.end, t.keeps = 1, true
		t.goes(pick(x.idles, does, pick(x.stops && i == 0, "signals", "over")))
	}
	for s := range m.conns {
		if x.ops[2+s] == "" { // its idle poller has armed it
			x.set(&m.conns[s].sleep, 0)
		}
	}
	m.idle.listed = x.idles
	return m
}

// step is the place where a thread is: the index of its name.
type step uint8

var (
	stepNames []string
	steps     = map[string]step{}
)

func stepOf(name string) step {
	s, ok := steps[name]
	if !ok {
		s = step(len(stepNames))
		steps[name], stepNames = s, append(stepNames, name)
	}
	return s
}

func (t *thread) name() string { return stepNames[t.at] }

// goes makes a thread go on at a step; with "" it returns to the caller.
func (t *thread) goes(to string) {
	if to != "" {
		t.at = stepOf(to)
		return
	}
	t.depth--
	t.at, t.back[t.depth] = t.back[t.depth], 0
}

func (t *thread) call(what, back string) {
	t.back[t.depth] = stepOf(back)
	t.depth++
	t.goes(what)
}

func pick(first bool, a, b string) string {
	if first {
		return a
	}
	return b
}

// either returns a if the mutant is active, else b.
func (x *explorer) either(m mutant, a, b string) string { return pick(x.mutant == m, a, b) }

func (x *explorer) set(a *modelAlarm, place uint8) {
	if a.set, a.place = true, place; x.mutant != setsWithoutCount {
		a.count++
	}
}

func (x *explorer) clear(a *modelAlarm) {
	if a.set, a.place = false, 0; x.mutant == clearsTheCount {
		a.count = 0
	}
}

// wake is Rung.ringAt for a single goroutine that rings. After it comes the doorbell, or a token in its
// place. It returns the next step.
func (x *explorer) wake(m *model, t *thread, rung *modelAlarm, word modelAlarm, place uint8) string {
	if !word.set || place < word.place || *rung == word {
		return ""
	}
	*rung = word
	if x.direct[1-t.end] {
		m.ends[1-t.end].sides[t.slot].wake = true
		return ""
	}
	return x.either(ringsBeforeItTells, "asleep?", "tell")
}

// rang returns the step after a ring.
func (x *explorer) rang(t *thread) string {
	t.word = modelAlarm{}
	return x.either(ringsBeforeItTells, "tell", "")
}

// ready returns the first step of waiters' ready.
func (x *explorer) ready() string {
	drains := x.drains && x.mutant != drainsBehindItsLook
	return x.either(setsBehindItsLook, "pending", pick(drains, "drain", "set asleep"))
}

// next returns the step in which Poll looks next.
func (c *modelConn) next(passedCell bool) string {
	if c.r.cells != c.r.freed && !passedCell {
		return "cell"
	}
	return pick(c.r.scan != c.r.tail, "record", "tail")
}

// polled checks that a message is the expected one.
func (c *modelConn) polled(msg uint8) {
	if c.r.polled++; msg != c.r.polled {
		fail("message %d comes in the place of %d", msg, c.r.polled)
	}
}

// enlist is engine.enlist.
func (i *modelIdle) enlist() {
	if i.away {
		i.away, i.seen, i.listed = false, 0, true
	}
}

// step takes a thread's next step, and those after it that no other thread can observe or influence. If
// the thread cannot take its next step now, nothing changes.
func (x *explorer) step(m *model, t *thread) bool {
	if !x.stepOne(m, t) {
		return false
	}
	for x.local(t) {
		x.stepOne(m, t)
	}
	for i := range m.conns {
		if x.mutant == clearsTheCount {
			break // a new sequence begins
		}
		c := &m.conns[i]
		rank(&c.want.count, &c.r.rung.count)
		rank(&c.sleep.count, &c.w.rung.count)
		bell := [mostThreads + 2]*uint8{&m.ends[1-i].asleep.count, &m.ends[i].rung.count}
		n := 2
		for j := range m.threads {
			if t := &m.threads[j]; t.end == uint8(i) {
				bell[n] = &t.word.count
				n++
			}
		}
		rank(bell[:n]...)
	}
	return true
}

// local reports whether no other thread can observe or influence a thread's next step.
func (x *explorer) local(t *thread) bool {
	switch t.name() {
	case "again", "put", "seen", "rang":
		return true
	case "look":
		return t.writes
	case "begin", "looked":
		return !x.idles
	case "met":
		return !t.armed
	case "none", "unwant":
		return x.direct[t.end]
	case "tail of cells", "record", "consumed", "free head", "waits?":
		return x.coarse
	case "rung?", "rung": // if nobody else rings
		return x.coarse && (x.ops[2*t.end] == "" || x.ops[2*t.end+1] == "")
	}
	return false
}

// rank makes counters as small as possible, because only their order matters.
func rank(counts ...*uint8) {
	for low := uint8(0); ; low++ {
		next := uint8(255)
		for _, n := range counts {
			if *n >= low {
				next = min(next, *n)
			}
		}
		if next == 255 {
			return
		}
		for _, n := range counts {
			if *n == next {
				*n = low
			}
		}
	}
}

// stepOne takes a thread's next step.
func (x *explorer) stepOne(m *model, t *thread) bool {
	e, peer, c := &m.ends[t.end], &m.ends[1-t.end], &m.conns[t.slot]
	w, r, side := &c.w, &c.r, &e.sides[t.slot]
	here := x.mutant // the active mutant

	switch t.name() {
	case "over":
		return false

	// An operation, in session's await.

	case "begin": // enlist
		if !t.writes {
			m.idle.enlist()
		}
		t.goes("look")
	case "look": // Reserve, or rxMu.Lock
		switch {
		case t.writes && x.sends[t.slot][t.done] == 'c': // the place in the ring is reserved for data
			t.goes("freed")
		case t.writes:
			t.goes(pick(w.tail-w.head < x.room, "put", "head"))
		case r.locked:
			return false
		default:
			r.locked = true
			if t.got = r.kept > 0; t.got {
				r.kept--
			}
			t.call(pick(t.got, "consumed", c.next(false)), "looked")
		}
	case "looked": // rxMu.Unlock
		r.locked = false
		t.goes(pick(t.got, "met", pick(x.stops, "stop", "none")))
	case "stop": // rd.stop
		t.goes(pick(side.stop, "met", "none"))
	case "none": // wants.Store; or asleep.Store, behind the second look
		side.wants = here != wantsBehindItsLook || t.armed
		side.asleep = t.armed
		t.goes(pick(t.armed, "sleep", "arm"))
		t.armed = false
	case "arm": // ep.Arm
		if t.writes {
			x.set(&c.want, t.n)
		} else {
			x.set(&c.sleep, 0)
		}
		t.n, t.armed = 0, true
		t.goes(x.either(armsBehindItsLook, "none", "look"))
	case "met": // disarm
		if t.armed && t.writes {
			x.clear(&c.want)
		} else if t.armed {
			x.clear(&c.sleep)
		}
		t.armed, t.got = false, false
		t.done++
		t.goes("unwant")
	case "unwant": // wants.Store
		joins := side.wants && x.idles && !t.writes && here != sleepsWithoutJoining
		side.wants = false
		t.goes(pick(joins, "join", "again"))
	case "join": // enlist
		m.idle.enlist()
		t.goes("again")
	case "again":
		n := len(x.sends[t.slot])
		switch {
		case t.writes:
		case x.idles:
			n = 1
		case x.stops && t.slot == 0:
			n++
		}
		t.goes(pick(int(t.done) == n, "over", "begin"))

	// ring.Writer.

	case "head": // refresh: in.head.Load
		w.head = c.head
		t.n = min(w.tail, w.head+(x.room+1)/2) // block
		t.goes(pick(w.tail-w.head < x.room, "put", "none"))
	case "put":
		c.mem[w.tail%x.room] = t.done + 1
		w.tail++
		t.n = 0
		t.goes(x.either(publishesBehindItsRing, "sleeps?", "publish"))
	case "publish": // publish: out.tail.Store
		c.tail = w.tail
		t.goes(x.either(publishesBehindItsRing, "met", "sleeps?"))
	case "sleeps?": // wake
		t.call("met", pick(c.tail == w.tail, "met", "publish"))
		t.goes(x.wake(m, t, &w.rung, c.sleep, 255))
	case "freed": // spareCell: in.spareHead.Load
		if w.freed = c.freed; w.freed == w.cells {
			w.cells++
			c.cellMsg = t.done + 1
			t.goes(x.either(publishesCellBeforeItsPlace, "publish cell", "place"))
		} else {
			t.n = min(w.tail, w.head+(x.room+1)/2) // block
			t.goes("none")
		}
	case "place": // commitCell: after.Store
		t.n, c.after = 0, w.tail
		t.goes(x.either(publishesCellBeforeItsPlace, "sleeps?", "publish cell"))
	case "publish cell": // commitCell: out.spareTail.Store
		c.cells = w.cells
		t.goes(x.either(publishesCellBeforeItsPlace, "place", "sleeps?"))

	// ring.Reader.

	case "cell": // pollCell: after.Load
		if c.after > r.scan {
			t.goes(c.next(true))
		} else {
			c.polled(c.cellMsg)
			t.got = true
			t.goes("free cell")
		}
	case "record": // Poll; then Keep, or Drop
		c.polled(c.mem[r.scan%x.room])
		r.scan++
		t.got = true
		if t.keeps {
			r.kept++
		}
		t.goes(pick(t.keeps, c.next(false), "consumed"))
	case "tail": // look: out.tail.Load
		if t.n = c.tail; here == loadsCellsFirst {
			t.n = c.cells
		}
		t.goes("tail of cells")
	case "tail of cells": // look: out.spareTail.Load
		tail, cells := t.n, c.cells
		if here == loadsCellsFirst {
			tail, cells = c.tail, t.n
		}
		news := tail != r.tail || cells != r.cells
		t.n, r.tail, r.cells = 0, tail, cells
		frees := r.scan-r.kept != r.head && here != keepsTheHead
		t.goes(pick(news, c.next(false), pick(frees, "free head", "")))
	case "consumed": // consumed: waits
		frees := r.scan-r.kept-r.head >= headBatch || c.want.set && c.want != r.rung
		t.goes(pick(frees, "free head", ""))
	case "free head": // publishHead: in.head.Store
		r.head = r.scan - r.kept
		c.head = r.head
		t.goes("waits?")
	case "waits?": // publishHead: ringAt
		t.goes(x.wake(m, t, &r.rung, c.want, r.head))
	case "free cell": // dropCell: in.spareHead.Store
		r.freed++
		c.freed = r.freed
		t.goes(x.either(freesCellsInSilence, "", "waits for a cell?"))
	case "waits for a cell?": // dropCell: Ring
		t.goes(x.wake(m, t, &r.rung, c.want, 255))

	// doorbell's ring. The order of the first two is tell's.

	case "tell", "tell group": // slots.Add, groups.Add
		first := t.name() == "tell"
		if first == (here != tellsTheGroupFirst) {
			e.slots[t.slot] = true
		} else {
			e.group = true
		}
		t.goes(pick(first, "tell group", x.either(ringsBeforeItTells, "", "asleep?")))
	case "asleep?": // Rung.Ring: word.Load
		t.word = peer.asleep
		t.goes(pick(t.word.set, "rung?", "rang"))
	case "rung?": // … last.Load
		t.goes(pick(e.rung != t.word, "rung", "rang"))
	case "rung": // … last.Swap
		t.goes(pick(e.rung != t.word, "ring", "rang"))
		e.rung = t.word
	case "ring": // readOne, or sendOne
		peer.edge = peer.edge || !peer.queue
		peer.queue = x.drains
		t.goes("rang")
	case "rang":
		t.goes(x.rang(t))

	// waiters' Sleep.

	case "sleep": // its first part under mu; or a sleep on the channel alone
		switch {
		case !x.direct[t.end]:
			e.sleeps[t.slot] = 1
			e.unwoken++
			if t.leads = !e.led; t.leads {
				e.led, e.leader, t.fine = true, 1+t.slot, true
			}
			t.goes(pick(t.leads, "lead", "wait"))
		case !side.wake:
			return false
		default:
			side.wake, side.asleep = false, false
			t.goes("look")
		}
	case "wait": // <-wake
		if !side.wake {
			return false
		}
		side.wake = false
		t.goes("slept")
	case "slept": // its second part under mu
		if e.sleeps[t.slot] == 1 {
			e.unwoken--
		}
		e.sleeps[t.slot] = 0
		if t.leads {
			e.led, e.leader = false, 0
		}
		dispatch := !e.led && e.sleeps != [2]uint8{} && here != leavesSleepers
		e.led = e.led || dispatch
		t.leads, t.fine = false, false
		t.goes(pick(dispatch, "leave", "awake"))
	case "leave": // wakeDispatcher
		e.dispatch = true
		t.goes("awake")
	case "awake": // asleep.Store, of side's sleep
		side.asleep = false
		t.goes("look")
	case "lead": // select
		switch {
		case side.wake:
			side.wake = false
			t.goes("slept")
		case here == looksBeforeItClearsTheRouse && !t.fine:
			t.goes("clear")
		case here == leadsBehindItsLook && e.leader == 0:
			t.goes("lead on")
		default:
			t.call("prepare", "led")
		}
	case "led": // setLeader(nil), if the doorbell was read
		if t.fine {
			e.leader = 0
			t.call(x.either(hearsSlotsFirst, "slot", "group"), x.either(leadsBehindItsLook, "lead", "lead on"))
		} else {
			t.goes(x.either(looksBeforeItClearsTheRouse, "lead", "clear"))
		}
	case "clear": // SetReadDeadline
		e.late, t.fine = false, true
		t.goes("lead")
		if here == looksBeforeItClearsTheRouse {
			t.call("prepare", "led")
		}
	case "lead on": // setLeader(wake)
		e.leader = 1 + t.slot
		t.goes("lead")
		if here == leadsBehindItsLook {
			t.call("prepare", "led")
		}

	// Read of the doorbell: package poll's prepareRead, waiters' ready, and waitRead.

	case "prepare":
		if t.fine = !e.late; t.fine {
			e.edge = false
		}
		t.goes(pick(t.fine, x.ready(), ""))
	case "drain":
		e.queue = false
		t.goes(x.either(drainsBehindItsLook, "poll", "set asleep"))
	case "set asleep": // asleep.Set
		x.set(&e.asleep, 0)
		t.goes(x.either(setsBehindItsLook, "poll", "pending"))
	case "pending":
		drains := x.drains && here == drainsBehindItsLook
		t.goes(pick(peer.group, "", x.either(setsBehindItsLook, "set asleep", pick(drains, "drain", "poll"))))
	case "poll":
		if !e.late && !e.edge {
			return false
		}
		if t.fine = !e.late; t.fine {
			e.edge = false
		}
		t.goes(pick(t.fine, x.ready(), ""))

	// seenCounts' collect.

	case "group": // groups.Load
		news := peer.group && here != hearsSlotsFirst
		peer.group = false
		t.goes(pick(news, "slot", ""))
	case "slot": // slots.Load
		if peer.slots[t.to] {
			peer.slots[t.to] = false
			t.call("deliver", "seen")
		} else {
			t.goes("seen")
		}
	case "seen":
		t.to = 1 - t.to
		t.goes(pick(t.to == 1, "slot", x.either(hearsSlotsFirst, "group", "")))

	// session's Wake, with serve, and side's signal.

	case "deliver": // wants.Load
		serves := x.idles && t.end == 1
		t.goes(pick(e.sides[t.to].wants, "signal", pick(serves, "start to serve", "")))
	case "start to serve": // serving.CompareAndSwap
		if !m.idle.serving {
			m.idle.serving, m.idle.served = true, true
		}
		t.goes("")
	case "signal": // asleep.Load
		t.goes(pick(e.sides[t.to].asleep, "rouse", "put token"))
	case "put token":
		e.sides[t.to].wake = true
		t.goes(x.either(looksOnceForSleepers, "", "still awake?"))
	case "still awake?": // asleep.Load
		t.goes(pick(e.sides[t.to].asleep, "rouse", ""))
	case "rouse": // under mu
		e.sides[t.to].wake = true
		if e.sleeps[t.to] == 1 {
			e.sleeps[t.to], e.roused = 2, true
			e.unwoken--
		}
		t.goes(pick(e.leader == 1+t.to, "rouse leader", ""))
	case "rouse leader": // SetReadDeadline
		e.late = true
		t.goes("")

	// The dispatcher.

	case "dispatched":
		if t.fine {
			e.roused = false
			t.call(x.either(hearsSlotsFirst, "slot", "group"), "dispatches?")
		} else {
			e.late = false // SetReadDeadline
			t.call("prepare", "dispatched")
		}
	case "dispatches?": // dispatches
		t.goes("dispatch")
		if e.roused && (e.unwoken == 0 || here == dispatcherLeavesSleepers) {
			e.led = false
		} else {
			t.call("prepare", "dispatched")
		}
	case "dispatch": // <-dispatch
		if !e.dispatch {
			return false
		}
		e.dispatch = false
		t.call("prepare", "dispatched")

	// The idle poller's pollIdle, with waiters' Rest.

	case "poll idle": // Rest, under mu
		if !m.idle.listed {
			return false
		}
		m.idle.listed = false
		dispatch := !e.led && here != restsNever
		e.led = e.led || dispatch
		e.roused = e.roused && (here == leavesBehindARest || here == restsNever)
		t.goes(pick(dispatch, "have dispatched", "poll on"))
	case "have dispatched": // wakeDispatcher
		e.dispatch = true
		t.goes("poll on")
	case "poll on": // tryLockRx
		used := 1+r.polled != m.idle.seen
		switch {
		case r.locked:
			m.idle.listed = true
			t.goes("poll idle")
		case used:
			m.idle.seen, m.idle.listed = 1+r.polled, true
			t.goes("poll idle")
		default:
			r.locked = true
			t.goes(x.either(goesAwayBehindItsLook, "watch", "away"))
		}
	case "away": // away.Store
		m.idle.away = true
		switch t.goes("watch"); here {
		case goesAwayBehindItsLook:
			t.goes("settle")
		case watchesBehindItsLook:
			t.call(c.next(false), "watch")
		}
	case "watch": // ep.Arm, then progressLocked
		x.set(&c.sleep, 0)
		if t.goes("settle"); here != watchesBehindItsLook {
			t.call(c.next(false), x.either(goesAwayBehindItsLook, "away", "settle"))
		}
	case "settle": // settleLocked, and its look at wants
		t.goes("polled")
		if t.got && side.wants {
			t.call("signal", "polled")
		}
		t.got = false
	case "polled": // rxMu.Unlock
		r.locked = false
		t.goes("poll idle")

	// The goroutine of session's serve.

	case "serve": // lockRx
		if !m.idle.served || r.locked {
			return false
		}
		m.idle.served, r.locked = false, true
		t.goes("progress")
	case "progress": // serving.Store, then progressLocked
		m.idle.serving = false
		t.call(c.next(false), "settle served")
	case "settle served": // settleLocked, and its look at wants
		t.goes("served")
		if t.got && side.wants {
			t.call("signal", "served")
		}
		t.got = false
	case "served": // rxMu.Unlock
		r.locked = false
		t.goes(x.either(servesWithoutJoining, "serve", "join served"))
	case "join served": // enlist
		m.idle.enlist()
		t.goes("serve")

	// The goroutine that interrupts a Read, after a signal without a message.

	case "signals":
		t.call("signal", "interrupt")
	case "interrupt": // state.Or
		side.stop = true
		t.call("signal", "over")
	default:
		panic("no step " + t.name())
	}
	return true
}
