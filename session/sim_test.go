package session_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sanconn/san/session"
	"github.com/sanconn/san/session/twin"
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

const (
	// virtualLimit is far beyond every bound that the sessions promise.
	virtualLimit = 5 * time.Minute
	// realLimit finds what does not even let virtual time pass.
	realLimit = 2 * time.Minute
)

// bubble runs f in a bubble of its own and sees to it that a failure names what
// replays it.
func bubble(t *testing.T, replay string, f func(*testing.T)) {
	t.Helper()
	for !session.JanitorIdle() {
		runtime.Gosched()
	}
	stuck := time.AfterFunc(realLimit, func() {
		fmt.Fprintf(os.Stderr, "no virtual time passes: %s\n%s\n", replay, stacks())
		os.Exit(2)
	})
	defer stuck.Stop()
	over := false
	defer func() {
		if !over || t.Failed() {
			fmt.Fprintf(os.Stderr, "replay: %s\n", replay)
		}
	}()
	synctest.Test(t, func(t *testing.T) {
		f(t)
		for !session.JanitorIdle() {
			nap(time.Millisecond)
		}
	})
	over = true
}

func stacks() []byte {
	b := make([]byte, 1<<20)
	return b[:runtime.Stack(b, true)]
}

func simulate(t *testing.T, seed uint64) {
	bubble(t, fmt.Sprintf("go test ./session -run TestSimulation -sim.seed=%d", seed), func(t *testing.T) {
		newSim(t, seed, 4).run()
	})
}

// TestSimulationInRealTime runs some seeds side by side, outside of bubbles: with
// polling before sleep, and with whatever timing the machine has.
func TestSimulationInRealTime(t *testing.T) {
	inRealTime(32, func(seed uint64) {
		m := newSim(t, 1_300_000+seed, 4)
		for m.end == cutWire { // takes a minute
			m.end = ending(m.r.IntN(int(endings)))
		}
		m.net.Faults.LateBy = 0
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
		m.spin()
		m.run()
	})
}

func (m *sim) spin() {
	for i := range m.cfg {
		m.cfg[i].Spin = 20 * time.Microsecond
	}
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

const (
	orderly  ending = iota // both write all, shut down, read to the end, close
	lastByte               // one closes when it has read all bytes, without looking for the end
	earlyClose
	earlyAbort
	closeRead
	death
	cutWire
	endings
)

func (e ending) String() string {
	return [...]string{"orderly", "close after the last byte", "early close", "early abort", "close of reading", "death", "cut wire"}[e]
}

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
	pry   bool          // others look while a Read waits
	long  bool          // Writes are so long that they go to an inbox in pieces
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

	urgentSent atomic.Uint64
	stop       chan struct{} // closed when reading and writing are over
}

// cuts: this end's Writes are cut short.
func (p *party) cuts() bool { return p.cut && p.id == p.who }

func (p *party) peer() *party { return p.sides[1-p.id] }

// newSim is the simulation of a seed; in one of so many, Writes are cut.
func newSim(t *testing.T, seed uint64, cutIn int) *sim {
	m := &sim{t: t, seed: seed, r: rand.New(rand.NewPCG(seed, 1))}
	r := m.r
	m.net.Seed = seed
	m.net.Violated = func(v twin.Violation) {
		m.mu.Lock()
		m.violations = append(m.violations, v)
		m.mu.Unlock()
		m.logf("violation: %v", v)
	}
	m.net.Limits = m.limits()
	switch {
	case m.net.Limits.Ring():
		m.net.QueueBytes = pick(r, 8<<10, 16<<10, 64<<10)
	case r.IntN(4) == 0: // ends that differ
		l := m.limits()
		for l.Ring() {
			l = m.limits()
		}
		m.net.PeerLimits = &l
	}
	m.net.SendQueue = pick(r, 0, 0, session.ControlReserve+1, 64)
	m.net.RDMAQueue = pick(r, 0, 1, 2, 16)
	m.net.AllocBudget = pick(r, 0, 0, 4<<10, 64<<10)
	m.net.MaxLatency = duration(r, time.Microsecond, 2*time.Millisecond)
	m.net.Faults = twin.Faults{
		Late:    pick(r, 0, 0, 0.01, 0.05),
		LateBy:  pick(r, 0, 0, 300*time.Millisecond), // less than the bound of a cancel
		Expose:  pick(r, 0, 0, 0.3, 1),
		Local:   pick(r, 0, 0, 0.3, 1),
		Alloc:   pick(r, 0, 0, 0.3, 1),
		Busy:    pick(r, 0, 0.2),
		Tight:   pick(r, 0, 0, 0.3),
		Short:   pick(r, 0, 0.3),
		Stray:   pick(r, 0, 0.1),
		Linger:  pick(r, 0, 0, 0.01, 0.1),
		Evicted: pick(r, 0, 0, 0.3, 1),
	}
	for i := range m.cfg {
		c := &m.cfg[i]
		c.CloseTimeout = 2 * time.Minute // late messages add up
		c.Threshold = pick(r, 0, 1, 3000, 20_000, -1)
		c.ReceiveBudget = pick(r, 0, 1, 10_000, 100_000)
		c.SendBudget = pick(r, 0, 200, 5000, 50_000)
		c.Disable = pick[session.Feature](r, 0, 0, 0, session.FeatureRDMARead, session.FeatureRDMAWrite)
	}
	m.end = ending(r.IntN(int(endings)))
	if r.IntN(3) == 0 {
		m.end = orderly
	}
	if m.cut = r.IntN(cutIn) == 0; m.cut {
		m.hasten()
	}
	if m.end == cutWire && m.net.Limits.Ring() {
		m.end = earlyAbort
	}
	m.who = r.IntN(2)
	m.after = duration(r, time.Microsecond, 300*time.Millisecond)
	if m.end == death && r.IntN(2) == 0 {
		m.net.Faults.DieAt[m.who] = 1 + r.IntN(pick(r, 20, 300, 3000))
		m.after = time.Hour
	}
	if m.long = !m.cut && r.IntN(40) == 0; m.long {
		m.prolong()
	}
	return m
}

// longest is how long a Write is, longWrite one that goes in pieces.
const (
	longest   = 120_000
	longWrite = 1_500_000
)

// prolong gives an inbox room for such Writes.
func (m *sim) prolong() {
	r := m.r
	l := &m.net.Limits
	*l = session.Limits{
		MaxMessage: 16 << 10, MaxExpose: math.MaxInt, MaxRDMA: pick(r, 1<<20, 100_000), Threshold: 1 << 20, Inbox: 5000, InboxTo: 4 << 20,
		Window: pick(r, session.MinWindow, 64), CanRead: r.IntN(2) == 0, CanWrite: true,
	}
	m.net.PeerLimits = nil
	m.net.AllocBudget = pick(r, 0, 0, 1<<20)
	m.net.Faults.Alloc = pick(r, 0, 0, 0.3)
	for i := range m.cfg {
		c := &m.cfg[i]
		c.Threshold, c.Disable = pick(r, 0, 0, -1), 0
		c.SendBudget = pick(r, 0, 600_000)
		c.ReceiveBudget = pick(r, 0, 600_000)
	}
}

// hasten makes it likely that an offer is withdrawn while it is being read, and that the
// next Write and the end come while the reader looks.
func (m *sim) hasten() {
	r, l, f := m.r, &m.net.Limits, &m.net.Faults
	l.Window = max(l.Window, session.MinWindow)
	l.CanRead = true
	l.MaxExpose = max(l.MaxExpose, 1<<20)
	l.MaxRDMA = 1 << 20
	l.MaxMessage = 4096
	m.net.PeerLimits = nil
	f.Expose, f.Local, f.Evicted = 0, 0, 0
	f.Linger = pick(r, 0.01, 0.03, 0.1)
	for i := range m.cfg {
		c := &m.cfg[i]
		c.Threshold = pick(r, 0, 1, 3000)
		c.Disable = 0
	}
	m.end = pick(r, orderly, lastByte)
}

// limits of one of the kinds of provider that there could be.
func (m *sim) limits() session.Limits {
	r := m.r
	if r.IntN(3) == 0 { // a ring
		return session.Limits{MaxMessage: pick(r, session.MaxControl, 1000, 4096)}
	}
	l := session.Limits{
		MaxMessage: pick(r, session.MaxControl, 1000, 4096, 16<<10),
		MaxExpose:  pick(r, math.MaxInt, 1<<20, 3000),
		MaxRDMA:    pick(r, 1<<20, 20_000, 777),
		Threshold:  pick(r, 2048, 10_000, 1),
		Inbox:      pick(r, 0, 1, 500, 5000),
		InboxTo:    pick(r, 0, 0, 5000, 50_000),
	}
	l.Window = pick(r, session.MinWindow, session.MinWindow, session.MinWindow+7, 64)
	switch r.IntN(6) {
	case 0, 4:
		l.CanRead = true
	case 1:
		l.CanWrite = true
	case 2, 3:
		l.CanRead, l.CanWrite = true, true
	case 5:
		l.MaxExpose = 0
	}
	return l
}

func pick[T any](r *rand.Rand, from ...T) T { return from[r.IntN(len(from))] }

// duration is one between lo and hi, each order of magnitude as likely.
func duration(r *rand.Rand, lo, hi time.Duration) time.Duration {
	x := math.Log(float64(lo)) + r.Float64()*(math.Log(float64(hi))-math.Log(float64(lo)))
	return time.Duration(math.Exp(x))
}

func (m *sim) logf(format string, args ...any) {
	if *simSeed != 0 {
		m.t.Logf(format, args...)
	}
}

func (m *sim) errorf(format string, args ...any) {
	m.t.Helper()
	m.t.Errorf("seed %d (%v by %d after %v): %s", m.seed, m.end, m.who, m.after, fmt.Sprintf(format, args...))
}

func (m *sim) run() {
	m.logf("cut %v; %v by %d after %v\nendpoint %+v\npeer %+v\nsessions %+v", m.cut, m.end, m.who, m.after, m.net, m.net.PeerLimits, m.cfg)
	a, b := twin.Pair(m.net)
	for i, ep := range []*twin.Endpoint{a, b} {
		m.sides[i] = &party{sim: m, id: i, ep: ep, stop: make(chan struct{})}
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
	for _, p := range m.sides {
		p.s = session.New(p.ep, m.cfg[p.id])
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
	if p.end == closeRead && p.id == p.who {
		<-p.peer().stop // which would find EPIPE
	}
	if p.closed.CompareAndSwap(false, true) {
		err := p.s.Close()
		p.logf("%d: Close: %v", p.id, err)
	}
	others.Wait()
	<-p.s.Closed()
	p.logf("%d: closed: %+v", p.id, p.s.Stats())
}

// ends does what the simulation's ending is, if the time for it comes.
func (p *party) ends() {
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
	case closeRead:
		if err := p.s.CloseRead(); err != nil && !errors.Is(err, session.ErrClosed) {
			p.errorf("CloseRead: %v", err)
		}
	case death:
		p.ep.Kill()
	case cutWire:
		p.ep.Cut()
	}
	p.logf("%d: %v done", p.id, p.end)
}

// stream fills b with the bytes at a position of the stream that end id writes.
func stream(b []byte, seed uint64, id int, pos int64) {
	for i := range b {
		x := (uint64(pos) + uint64(i) + seed<<24 + uint64(id)<<60) * 0x9E3779B97F4A7C15
		x ^= x >> 29
		b[i] = byte(x * 0xBF58476D1CE4E5B9 >> 56)
	}
}

const (
	// offeredInline is how many bytes of a large Write come with its offer. Who has read
	// just those, then reads into a slice with room for the rest, has got nothing yet
	// when the offer is withdrawn.
	offeredInline = 1 << 10
	cutWrite      = 50_000
	readWhole     = 150_000

	usedWrite = 0xEE // what a slice holds after Write returned
	usedRead  = 0x77 // … and after Read did
)

func (p *party) writes() {
	r := rand.New(rand.NewPCG(p.seed, uint64(10+p.id)))
	total := p.total
	for pos := int64(0); pos < total; {
		n := int(duration(r, 1, longest))
		switch {
		case p.cuts():
			n = cutWrite
		case p.long:
			n = int(duration(r, 1, longWrite))
		}
		n = int(min(int64(n), total-pos))
		b := make([]byte, n)
		stream(b, p.seed, p.id, pos)
		var k int
		var err error
		var deadline *time.Timer
		if p.cuts() && r.IntN(4) > 0 {
			// The offer, and the read of it that it is to meet.
			d := time.Duration(3 * r.Float64() * float64(p.net.MaxLatency))
			deadline = time.AfterFunc(d, func() { p.s.InterruptWrite(true) })
		}
		if r.IntN(4) == 0 {
			v, keep := split(r, b), 0
			keep = len(v)
			var k64 int64
			k64, err = p.s.WriteBuffers(v)
			k = int(k64)
			if len(v) != keep {
				p.errorf("%d: WriteBuffers changed its argument", p.id)
			}
		} else {
			k, err = p.s.Write(b)
		}
		if deadline != nil {
			deadline.Stop()
		}
		fill(b, usedWrite)
		if k < 0 || k > n || (k < n) != (err != nil) {
			p.errorf("%d: Write of %d bytes: %d, %v", p.id, n, k, err)
			return
		}
		pos += int64(k)
		if p.ep.Killed() {
			p.writeErr = errDead // nobody is there to whom Write could return
			return
		}
		p.accepted.Store(pos)
		p.logf("%d: Write %d: %d, %v → %d", p.id, n, k, err, pos)
		if errors.Is(err, session.ErrInterrupted) {
			if !p.cuts() {
				p.rest(r)
			} else if r.IntN(4) == 0 { // the last one
				total = min(total, pos+int64(duration(r, 1, 2000)))
			}
			p.s.InterruptWrite(false)
			continue
		}
		if err != nil {
			p.writeErr = err
			return
		}
		if r.IntN(8) == 0 {
			p.rest(r)
		}
	}
	if p.end == lastByte && p.id == p.who {
		return // Close says it all
	}
	if err := p.s.CloseWrite(); err != nil {
		p.writeErr = err
	}
	p.logf("%d: CloseWrite: %v", p.id, p.writeErr)
}

func split(r *rand.Rand, b []byte) (v [][]byte) {
	for len(b) > 0 {
		n := min(len(b), int(duration(r, 1, 20_000)))
		v = append(v, b[:n:n])
		b = b[n:]
	}
	return v
}

func (p *party) reads() {
	r := rand.New(rand.NewPCG(p.seed, uint64(20+p.id)))
	header := false
	var old [][]byte // slices of Reads that returned
	defer func() {
		for _, b := range old {
			if i := changed(b, usedRead); i >= 0 {
				p.errorf("%d: byte %d of %d was touched after Read returned", p.id, i, len(b))
				return
			}
		}
	}()
	for {
		size := int(duration(r, 1, readWhole))
		if p.cut && !p.cuts() {
			size = readWhole
			if header = !header; header {
				size = offeredInline
			}
		}
		b := make([]byte, size)
		n, err := p.s.Read(b)
		header = header && n == len(b)
		if n < 0 || n > len(b) || n == 0 && err == nil || n > 0 && err != nil {
			p.errorf("%d: Read of %d bytes: %d, %v", p.id, len(b), n, err)
			return
		}
		want := make([]byte, n)
		stream(want, p.seed, 1-p.id, p.received)
		if !bytes.Equal(b[:n], want) {
			i := 0
			for b[i] == want[i] {
				i++
			}
			p.errorf("%d: wrong byte at %d (%d of %d in this Read): %x instead of %x", p.id, p.received+int64(i), i, n, b[i:min(n, i+8)], want[i:min(n, i+8)])
			p.whereFrom(b[i:n])
			p.readErr = errWrongBytes
			p.s.Abort()
			return
		}
		fill(b, usedRead)
		if old = append(old, b); len(old) > 20 {
			if i := changed(old[0], usedRead); i >= 0 {
				p.errorf("%d: byte %d of %d was touched after Read returned", p.id, i, len(old[0]))
			}
			old = old[1:]
		}
		p.received += int64(n)
		p.logf("%d: Read %d: %d, %v → %d", p.id, len(b), n, err, p.received)
		if errors.Is(err, session.ErrInterrupted) {
			p.rest(r)
			p.s.InterruptRead(false)
			continue
		}
		if p.end == lastByte && p.id == p.who && p.received == p.peer().total {
			err = io.EOF
		}
		if err != nil {
			p.readErr = err
			return
		}
		if r.IntN(8) == 0 {
			p.rest(r)
		}
	}
}

// whereFrom says which bytes of the stream came instead.
func (p *party) whereFrom(b []byte) {
	all := make([]byte, p.peer().total)
	stream(all, p.seed, 1-p.id, 0)
	if len(b) > 64 {
		b = b[:64]
	}
	p.errorf("%d: %d bytes there are those of position %d", p.id, len(b), bytes.Index(all, b))
}

var errDead = errors.New("dead")

var errWrongBytes = errors.New("wrong bytes")

// rest lets some time pass, at times more than any other thing takes; now and then
// the connection idles for long enough to give back what it keeps for its writes.
func (p *party) rest(r *rand.Rand) {
	if p.pry {
		return // it takes real time
	}
	least, most := time.Microsecond, 20*time.Millisecond
	if r.IntN(6) == 0 {
		least, most = most, 3*time.Second
	}
	nap(duration(r, least, most))
}

// disturbs interrupts, sends urgent data and changes settings, until reading
// and writing are over.
func (p *party) disturbs() {
	r := rand.New(rand.NewPCG(p.seed, uint64(30+p.id)))
	often := pick(r, 0, 0, 50*time.Microsecond, 2*time.Millisecond)
	if often == 0 {
		return
	}
	last := uint64(0)
	for range 300 { // not for ever: some seeds interrupt faster than anything moves
		select {
		case <-p.stop:
			return
		case <-time.After(duration(r, often/10, often*10)):
		}
		switch r.IntN(6) {
		case 0:
			p.s.InterruptRead(true)
		case 1:
			p.s.InterruptWrite(true)
		case 2:
			b := binary.LittleEndian.AppendUint64(nil, p.urgentSent.Add(1))
			_, err := p.s.WriteUrgent(b)
			p.logf("%d: WriteUrgent: %v", p.id, err)
		case 3:
			b := make([]byte, 100)
			n, err := p.s.ReadUrgent(b)
			if errors.Is(err, session.ErrNoUrgent) {
				continue
			}
			got := uint64(0)
			if n == 8 {
				got = binary.LittleEndian.Uint64(b)
			}
			if err != nil || n != 8 || got <= last || got > p.peer().urgentSent.Load() {
				p.errorf("%d: urgent data: %d bytes, %d after %d, %v", p.id, n, got, last, err)
			}
			last = got
		case 4:
			p.s.SetKeepAlivePeriod(duration(r, 10*time.Second, 30*time.Second))
		case 5:
			p.s.Stats()
		}
	}
}

// pries looks again and again while a Read waits, so that it is another's look that
// finds what ends the transfers into its slice.
func (p *party) pries() {
	b := make([]byte, 100)
	for {
		select {
		case <-p.stop:
			return
		default:
			p.s.ReadUrgent(b)
		}
	}
}

func fill(b []byte, v byte) {
	for i := range b {
		b[i] = v
	}
}

// changed is the index of the first byte that is not v, -1 if there is none.
func changed(b []byte, v byte) int {
	for i := range b {
		if b[i] != v {
			return i
		}
	}
	return -1
}

// check holds what happened against what may happen.
func (m *sim) check() {
	for _, v := range m.violations {
		if v.Kind == twin.RevokedAccess && m.end != orderly && m.end != closeRead {
			continue // the owner of the memory has ended the connection
		}
		m.errorf("%v", v)
	}
	for _, p := range m.sides {
		exposed := 0
		if l := m.net.PeerLimits; m.net.Limits.Inbox > 0 || l != nil && l.Inbox > 0 {
			exposed = 1 // an inbox goes with the endpoint, and Close may overtake who takes back one that was left
		}
		if left := p.ep.Left(); left.Allocated != 0 || left.Exposed > exposed && m.end == orderly {
			m.errorf("%d: left behind: %+v", p.id, left)
		}
		if !p.ep.Retired() {
			m.errorf("%d: the endpoint was not given back", p.id)
		}
		p.checkReading()
		p.checkWriting()
	}
}

func (p *party) checkReading() {
	sent := p.peer().accepted.Load()
	ended := p.who == p.id // this end did what ends the connection
	err := p.readErr
	switch {
	case errors.Is(err, io.EOF):
		switch {
		case p.end == closeRead && ended:
		case p.end == death && !ended:
			if p.received < sent {
				p.errorf("%d: EOF after %d bytes of %d", p.id, p.received, sent)
			}
		case p.received != sent:
			p.errorf("%d: EOF after %d bytes of %d", p.id, p.received, sent)
		}
	case errors.Is(err, session.ErrClosed):
		if !ended || p.end != earlyClose && p.end != earlyAbort {
			p.errorf("%d: reading ended with %v", p.id, err)
		}
	case errors.Is(err, syscall.ECONNRESET):
		if p.end == orderly || p.end == lastByte || p.end == closeRead || p.end == cutWire {
			p.errorf("%d: reading ended with %v", p.id, err)
		}
		if p.end == earlyClose && p.received != sent {
			// There was unread data there; what was written comes first.
			p.errorf("%d: reset after %d bytes of %d", p.id, p.received, sent)
		}
	case errors.Is(err, syscall.ETIMEDOUT):
		if p.end != cutWire {
			p.errorf("%d: reading ended with %v", p.id, err)
		}
	default:
		if p.end != death && p.end != cutWire { // negotiation may have failed
			p.errorf("%d: reading ended with %v", p.id, err)
		}
	}
	if p.received > p.peer().total {
		p.errorf("%d: %d bytes of %d", p.id, p.received, p.peer().total)
	}
}

func (p *party) checkWriting() {
	ended := p.who == p.id
	ok := false
	switch err := p.writeErr; {
	case err == nil:
		ok = true
	case p.end == orderly, p.end == closeRead:
	case errors.Is(err, session.ErrClosed):
		ok = ended && (p.end == earlyClose || p.end == earlyAbort)
	case errors.Is(err, syscall.EPIPE), errors.Is(err, syscall.ECONNRESET):
		ok = p.end != cutWire
	case errors.Is(err, syscall.ETIMEDOUT):
		ok = p.end == cutWire
	default:
		ok = p.end == death || p.end == cutWire
	}
	if !ok {
		p.errorf("%d: writing ended with %v", p.id, p.writeErr)
	}
}
