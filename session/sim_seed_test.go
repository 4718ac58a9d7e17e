package session_test

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

// newSim makes the simulation of a seed. In one of cutIn simulations Writes are cut.
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
	m.drawNet()
	m.drawSessions()
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
	if !m.cut {
		m.lent = pick(r, 0, 0.1, 0.5, 1)
	}
	return m
}

// drawNet draws the endpoints' properties, and the faults.
func (m *sim) drawNet() {
	r := m.r
	m.net.Limits = m.limits()
	switch {
	case m.net.Limits.Ring():
		m.net.QueueBytes = pick(r, 8<<10, 16<<10, 64<<10)
	case r.IntN(4) == 0: // the ends differ
		l := m.limits()
		for l.Ring() {
			l = m.limits()
		}
		m.net.PeerLimits = &l
	}
	m.net.SendQueue = pick(r, 0, 0, session.ControlReserve+1, 64)
	m.net.RDMAQueue = pick(r, 0, 1, 2, 16)
	m.net.AllocBudget = pick(r, 0, 0, 4<<10, 64<<10)
	m.net.OfferFrom = pick(r, 0, 0, 5000, 50_000)
	m.net.MaxLatency = duration(r, time.Microsecond, 2*time.Millisecond)
	m.net.Faults = twin.Faults{
		Late:    pick(r, 0, 0, 0.01, 0.05),
		LateBy:  pick(r, 0, 0, 300*time.Millisecond), // less than CancelTimeout
		Expose:  pick(r, 0, 0, 0.3, 1),
		Local:   pick(r, 0, 0, 0.3, 1),
		Alloc:   pick(r, 0, 0, 0.3, 1),
		Busy:    pick(r, 0, 0.2),
		Tight:   pick(r, 0, 0, 0.3),
		Short:   pick(r, 0, 0.3),
		Stray:   pick(r, 0, 0.1),
		Linger:  pick(r, 0, 0, 0.01, 0.1),
		Evicted: pick(r, 0, 0, 0.3, 1),
		Cheap:   pick(r, 0, 0, 0.3),
	}
}

// drawSessions draws the sessions' settings.
func (m *sim) drawSessions() {
	r := m.r
	for i := range m.cfg {
		c := &m.cfg[i]
		c.CloseTimeout = 2 * time.Minute // late messages add up
		c.Threshold = pick(r, 0, 1, 3000, 20_000, -1)
		c.ReceiveBudget = pick(r, 0, 1, 10_000, 100_000)
		c.SendBudget = pick(r, 0, 200, 5000, 50_000)
		c.Disable = pick[session.Feature](r, 0, 0, 0, session.FeatureRDMARead, session.FeatureRDMAWrite)
	}
}

// patient makes the sessions wait for a peer that gets no processor for seconds.
func (m *sim) patient() {
	for i := range m.cfg {
		m.cfg[i].CancelTimeout = time.Minute
	}
}

// longest is the longest Write, and longWrite the longest of those that go in pieces.
const (
	longest   = 120_000
	longWrite = 1_500_000
)

func pick[T any](r *rand.Rand, from ...T) T { return from[r.IntN(len(from))] }

// duration returns a value between lo and hi; each order of magnitude is equally likely.
func duration(r *rand.Rand, lo, hi time.Duration) time.Duration {
	x := math.Log(float64(lo)) + r.Float64()*(math.Log(float64(hi))-math.Log(float64(lo)))
	return time.Duration(math.Exp(x))
}

func (m *sim) spin() {
	for i := range m.cfg {
		m.cfg[i].Spin = 20 * time.Microsecond
	}
}

// prolong makes the inbox large enough for Writes of up to longWrite.
func (m *sim) prolong() {
	r := m.r
	l := &m.net.Limits
	*l = session.Limits{
		MaxMessage: 16 << 10, MaxExpose: math.MaxInt, MaxRDMA: pick(r, 1<<20, 100_000), Threshold: 1 << 20, Inbox: 5000,
		Window: pick(r, session.MinWindow, 64), CanRead: r.IntN(2) == 0, CanWrite: true,
	}
	m.net.PeerLimits = nil
	m.net.OfferFrom = 4 << 20
	m.net.AllocBudget = pick(r, 0, 0, 1<<20)
	m.net.Faults.Alloc = pick(r, 0, 0, 0.3)
	for i := range m.cfg {
		c := &m.cfg[i]
		c.Threshold, c.Disable = pick(r, 0, 0, -1), 0
		c.SendBudget = pick(r, 0, 600_000)
		c.ReceiveBudget = pick(r, 0, 600_000)
	}
}

// hasten makes it likely that an offer is withdrawn while it is being read, and that the next Write and
// the end come during the reader's look.
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

// limits draws the limits of a possible provider.
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
	l.InboxAfter = pick(r, 0, 0, 20_000)
	return l
}
