package shm

import (
	"flag"
	"fmt"
	"hash/maphash"
	"strings"
	"testing"
)

var exploreMore = flag.Bool("shm.explore", false, "explore all orders of wake-ups, which takes longer")

// The explorer goes through all orders in which the goroutines at both ends of a link can act, from
// writing a message into the ring to waking the sleeper that waits for it. Each step is one access to
// memory that other goroutines see. The steps have the same order as in the code
// (explore_steps_test.go), but work on plain values. So all states can be enumerated, and a mutant of a
// step can be tried.
//
// It checks that messages come in order and none twice. In each state in which nothing more can happen,
// nobody may still wait, and every message must have been seen.

// scenario is what happens on a link. The first two operations are those of end 0 on slots 0 and 1, the
// others those of end 1.
type scenario struct {
	ops    [4]string // "w" writes all of sends, "r" reads it; "": no operation
	sends  [2]string // on each slot: 'm' a message in the ring, 'c' one in a cell
	room   uint8     // for messages in a ring
	coarse bool      // steps that concern only the two ends of a ring are merged
	direct [2]bool   // a sleeper of this end is woken by a token, without a doorbell
	drains bool      // the doorbells are sockets, whose queues have room for one ring
	leads  bool      // the dispatchers do not wait at first: the first sleeper leads
	stops  bool      // end 1's reader of slot 0 reads once more, and is interrupted
	idles  bool      // that reader reads once, and the idle poller and serve take the other messages
}

// mutant is a fault in a step, which the explorer has to find.
type mutant int

const (
	sound mutant = iota
	armsBehindItsLook
	loadsCellsFirst
	publishesCellBeforeItsPlace
	publishesBehindItsRing
	setsWithoutCount
	clearsTheCount
	keepsTheHead
	freesCellsInSilence
	setsBehindItsLook
	drainsBehindItsLook
	ringsBeforeItTells
	tellsTheGroupFirst
	hearsSlotsFirst
	looksOnceForSleepers
	leavesSleepers
	dispatcherLeavesSleepers
	leadsBehindItsLook
	looksBeforeItClearsTheRouse
	wantsBehindItsLook
	goesAwayBehindItsLook
	watchesBehindItsLook
	servesWithoutJoining
	sleepsWithoutJoining
	restsNever
	leavesBehindARest
)

// explorer explores a scenario.
type explorer struct {
	scenario
	mutant
	most     int  // the most states to explore
	shortest bool // finds the shortest way to a fault, which takes more memory
	states   []reached
}

// reached is how a state was reached.
type reached struct {
	from   int32 // the state before
	thread uint8
}

// found is the description of a fault.
type found string

func fail(format string, args ...any) { panic(found(fmt.Sprintf(format, args...))) }

// run returns the description of a fault that it has found, and the steps that lead there.
func (x *explorer) run() (problem string) {
	type state struct {
		model
		number int32
	}
	hash := maphash.MakeSeed()
	list := []state{{model: x.begin()}}
	seen := make(map[uint64]struct{}, mostQuick) // by hash: a collision is less likely than a fault here
	x.states = make([]reached, 1, mostQuick)
	var m state
	defer func() {
		if p := recover(); p != nil {
			f, ok := p.(found)
			if !ok {
				panic(p)
			}
			problem = string(f) + x.way(m.number)
		}
	}()
	for len(list) > 0 && len(x.states) < x.most {
		if x.shortest {
			m, list = list[0], list[1:]
		} else {
			m, list = list[len(list)-1], list[:len(list)-1]
		}
		moved := false
		for i := range m.threads {
			n := state{m.model, int32(len(x.states))}
			if !x.step(&n.model, &n.threads[i]) {
				continue
			}
			moved = true
			h := maphash.Comparable(hash, n.model)
			if _, ok := seen[h]; !ok {
				seen[h] = struct{}{}
				x.states = append(x.states, reached{m.number, uint8(i)})
				list = append(list, n)
			}
		}
		if !moved {
			x.final(&m.model)
		}
	}
	return ""
}

// way returns the steps that lead to a state, each with its thread.
func (x *explorer) way(number int32) string {
	var threads []uint8
	for ; number > 0; number = x.states[number].from {
		threads = append(threads, x.states[number].thread)
	}
	var b strings.Builder
	m, last := x.begin(), uint8(mostThreads)
	for i := len(threads) - 1; i >= 0; i-- {
		t := &m.threads[threads[i]]
		if threads[i] != last {
			last = threads[i]
			fmt.Fprintf(&b, "\n%s", threadNames[last])
		}
		fmt.Fprintf(&b, ": %s", t.name())
		x.step(&m, t)
	}
	fmt.Fprintf(&b, "\n%+v", m)
	return b.String()
}

// final checks a state in which nothing more can happen.
func (x *explorer) final(m *model) {
	for i, op := range x.ops {
		if t := &m.threads[i]; op != "" && t.name() != "over" {
			fail("%s waits: %s", threadNames[i], t.name())
		}
	}
	if polled := int(m.conns[0].r.polled); x.idles && polled != len(x.sends[0]) {
		fail("%d of %d messages are seen", polled, len(x.sends[0]))
	}
}

// atEnd1: end 0's sleepers are woken by tokens, so that only the wake-ups at end 1 are explored.
var atEnd1 = [2]bool{true, false}

// scenarios are the scenarios that are explored.
var scenarios = map[string]scenario{
	"a ring":                     {ops: [4]string{"w", "", "r", ""}, sends: [2]string{"mccmm"}, room: 2, direct: [2]bool{true, true}},
	"a link":                     {ops: [4]string{"w", "", "r", ""}, sends: [2]string{"mm"}, room: 3, coarse: true, direct: atEnd1},
	"a link with sockets":        {ops: [4]string{"w", "", "r", ""}, sends: [2]string{"mm"}, room: 3, coarse: true, direct: atEnd1, drains: true},
	"a link, and a full ring":    {ops: [4]string{"w", "", "r", ""}, sends: [2]string{"mm"}, room: 1},
	"both ways":                  {ops: [4]string{"w", "r", "r", "w"}, sends: [2]string{"m", "m"}, room: 1, coarse: true},
	"both ways, and a full ring": {ops: [4]string{"w", "r", "r", "w"}, sends: [2]string{"m", "mm"}, room: 1, coarse: true, direct: atEnd1, leads: true},
	"two readers":                {ops: [4]string{"w", "w", "r", "r"}, sends: [2]string{"m", "m"}, room: 3, coarse: true, direct: atEnd1},
	"two readers, one leads":     {ops: [4]string{"w", "w", "r", "r"}, sends: [2]string{"m", "m"}, room: 3, coarse: true, direct: atEnd1, leads: true},
	"an interrupt":               {ops: [4]string{"", "w", "r", ""}, sends: [2]string{"", "m"}, room: 3, coarse: true, direct: atEnd1, leads: true, stops: true},
	"an interrupt of one of two": {ops: [4]string{"", "w", "r", "r"}, sends: [2]string{"", "m"}, room: 3, coarse: true, direct: atEnd1, leads: true, stops: true},
	"a message, an interrupt":    {ops: [4]string{"w", "", "r", ""}, sends: [2]string{"m"}, room: 3, coarse: true, direct: atEnd1, stops: true},
	"nobody reads":               {ops: [4]string{"w", "", "", ""}, sends: [2]string{"mm"}, room: 3, coarse: true, direct: atEnd1, idles: true},
	"an idle poller":             {ops: [4]string{"w", "", "r", ""}, sends: [2]string{"mm"}, room: 3, coarse: true, direct: atEnd1, idles: true},
}

// most bounds the states of a scenario, mostQuick those in a short run.
const (
	most      = 20_000_000
	mostQuick = 35_000
)

func TestAllOrders(t *testing.T) {
	for name, s := range scenarios {
		t.Run(name, func(t *testing.T) {
			x := explorer{scenario: s, most: mostQuick}
			if *exploreMore {
				x.most = most
			}
			if problem := x.run(); problem != "" {
				t.Error(problem)
			}
			t.Logf("%d states, all: %v", len(x.states), len(x.states) < x.most)
		})
	}
}

// Each mutant is found in the scenario that is given for it.
func TestMutantsAreFound(t *testing.T) {
	for m, tt := range map[mutant]struct{ name, scenario string }{
		armsBehindItsLook:           {"sets its alarm behind its last look", "a ring"},
		loadsCellsFirst:             {"loads the cells' tail before the ring's", "a ring"},
		publishesCellBeforeItsPlace: {"publishes a cell before its place", "a ring"},
		publishesBehindItsRing:      {"looks at the alarm before it publishes", "a ring"},
		setsWithoutCount:            {"sets an alarm without counting", "a ring"},
		clearsTheCount:              {"clears an alarm with its count", "a ring"},
		keepsTheHead:                {"sleeps without having told what it has freed", "a ring"},
		freesCellsInSilence:         {"wakes nobody for a free cell", "a ring"},
		setsBehindItsLook:           {"sets asleep behind its look at the bell", "a link"},
		drainsBehindItsLook:         {"drains the doorbell behind that look", "a link with sockets"},
		ringsBeforeItTells:          {"rings before it tells", "a link"},
		tellsTheGroupFirst:          {"tells the group before the slot", "a link"},
		hearsSlotsFirst:             {"looks at the slots before the group", "a link"},
		looksOnceForSleepers:        {"does not look for a sleeper behind its token", "an interrupt"},
		leavesSleepers:              {"leaves the doorbell while others sleep", "two readers, one leads"},
		dispatcherLeavesSleepers:    {"has the dispatcher leave while others sleep", "two readers"},
		leadsBehindItsLook:          {"leads on behind its look for a token", "an interrupt"},
		looksBeforeItClearsTheRouse: {"clears a rouse behind its look for a token", "an interrupt"},
		wantsBehindItsLook:          {"tells what it wants behind its last look", "a link"},
		goesAwayBehindItsLook:       {"takes a session off the list behind its look", "an idle poller"},
		watchesBehindItsLook:        {"arms an idle session behind its look", "nobody reads"},
		servesWithoutJoining:        {"serves a session and leaves it off the list", "nobody reads"},
		sleepsWithoutJoining:        {"has slept and leaves its session off the list", "an idle poller"},
		restsNever:                  {"has nobody wait at the doorbell for idle sessions", "an idle poller"},
		leavesBehindARest:           {"has the dispatcher leave behind a Rest", "an idle poller"},
	} {
		x := explorer{scenario: scenarios[tt.scenario], mutant: m, most: most, shortest: *exploreMore}
		problem := x.run()
		if problem == "" {
			t.Errorf("not found: one that %s, in %d states", tt.name, len(x.states))
		} else if testing.Verbose() {
			t.Logf("%s: %d states: %s", tt.name, len(x.states), problem)
		}
	}
}
