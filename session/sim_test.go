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

// The simulation: two sessions over the twin in virtual time, used by actors that read, write,
// interrupt, close, abort and die. The seed determines what they do, the kind of endpoint and its
// faults.
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

// TestSimulationInRealTime runs some seeds at the same time, outside of bubbles: waits poll before they
// sleep, and the timing is the machine's.
func TestSimulationInRealTime(t *testing.T) {
	inRealTime(64, func(seed uint64) {
		m := newSim(t, 1_300_000+seed, 4)
		for m.end == cutWire { // it would take a minute
			m.end = ending(m.r.IntN(int(endings)))
		}
		m.net.Faults.LateBy = 0
		m.real = true
		m.patient()
		m.spin()
		m.run()
	})
}

// TestCutWritesInRealTime makes other goroutines poll while a Read waits, so that what they find comes
// between the Read's looks.
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
	// virtualLimit is far longer than any timeout of the sessions.
	virtualLimit = 5 * time.Minute
	// realLimit finds a run in which not even virtual time passes.
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
	lastByte               // one end closes when it has read all bytes, without reading the end
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
	who   int           // which end does it
	after time.Duration // the time until then
	cut   bool          // the Writes of who are cut short, and the last one follows directly after such a Write
	pry   bool          // other goroutines poll while a Read waits, and no actor rests
	real  bool          // in real time, without long rests
	long  bool          // Writes are so long that they go to an inbox in pieces
	lent  float64       // the share of Writes and Reads in lent memory
	sides [2]*party

	mu         sync.Mutex
	violations []twin.Violation
}

// party is one end with its actors.
type party struct {
	*sim
	id    int
	s     *session.Session
	ep    *twin.Endpoint
	total int64 // bytes that it is to write

	accepted atomic.Int64 // bytes that its Writes have taken
	received int64
	readErr  error // how reading ended
	writeErr error // how writing ended, nil: all was written
	closed   atomic.Bool

	movedTo, peerMove atomic.Int64 // the positions at which this end, and its peer, have moved back; -1: it has not

	urgentSent atomic.Uint64
	stop       chan struct{} // closed when reading and writing are over
	ended      chan struct{} // closed when this end has done what ends the connection
	giveBack   func()        // ends a loan after Close; nil: there is none
}

// cuts reports whether this end's Writes are cut short.
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

// wrapsAfter is the number of messages after which the counts wrap in two of three seeds, as signed or
// unsigned numbers. Most seeds send more.
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

// live runs one end from Negotiate to Closed.
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

// ends ends the connection in the simulation's way after the given time, unless reading and writing have
// ended before.
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
