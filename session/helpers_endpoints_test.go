package session_test

import (
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

// onMemory is an endpoint whose memory the test has wrapped.
type onMemory struct {
	session.Endpoint
	mem session.Memory
}

func (e onMemory) Memory() session.Memory { return e.mem }

// withMemory is for negotiatedOn: the endpoint's memory is wrapped by around.
func withMemory(around func(session.Memory) session.Memory) func(*twin.Endpoint) session.Endpoint {
	return func(e *twin.Endpoint) session.Endpoint { return onMemory{e, around(e.Memory())} }
}

// lateArm is an endpoint that calls a function of the test just before an Arm.
type lateArm struct {
	*twin.Endpoint
	then atomic.Pointer[func()] // nil: nothing
}

// before makes the next Arm call f first.
func (e *lateArm) before(f func()) { e.then.Store(&f) }

func (e *lateArm) Arm(ev session.Events) {
	if f := e.then.Swap(nil); f != nil {
		(*f)()
	}
	e.Endpoint.Arm(ev)
}

// lateFlush is an endpoint that reports its end before what is posted has completed, as queue pairs do.
type lateFlush struct {
	*twin.Endpoint
	failed atomic.Bool
}

func (e *lateFlush) Err() error {
	if e.failed.Load() {
		return syscall.ECONNRESET
	}
	return e.Endpoint.Err()
}

// slowArrival is an endpoint whose Poll finds nothing while late is set.
type slowArrival struct {
	lateArm
	late atomic.Bool
}

func (e *slowArrival) Poll(ev *session.Event) bool { return !e.late.Load() && e.Endpoint.Poll(ev) }

// slowDisarm is an endpoint that calls functions of the test before and after one Disarm.
type slowDisarm struct {
	lateArm
	on            atomic.Bool
	ahead, behind func()
}

func (e *slowDisarm) Disarm(ev session.Events) {
	on := e.on.Swap(false)
	if on {
		e.ahead()
	}
	e.Endpoint.Disarm(ev)
	if on {
		e.behind()
	}
}

// ordered records the order in which messages are released and control messages are sent.
type ordered struct {
	*twin.Endpoint
	calls string
}

func (e *ordered) Release() {
	e.calls += "r"
	e.Endpoint.Release()
}

func (e *ordered) CommitControl(n int) {
	e.calls += "c"
	e.Endpoint.CommitControl(n)
}

// slowPoll is an endpoint on which one Poll takes long.
type slowPoll struct {
	*twin.Endpoint
	takes atomic.Int64 // ns
}

func (e *slowPoll) Poll(ev *session.Event) bool {
	nap(time.Duration(e.takes.Swap(0)))
	return e.Endpoint.Poll(ev)
}

// slowLooks is an endpoint on which each Poll takes long.
type slowLooks struct {
	*twin.Endpoint
	on atomic.Bool
}

func (e *slowLooks) Poll(ev *session.Event) bool {
	if e.on.Load() {
		nap(20 * latency)
	}
	return e.Endpoint.Poll(ev)
}

// longLook is an endpoint on which one Poll waits until the test lets it continue.
type longLook struct {
	*twin.Endpoint
	on          atomic.Bool
	begun, goOn chan struct{}
}

func (e *longLook) Poll(ev *session.Event) bool {
	if e.on.CompareAndSwap(true, false) {
		close(e.begun)
		<-e.goOn
	}
	return e.Endpoint.Poll(ev)
}

// counted sets Last in all its messages, or in none, and counts the calls of Poll.
type counted struct {
	*twin.Endpoint
	last  bool
	looks int
}

func (c *counted) Poll(ev *session.Event) bool {
	c.looks++
	ok := c.Endpoint.Poll(ev)
	ev.Last = ok && ev.Kind == session.Message && c.last
	return ok
}

// secondErr calls a function of the test in the second call of Err after a Poll: that call is made by a
// Read whose slice is the target of transfers, once its first look has found them in progress.
type secondErr struct {
	*twin.Endpoint
	act   atomic.Pointer[func()] // once
	asked atomic.Int32           // atomic, because Write and the idle poller look at the same time
}

func (e *secondErr) Poll(ev *session.Event) bool {
	e.asked.Store(0)
	return e.Endpoint.Poll(ev)
}

func (e *secondErr) Err() error {
	if e.asked.Add(1) == 2 {
		if act := e.act.Swap(nil); act != nil {
			(*act)()
		}
	}
	return e.Endpoint.Err()
}

// abortsInErr aborts its session, from another goroutine, when the session calls Err in the middle of an
// operation.
type abortsInErr struct {
	*twin.Endpoint
	abort atomic.Pointer[func()] // once
}

func (e *abortsInErr) Err() error {
	if f := e.abort.Swap(nil); f != nil {
		go (*f)()
		for e.Endpoint.Err() == nil {
			nap(latency)
		}
	}
	return e.Endpoint.Err()
}

// betweenLooks calls a function of the test right after a CancelRead was handled, before the next Poll.
// Its RDMA reads find the queue full.
type betweenLooks struct {
	fullQueue
	then    func()
	handled bool
}

func (e *betweenLooks) Poll(ev *session.Event) bool {
	if e.handled {
		e.handled = false
		e.then()
	}
	ok := e.Endpoint.Poll(ev)
	e.handled = ok && ev.Kind == session.Message && ev.Msg[0] == tCancelRead
	return ok
}

// narrow is an endpoint that has room only for short messages.
type narrow struct {
	*twin.Endpoint
	most atomic.Int32 // bytes; 0: no bound
}

func (e *narrow) Reserve(lo, hi int) []byte {
	if most := int(e.most.Load()); most > 0 && !e.Closed() {
		if lo > most {
			return nil
		}
		hi = min(hi, most)
	}
	return e.Endpoint.Reserve(lo, hi)
}

// noControl has no room for control messages until the session has tried once more. Then it finds room
// for data, because the device has completed sends meanwhile.
type noControl struct {
	*twin.Endpoint
	full, once bool
}

func (e *noControl) ReserveControl(n int) []byte {
	if e.full {
		e.full = !e.once
		return nil
	}
	return e.Endpoint.ReserveControl(n)
}

// fullQueue is an endpoint whose queue is full for RDMA reads until room is set.
type fullQueue struct {
	*twin.Endpoint
	room  atomic.Bool
	armed atomic.Uint32 // session.Events
	waker session.Waker
}

func (e *fullQueue) Start(w session.Waker) {
	e.waker = w
	e.Endpoint.Start(w)
}

func (e *fullQueue) Arm(ev session.Events) {
	e.armed.Or(uint32(ev))
	e.Endpoint.Arm(ev)
}

func (e *fullQueue) Memory() session.Memory { return fullMemory{e.Endpoint.Memory(), e} }

type fullMemory struct {
	session.Memory
	e *fullQueue
}

func (m fullMemory) Read(into []byte, from session.Descriptor, off int, id uint32) error {
	if !m.e.room.Load() {
		return session.ErrWouldBlock
	}
	return m.Memory.Read(into, from, off, id)
}

// atOnce is memory whose RDMA reads are complete when Read returns.
type atOnce struct{ session.Memory }

func (e atOnce) Read(into []byte, from session.Descriptor, off int, id uint32) error {
	err := e.Memory.Read(into, from, off, id)
	nap(2 * latency)
	return err
}

// notedReads records the addresses at which RDMA reads end.
type notedReads struct {
	session.Memory
	ends []uintptr
}

func (m *notedReads) Read(into []byte, from session.Descriptor, off int, id uint32) error {
	err := m.Memory.Read(into, from, off, id)
	if err == nil {
		m.ends = append(m.ends, address(into)+uintptr(len(into)))
	}
	return err
}

func address(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// slowRevoke lets time pass before Revoke returns.
type slowRevoke struct {
	session.Memory
	began chan struct{} // a token for each Revoke
}

func (e slowRevoke) Revoke(d session.Descriptor) {
	e.Memory.Revoke(d)
	e.began <- struct{}{}
	nap(time.Second)
}

// slowAlloc is memory that calls then before Alloc returns.
type slowAlloc struct {
	session.Memory
	then func()
}

func (e *slowAlloc) Alloc(n int) []byte {
	b := e.Memory.Alloc(n)
	e.then()
	return b
}

// inThreeSeconds is memory whose Alloc takes three seconds.
func inThreeSeconds(m session.Memory) session.Memory {
	return &slowAlloc{m, func() { nap(3 * time.Second) }}
}

// failingWrites is memory that cannot register the source of an RDMA write while fail is set.
type failingWrites struct {
	session.Memory
	fail   atomic.Bool
	failed atomic.Int32
}

func (e *failingWrites) Write(from []byte, to session.Descriptor, off int, id uint32) error {
	if e.fail.Load() {
		e.failed.Add(1)
		return syscall.ENOBUFS
	}
	return e.Memory.Write(from, to, off, id)
}

// failing is a session whose endpoint has failingWrites, and on which offers do not pay.
func failing(t *testing.T) (s *session.Session, w *failingWrites, p *raw) {
	t.Helper()
	w = new(failingWrites)
	dear := buffered
	dear.OfferFrom = 1 << 20
	s, _, p = negotiatedOn(t, dear, session.Config{}, withMemory(func(m session.Memory) session.Memory {
		w.Memory = m
		return w
	}))
	return s, w, p
}

// countedPays counts the calls of PaysToOffer.
type countedPays struct {
	session.Memory
	n atomic.Int32
}

func (c *countedPays) PaysToOffer(b []byte) (bool, error) {
	c.n.Add(1)
	return c.Memory.PaysToOffer(b)
}

// lateWake is an endpoint whose wake-ups come late, so that other goroutines look first.
type lateWake struct {
	*twin.Endpoint
	session.Waker
}

const wakesLate = 20 * time.Millisecond

func (e *lateWake) Start(w session.Waker) {
	e.Waker = w
	e.Endpoint.Start(e)
}

func (e *lateWake) Wake(ev session.Events) {
	time.AfterFunc(wakesLate, func() { e.Waker.Wake(ev) })
}
