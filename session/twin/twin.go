// Package twin is the Endpoint without a kernel: two ends in one process, a
// wire of timers between them, and every choice that a network, a NIC or a
// dying peer could make taken from one seed. It is for tests: the session's
// simulations, the conformance suite endpointtest, and whoever wants to see a
// protocol run in virtual time (it works inside testing/synctest's bubbles and
// outside of them). It never touches a device, and no program that moves real
// data should import it.
//
// The twin is as strict as the contract allows and never kinder. A buffer that
// was given back is overwritten; the target of an RDMA holds noise until its
// completion, and its source is read at the last moment; a message that finds
// no receive buffer, a call that the contract forbids and an access that a NIC
// would refuse are reported as Violations.
package twin

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"time"

	"github.com/sanconn/san/session"
)

// Config of a pair. The zero value is a ring, which has no remote memory, without
// faults.
type Config struct {
	// Seed of all choices. Each end draws from a stream of its own for each
	// kind of choice, so that a replay depends as little as possible on how
	// goroutines happen to be scheduled.
	Seed uint64

	// Limits of both ends. Provider defaults to "twin", MaxMessage to
	// 4096, and MaxRDMA to 1 MiB where CanRead or CanWrite is set; the other
	// zero values mean what they say.
	Limits session.Limits
	// PeerLimits, if not nil, are those of the second end.
	PeerLimits *session.Limits

	// SendQueue is the number of messages that may be under way from one end
	// where there is a Window; the last session.ControlReserve of them are
	// for control. Default twice that.
	SendQueue int
	// QueueBytes is the size of the ring in bytes where there is no Window.
	// Default 64 KiB.
	QueueBytes int
	// RDMAQueue is the number of Reads and Writes whose completions have not
	// been polled. Default 8.
	RDMAQueue int
	// AllocBudget in bytes, for each end. Default 16 MiB.
	AllocBudget int

	// MinLatency and MaxLatency bound the time that a message, a piece of an
	// RDMA or a notice of the peer's end takes.
	MinLatency, MaxLatency time.Duration

	Faults Faults

	// Violated is told of every violation, with a lock held: it may log and
	// count, not call the endpoints. If it is nil, a violation panics.
	Violated func(Violation)
}

// Faults are shares of the calls or deliveries that go wrong, 0 to 1.
type Faults struct {
	Late   float64       // deliveries and completions that take LateBy longer
	LateBy time.Duration // default 100 times MaxLatency

	Expose  float64 // Exposes that fail with ENOMEM
	Local   float64 // Reads and Writes that fail with ENOMEM, as memory that is not from Alloc cannot be registered
	Alloc   float64 // Allocs that give nil
	Evicted float64 // Reads and Writes that fail with ENOBUFS, as the registration of memory from Alloc was evicted and there is no room for another
	Busy    float64 // Reserves for data, Reads and Writes that find the queue full
	Tight   float64 // Reserves for control that find no room
	Short   float64 // Reserves for data that give less than max
	Stray   float64 // Arms and deliveries that cause a Wake for nothing
	Linger  float64 // calls before which the wire and the peer get on by some latencies
	// LingerFor is how long it may take in real time, not in a bubble, though nothing
	// more happens. Who has waited for a sync.Mutex for more than a millisecond is
	// given it before its holder can take it once more.
	LingerFor time.Duration

	// DieAt is, for each end, the number of calls into it at which its
	// process dies; 0: it does not.
	DieAt [2]int
}

// Violation of the contract, or what a NIC would have refused.
type Violation struct {
	Kind ViolationKind
	End  int // the end to blame, 0 or 1
	Text string
}

func (v Violation) String() string { return fmt.Sprintf("end %d: %v: %s", v.End, v.Kind, v.Text) }

// ViolationKind tells Violations apart.
type ViolationKind uint8

const (
	// Misuse of the contract by the caller of the endpoint to blame.
	Misuse ViolationKind = iota + 1
	// RNR: a message found no receive buffer; its sender is to blame.
	RNR
	// BadAccess outside of what was exposed, or beyond its rights, or with an
	// unknown key; the end that posted it is to blame.
	BadAccess
	// RevokedAccess: the descriptor was valid once. Either end may be to
	// blame, the one that posted the access is named; it is no fault where
	// the owner of the memory ends the connection.
	RevokedAccess
)

func (k ViolationKind) String() string {
	return [...]string{"?", "misuse", "no receive buffer", "bad access", "access to revoked memory"}[k]
}

const (
	defaultMessage   = 4096
	defaultRDMA      = 1 << 20
	defaultSendQueue = 2 * session.ControlReserve
	defaultRing      = 64 << 10
	defaultRDMAQueue = 8
	defaultBudget    = 16 << 20
	lateFactor       = 100
)

// Pair returns two connected ends.
func Pair(cfg Config) (a, b *Endpoint) {
	peer := cfg.Limits
	if cfg.PeerLimits != nil {
		peer = *cfg.PeerLimits
	}
	orInt(&cfg.SendQueue, defaultSendQueue)
	orInt(&cfg.QueueBytes, defaultRing)
	orInt(&cfg.RDMAQueue, defaultRDMAQueue)
	orInt(&cfg.AllocBudget, defaultBudget)
	if cfg.Faults.LateBy == 0 {
		cfg.Faults.LateBy = lateFactor * cfg.MaxLatency
	}
	if cfg.SendQueue <= session.ControlReserve {
		panic("twin: SendQueue leaves no room for data")
	}
	w := &wire{cfg: cfg, start: time.Now()}
	w.ends = [2]*Endpoint{newEndpoint(w, 0, cfg.Limits), newEndpoint(w, 1, peer)}
	return w.ends[0], w.ends[1]
}

func orInt(p *int, def int) {
	if *p == 0 {
		*p = def
	}
}

// dice are the streams of choices of one end, one for each kind of choice.
type dice [diceCount]*rand.Rand

const (
	diceMessage = iota // when messages arrive
	diceAck            // when the sender hears that they have
	diceRDMA           // when and in which pieces memory moves
	diceBusy           // which calls find the queue full
	diceShort          // how much Reserve gives
	diceMemory         // which Expose, Alloc, Read and Write fail; keys
	dicePoll           // which kind of event Poll takes first
	diceStray          // wakes for nothing
	diceEnd            // how long the notice of the peer's end takes
	diceLinger         // which calls linger, for how long
	diceControl        // which Reserves for control find no room
	diceCount
)

func newDice(seed uint64, end int) (d dice) {
	for i := range d {
		d[i] = rand.New(rand.NewPCG(seed, uint64(end*diceCount+i)))
	}
	return d
}

func (d *dice) chance(which int, share float64) bool {
	// Drawn even when it cannot happen: switching a fault on leaves the
	// other choices of the stream where they were.
	return d[which].Float64() < share
}

// wire is what lies between the two ends. Its lock guards everything in it and
// in its ends, and is held while memory moves: whoever touches a slice that
// the twin is moving races with a timer's goroutine, which is what the race
// detector sees.
type wire struct {
	cfg   Config
	start time.Time

	mu     sync.Mutex
	ends   [2]*Endpoint
	events events
	seq    uint64
	timer  *time.Timer
	ahead  time.Duration // of the clock: what was leapt over by those who linger
	cut    bool
	spare  []*message // recycled
}

// now is the time since the start, and what was leapt over.
func (w *wire) now() time.Duration { return time.Since(w.start) + w.ahead }

// latency draws one from the stream of an end.
func (w *wire) latency(d *dice, which int) time.Duration {
	l := w.cfg.MinLatency
	if span := w.cfg.MaxLatency - w.cfg.MinLatency; span > 0 {
		l += time.Duration(d[which].Int64N(int64(span) + 1))
	}
	if d.chance(which, w.cfg.Faults.Late) {
		l += w.cfg.Faults.LateBy
	}
	return l
}

// at schedules an event.
func (w *wire) at(when time.Duration, ev event) {
	ev.at, ev.seq = when, w.seq
	w.seq++
	w.events.push(ev)
	if w.events[0].seq == ev.seq {
		w.rearm()
	}
}

func (w *wire) rearm() {
	if len(w.events) == 0 {
		return
	}
	// Not 0: the goroutine that sets a timer of a synctest bubble for now runs it at
	// once, and the race detector dies of two that do so (runtime/time.go, modify and
	// unlockAndRun, share the bubble's raceCtx; Go 1.26).
	d := max(1, w.events[0].at-w.now())
	if w.timer == nil {
		w.timer = time.AfterFunc(d, w.run)
	} else {
		w.timer.Reset(d)
	}
}

// run makes happen what is due. All Wakes come from here, none from inside a
// call of the session's, and none with the lock held.
func (w *wire) run() {
	w.mu.Lock()
	now := w.now()
	for len(w.events) > 0 && w.events[0].at <= now {
		ev := w.events.pop()
		ev.end.happen(ev)
	}
	var wakes [2]session.Events
	var wakers [2]session.Waker
	for i, e := range w.ends {
		wakes[i], e.wakes = e.wakes, 0
		wakers[i] = e.waker
		if e.waker == nil {
			e.wakes, wakes[i] = wakes[i], 0 // Start has not come yet
		}
	}
	if w.ends[0].ended() && w.ends[1].ended() {
		w.events = nil // nothing is left that anybody could notice
	}
	w.rearm()
	w.mu.Unlock()
	for i, bits := range wakes {
		if bits != 0 {
			wakers[i].Wake(bits)
		}
	}
}

// linger lets the wire and those whom it wakes get on by d while the caller is in the
// middle of something. It may hold locks of the session's, and those who wait for them
// keep a bubble's time from passing: so nothing sleeps here, it is the wire's clock that
// leaps. Over when nothing more has become due for some turns of all others, and not
// before the time given.
func (w *wire) linger(d, least time.Duration) {
	began := time.Now()
	w.mu.Lock()
	until := w.now() + d
	w.mu.Unlock()
	for idle := 0; idle < lingerTurns || time.Since(began) < least; idle++ {
		w.mu.Lock()
		due := len(w.events) > 0 && w.events[0].at <= until
		if due {
			w.ahead += max(0, w.events[0].at-w.now())
		}
		w.mu.Unlock()
		if due {
			idle = 0
			go w.run() // no Wake from inside a call of the session's
		}
		runtime.Gosched()
	}
}

const (
	// lingerMost latencies are enough for an answer, for what that sets free, and for
	// the end.
	lingerMost  = 8
	lingerTurns = 50
)

func (w *wire) violate(kind ViolationKind, end int, format string, args ...any) {
	v := Violation{kind, end, fmt.Sprintf(format, args...)}
	if w.cfg.Violated == nil {
		panic("twin: " + v.String())
	}
	w.cfg.Violated(v)
}

// message is one in flight or in a receive buffer.
type message struct {
	buf  []byte // as large as the largest message
	n    int    // bytes that count
	cost int    // bytes of the ring that it occupies
	done bool   // given back, but behind one in the ring that is not

	control bool // not data
}

func (w *wire) newMessage(size int) *message {
	for i := len(w.spare) - 1; i >= 0; i-- {
		if m := w.spare[i]; len(m.buf) >= size {
			w.spare[i] = w.spare[len(w.spare)-1]
			w.spare = w.spare[:len(w.spare)-1]
			*m = message{buf: m.buf}
			return m
		}
	}
	return &message{buf: make([]byte, size)}
}

func (w *wire) recycle(m *message) { w.spare = append(w.spare, m) }

// What a buffer holds that nobody may look at.
const (
	noiseFreed  = 0xDB // given back
	noiseMoving = 0xA5 // the target of an RDMA that has not completed
)

func fill(b []byte, v byte) {
	for i := range b {
		b[i] = v
	}
}

// event is something that happens at an end at a time.
type event struct {
	at   time.Duration
	seq  uint64 // in order of scheduling where times are equal
	end  *Endpoint
	kind eventKind
	msg  *message
	op   *operation
	err  error
}

type eventKind uint8

const (
	arrive  eventKind = iota + 1 // msg arrives at end
	sent                         // end's send queue has one place more
	hasRoom                      // end may have room
	notBusy                      // end's queue seems full no more
	piece                        // some of end's op has moved
	done                         // end's op completes
	fin                          // end learns how the peer ended
	stray                        // end is woken for nothing
)

// events is a heap by time.
type events []event

func (h events) less(i, j int) bool {
	return h[i].at < h[j].at || h[i].at == h[j].at && h[i].seq < h[j].seq
}

func (h *events) push(ev event) {
	*h = append(*h, ev)
	s := *h
	for i := len(s) - 1; i > 0; {
		up := (i - 1) / 2
		if !s.less(i, up) {
			break
		}
		s[i], s[up] = s[up], s[i]
		i = up
	}
}

func (h *events) pop() event {
	s := *h
	top, last := s[0], len(s)-1
	s[0], s[last] = s[last], event{}
	s = s[:last]
	*h = s
	for i := 0; ; {
		min := i
		for c := 2*i + 1; c <= 2*i+2 && c < last; c++ {
			if s.less(c, min) {
				min = c
			}
		}
		if min == i {
			return top
		}
		s[i], s[min] = s[min], s[i]
		i = min
	}
}

// fifo is a queue that keeps its memory.
type fifo[T any] struct {
	s    []T
	head int
}

func (q *fifo[T]) len() int { return len(q.s) - q.head }

func (q *fifo[T]) push(v T) {
	if q.head > 16 && q.head > len(q.s)/2 {
		n := copy(q.s, q.s[q.head:])
		clear(q.s[n:])
		q.s, q.head = q.s[:n], 0
	}
	q.s = append(q.s, v)
}

func (q *fifo[T]) front() T { return q.s[q.head] }

func (q *fifo[T]) pop() T {
	v := q.s[q.head]
	clear(q.s[q.head : q.head+1])
	if q.head++; q.head == len(q.s) {
		q.s, q.head = q.s[:0], 0
	}
	return v
}
