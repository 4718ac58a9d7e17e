package shm

import (
	"flag"
	"fmt"
	"hash/maphash"
	"strings"
	"testing"
)

var exploreMore = flag.Bool("shm.explore", false, "explore all orders of wake-ups, which takes longer")

// The explorer goes through all orders in which the goroutines at both ends of a link can act,
// from a message's place in the ring to the sleeper that it wakes. Each step is one access to
// what others see, in the very order in which the code makes them (explore_steps_test.go), but on
// plain values: so all states can be enumerated, and a mutant of a step be tried.
//
// It checks that messages come in order and none twice, and that when nothing can happen any
// more nobody waits, and no message is there that nobody has seen.

// scenario is what happens on a link. The operations are end 0's on slots 0 and 1, and end 1's.
type scenario struct {
	ops    [4]string // "w" writes all that is sent, "r" reads it; "": there is none
	sends  [2]string // on each slot: 'm' a message in the ring, 'c' one in a cell
	room   uint8     // for messages in a ring
	coarse bool      // what is between a ring's ends alone is one step
	direct [2]bool   // who sleeps at an end is woken by a token, without a doorbell
	drains bool      // the doorbells are sockets, whose queues have room for one ring
	leads  bool      // the dispatchers have left: who sleeps first leads
	stops  bool      // end 1's reader of slot 0 reads once more, which is interrupted
	idles  bool      // that reader reads once, and the idle poller and serve take the rest
}

// mutant is a bug that the explorer has to find.
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
	most     int  // states
	shortest bool // ways first, which takes more memory
	states   []reached
}

// reached is how a state was reached.
type reached struct {
	from   int32 // the state before
	thread uint8
}

// found is what is wrong.
type found string

func fail(format string, args ...any) { panic(found(fmt.Sprintf(format, args...))) }

// run returns what is wrong, and the way there.
func (x *explorer) run() (problem string) {
	type state struct {
		model
		number int32
	}
	hash := maphash.MakeSeed()
	list := []state{{model: x.begin()}}
	seen := make(map[uint64]struct{}, mostQuick) // by their hashes: two that share one are rarer than a bug here
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

// way is how a state was reached: the steps of each thread that goes on.
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

// final checks a state in which nothing more happens.
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

// atEnd1 has end 0's sleepers woken by tokens: what is explored is how end 1's are.
var atEnd1 = [2]bool{true, false}

// scenarios are what is explored.
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

// most bounds the states of a scenario, and mostQuick in a run that is not to take long.
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

// Each mutant is found, in this scenario.
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
