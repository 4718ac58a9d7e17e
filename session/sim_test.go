package session_test

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

// The simulation: two sessions over the twin in virtual time, used by actors
// that read, write, interrupt, close, abort and die as the seed says, over
// whatever endpoint and faults the seed says.
var (
	simSeed  = flag.Uint64("sim.seed", 0, "replay this seed of the simulation, and tell what happens")
	simFirst = flag.Uint64("sim.first", 1, "first seed of the simulation")
	simCount = flag.Uint64("sim.count", 400, "number of seeds of the simulation")
	simReal  = flag.Uint64("sim.real", 200, "number of seeds of TestCutWritesInRealTime")
)

func TestSimulation(t *testing.T) {
	first, count := *simFirst, *simCount
	if *simSeed != 0 {
		first, count = *simSeed, 1
	} else if testing.Short() {
		count = min(count, 50)
	}
	for seed := first; seed < first+count; seed++ {
		simulate(t, seed)
		if t.Failed() {
			return
		}
	}
}

// TestSimulationInRealTime runs some seeds side by side, outside of bubbles: with
// polling before sleep, and with whatever timing the machine has.
func TestSimulationInRealTime(t *testing.T) {
	inRealTime(64, func(seed uint64) {
		m := newSim(t, 1_300_000+seed, 4)
		for m.end == cutWire { // takes a minute
			m.end = ending(m.r.IntN(int(endings)))
		}
		m.net.Faults.LateBy = 0
		m.real = true
		m.patient()
		m.spin()
		m.run()
	})
}

// TestCutWritesInRealTime: others look while a Read waits, and what they find comes
// between that Read's looks.
func TestCutWritesInRealTime(t *testing.T) {
	inRealTime(*simReal, func(seed uint64) {
		m := newSim(t, 2_000_000+seed, 1)
		f := &m.net.Faults
		m.net.MaxLatency = 3 * time.Millisecond
		f.Late, f.Linger, f.LingerFor = 0, 0.2, m.net.MaxLatency
		m.pry = true
		m.patient()
		m.spin()
		m.run()
	})
}

const (
	// virtualLimit is far beyond every bound that the sessions promise.
	virtualLimit = 5 * time.Minute
	// realLimit finds what does not even let virtual time pass.
	realLimit = 2 * time.Minute
)

func simulate(t *testing.T, seed uint64) {
	bubble(t, fmt.Sprintf("go test ./session -run TestSimulation -sim.seed=%d", seed), func(t *testing.T) {
		newSim(t, seed, 4).run()
	})
}

func inRealTime(seeds uint64, f func(seed uint64)) {
	const atOnce = 8
	turn := make(chan struct{}, atOnce)
	var all sync.WaitGroup
	for seed := range seeds {
		turn <- struct{}{}
		all.Go(func() {
			defer func() { <-turn }()
			f(seed)
		})
	}
	all.Wait()
}

// ending is how a simulated connection ends.
type ending int

func (e ending) String() string {
	return [...]string{"orderly", "close after the last byte", "early close", "early abort", "death", "cut wire"}[e]
}

const (
	orderly  ending = iota // both write all, shut down, read to the end, close
	lastByte               // one closes when it has read all bytes, without looking for the end
	earlyClose
	earlyAbort
	death
	cutWire
	endings
)

type sim struct {
	t     *testing.T
	seed  uint64
	r     *rand.Rand
	net   twin.Config
	cfg   [2]session.Config
	end   ending
	who   int           // to end it
	after time.Duration // until then
	cut   bool          // who's Writes are cut short, and the last one comes right after such a one
	pry   bool          // others look while a Read waits, and nobody rests
	real  bool          // in real time: no long rests
	long  bool          // Writes are so long that they go to an inbox in pieces
	lent  float64       // share of the Writes and Reads that are in lent memory
	sides [2]*party

	mu         sync.Mutex
	violations []twin.Violation
}

// party is one end, with its actors.
type party struct {
	*sim
	id    int
	s     *session.Session
	ep    *twin.Endpoint
	total int64 // bytes that it wants to write

	accepted atomic.Int64 // bytes that its Writes took
	received int64
	readErr  error // how reading ended
	writeErr error // how writing ended, nil: all was written
	closed   atomic.Bool

	movedTo, peerMove atomic.Int64 // where this end, or its peer, has moved back; -1: not

	urgentSent atomic.Uint64
	stop       chan struct{} // closed when reading and writing are over
	ended      chan struct{} // closed when this end has done what ends the connection
	giveBack   func()        // ends a loan after Close; nil: there is none
}

// cuts: this end's Writes are cut short.
func (p *party) cuts() bool { return p.cut && p.id == p.who }

func (p *party) peer() *party { return p.sides[1-p.id] }

func (m *sim) logf(format string, args ...any) {
	if *simSeed != 0 {
		m.t.Logf(format, args...)
	}
}

func (m *sim) errorf(format string, args ...any) {
	m.t.Helper()
	m.t.Errorf("seed %d (%v by %d after %v): %s", m.seed, m.end, m.who, m.after, fmt.Sprintf(format, args...))
}

// wrapsAfter is how many messages bring the counts of two in three seeds to where they wrap, as
// signed numbers or as unsigned ones: fewer than most seeds send.
const wrapsAfter = 20

func (m *sim) run() {
	m.logf("cut %v; %v by %d after %v\nendpoint %+v\npeer %+v\nsessions %+v", m.cut, m.end, m.who, m.after, m.net, m.net.PeerLimits, m.cfg)
	a, b := twin.Pair(m.net)
	for i, ep := range []*twin.Endpoint{a, b} {
		m.sides[i] = &party{sim: m, id: i, ep: ep, stop: make(chan struct{}), ended: make(chan struct{})}
		m.sides[i].total = int64(duration(m.r, 1, 400_000))
		switch {
		case m.cut && i == m.who:
			m.sides[i].total = 500_000
		case m.cut:
			m.sides[i].total %= 1000
		case m.long:
			m.sides[i].total *= 10
		}
	}
	m.cfg[1].Accepting = true
	for _, p := range m.sides {
		p.movedTo.Store(-1)
		p.peerMove.Store(-1)
		m.cfg[p.id].OnNote = p.sawNote
		p.s = session.New(p.ep, m.cfg[p.id])
	}
	for _, p := range m.sides {
		p.s.CountFrom([...]uint32{0, 1<<31 - wrapsAfter, 1<<32 - wrapsAfter}[m.seed%3])
	}
	var actors sync.WaitGroup
	for _, p := range m.sides {
		actors.Go(p.live)
	}
	all := make(chan struct{})
	go func() { actors.Wait(); close(all) }()
	began := time.Now()
	select {
	case <-all:
	case <-time.After(virtualLimit):
		m.errorf("stuck after %v\n%s", virtualLimit, stacks())
		a.Kill()
		b.Kill()
		<-all
	}
	m.logf("over after %v", time.Since(began))
	m.check()
}

// live is the life of one end.
func (p *party) live() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	err := p.s.Negotiate(ctx)
	p.logf("%d: negotiated: %v", p.id, err)
	if err != nil {
		p.readErr, p.writeErr = err, err
		close(p.stop)
		p.s.Abort()
		<-p.s.Closed()
		return
	}
	var both, others sync.WaitGroup
	both.Go(p.reads)
	both.Go(p.writes)
	if p.pry && !p.cuts() {
		for range 2 {
			others.Go(p.pries)
		}
	} else {
		others.Go(p.disturbs)
	}
	if p.id == p.who {
		others.Go(p.ends)
	}
	both.Wait()
	close(p.stop)
	if p.closed.CompareAndSwap(false, true) {
		err := p.s.Close()
		p.logf("%d: Close: %v", p.id, err)
	}
	others.Wait()
	if p.giveBack != nil {
		p.giveBack()
	}
	<-p.s.Closed()
	p.logf("%d: closed: %+v", p.id, p.s.Stats())
}

// ends does what the simulation's ending is, if the time for it comes.
func (p *party) ends() {
	defer close(p.ended)
	select {
	case <-p.stop:
		return
	case <-time.After(p.after):
	}
	p.logf("%d: %v", p.id, p.end)
	switch p.end {
	case earlyClose:
		if p.closed.CompareAndSwap(false, true) {
			p.s.Close()
		}
	case earlyAbort:
		if p.closed.CompareAndSwap(false, true) {
			p.s.Abort()
		}
	case death:
		p.ep.Kill()
	case cutWire:
		p.ep.Cut()
	}
	p.logf("%d: %v done", p.id, p.end)
}
