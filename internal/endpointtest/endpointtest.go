// Package endpointtest is the contract of session.Endpoint as tests. Every provider runs it against
// itself, as every net.Conn runs nettest: what holds for one provider then holds for all, and the
// session relies on one contract instead of many devices. It requires nothing that the Limits do not
// promise. Only tests import it.
package endpointtest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sanconn/san/session"
)

// Maker makes two connected endpoints that were not started. stop releases what the maker itself holds;
// the tests close the endpoints before.
type Maker func() (a, b session.Endpoint, stop func(), err error)

// Run checks the contract. lacks names what the device is known to let a peer do with memory that is
// exposed for reading (cases of ReadRefused).
func Run(t *testing.T, mk Maker, lacks ...string) {
	read, write := read, write
	read.lacks, write.lacks = lacks, lacks
	a, b := pair(t, mk)
	la, lb := a.lim, b.lim
	a.Abort()
	b.Abort()
	reads := la.CanRead && lb.MaxExpose > 0
	writes := la.CanWrite && lb.MaxExpose > 0
	_, sleeper := a.Endpoint.(session.Sleeper)

	tests := []struct {
		name string
		has  bool // whether the Limits promise it
		f    func(*testing.T, Maker)
	}{
		{"Limits", true, testLimits},
		{"Messages", true, testMessages},
		{"Reserve", true, testReserve},
		{"CommitNothing", true, testCommitNothing},
		{"ReserveControl", true, testReserveControl},
		{"ControlBetween", true, testControlBetween},
		{"BackPressure", true, testBackPressure},
		{"KeepAndDrop", true, testKeepAndDrop},
		{"WakeAfterArm", true, testWakeAfterArm},
		{"WakeAtTheEnd", true, testWakeAtTheEnd},
		{"Rouse", sleeper, testRouse},
		{"Rest", sleeper, testRest},
		{"BeforeStart", true, testBeforeStart},
		{"Close", true, testClose},
		{"CloseDoesNotWait", true, testCloseDoesNotWait},
		{"Abort", true, testAbort},
		{"AfterTheEnd", true, testAfterTheEnd},
		{"Retire", true, testRetire},
		{"Alloc", reads || writes, testAlloc},
		{"AllocReads", reads, both(testAllocMoves, read)},
		{"AllocWrites", writes, both(testAllocMoves, write)},
		{"Read", reads, both(testMove, read)},
		{"Write", writes, both(testMove, write)},
		{"ReadShort", reads, both(testShort, read)},
		{"WriteShort", writes, both(testShort, write)},
		{"WriteThenMessage", writes, testWriteThenMessage},
		{"ReadQueue", reads, both(testQueue, read)},
		{"WriteQueue", writes, both(testQueue, write)},
		{"ReadRefused", reads, both(testRefused, read)},
		{"WriteRefused", writes, both(testRefused, write)},
		{"ReadRevoked", reads, both(testRevoked, read)},
		{"WriteRevoked", writes, both(testRevoked, write)},
		{"EndStopsReads", reads, both(testEndStops, read)},
		{"EndStopsWrites", writes, both(testEndStops, write)},
		{"ExposeTooMuch", lb.MaxExpose > 0, testExposeTooMuch},
		{"AllAtOnce", true, testAllAtOnce},
		{"NoAllocation", !raceEnabled, testNoAllocation},
	}
	for _, tt := range tests {
		if tt.has {
			t.Run(tt.name, func(t *testing.T) { tt.f(t, mk) })
		}
	}
}

func both(f func(*testing.T, Maker, direction), d direction) func(*testing.T, Maker) {
	return func(t *testing.T, mk Maker) { f(t, mk, d) }
}

// patience bounds every wait. Nothing should take that long, so it means a hang.
const patience = 20 * time.Second

// end is an endpoint with what a session would add: credits, and a way to sleep.
type end struct {
	session.Endpoint
	mem        session.Memory // nil: none
	lim        session.Limits
	recv, send chan struct{} // signalled by wake-ups
	peer       *end

	// credits are the peer's receive buffers that are left. They are not sent, because both ends are in
	// this process.
	credits  atomic.Int64
	credited chan struct{}
	done     []session.Event // completions that message has met
	event    session.Event   // used by spinExpect; it is here because a local one would be allocated
	retired  bool
}

// pair makes two started ends, and closes them when the test is over.
func pair(t *testing.T, mk Maker) (a, b *end) {
	t.Helper()
	a, b = unstarted(t, mk)
	a.Start(a)
	b.Start(b)
	return a, b
}

func unstarted(t *testing.T, mk Maker) (a, b *end) {
	t.Helper()
	ea, eb, stop, err := mk()
	if err != nil {
		t.Fatalf("no pair of endpoints: %v", err)
	}
	a, b = newEnd(ea), newEnd(eb)
	a.peer, b.peer = b, a
	a.credits.Store(int64(b.lim.Window))
	b.credits.Store(int64(a.lim.Window))
	t.Cleanup(func() {
		a.retire()
		b.retire()
		stop()
	})
	return a, b
}

func newEnd(ep session.Endpoint) *end {
	return &end{
		Endpoint: ep, mem: ep.Memory(), lim: ep.Limits(),
		recv: make(chan struct{}, 1), send: make(chan struct{}, 1), credited: make(chan struct{}, 1),
	}
}

// retire retires the endpoint, unless the test has done so.
func (e *end) retire() {
	if !e.retired {
		e.retired = true
		e.Abort()
		e.Retire()
	}
}

// Wake implements session.Waker.
func (e *end) Wake(ev session.Events) {
	if ev&session.RecvReady != 0 {
		e.rouse(e.recv)
	}
	if ev&session.SendReady != 0 {
		e.rouse(e.send)
	}
}

// rouse ends a sleep.
func (e *end) rouse(c chan struct{}) {
	if s, is := e.Endpoint.(session.Sleeper); is {
		s.Rouse(c)
	} else {
		signal(c)
	}
}

// sleep waits as a session does; if the endpoint is a Sleeper, its Sleep waits.
func (e *end) sleep(c chan struct{}, what string) error {
	s, is := e.Endpoint.(session.Sleeper)
	if !is {
		return wait(c, what)
	}
	var late atomic.Bool
	t := time.AfterFunc(patience, func() {
		late.Store(true)
		e.rouse(c)
	})
	defer t.Stop()
	s.Sleep(c)
	if late.Load() {
		return fmt.Errorf("no wake-up in %v: %s", patience, what)
	}
	return nil
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func wait(c chan struct{}, what string) error {
	t := time.NewTimer(patience)
	defer t.Stop()
	select {
	case <-c:
		return nil
	case <-t.C:
		return fmt.Errorf("no wake-up in %v: %s", patience, what)
	}
}

// maxMessage is the largest message in bytes that fits both ends.
func (e *end) maxMessage() int { return min(e.lim.MaxMessage, e.peer.lim.MaxMessage) }

// credit waits for a receive buffer at the peer and takes it.
func (e *end) credit(control bool) error {
	if e.peer.lim.Ring() {
		return nil
	}
	reserve := int64(session.ControlReserve)
	if control {
		reserve = 0
	}
	for e.credits.Load() <= reserve {
		if err := wait(e.credited, "credit"); err != nil {
			return err
		}
	}
	e.credits.Add(-1)
	return nil
}

// keepCredit returns what credit took, for a message that was not sent.
func (e *end) keepCredit() { e.credits.Add(1) }

func (e *end) giveCredit() {
	if !e.lim.Ring() {
		e.peer.credits.Add(1)
		signal(e.peer.credited)
	}
}

// reserve waits for room.
func (e *end) reserve(lo, hi int) ([]byte, error) {
	b, err := e.awaitRoom(func() []byte { return e.Reserve(lo, hi) })
	if err == nil && (len(b) < lo || len(b) > hi) {
		err = fmt.Errorf("Reserve(%d, %d) gave %d bytes", lo, hi, len(b))
	}
	return b, err
}

// reserveControl waits for room for a control message.
func (e *end) reserveControl(n int) ([]byte, error) {
	b, err := e.awaitRoom(func() []byte { return e.ReserveControl(n) })
	if err == nil && len(b) < n {
		err = fmt.Errorf("ReserveControl(%d) gave %d bytes", n, len(b))
	}
	return b, err
}

func (e *end) awaitRoom(reserve func() []byte) ([]byte, error) {
	for {
		if b := reserve(); b != nil {
			return b, nil
		}
		e.Arm(session.SendReady)
		if b := reserve(); b != nil {
			return b, nil
		}
		if err := e.Err(); err != nil {
			return nil, err
		}
		if err := e.sleep(e.send, "room for a message"); err != nil {
			return nil, err
		}
	}
}

// post sends data message number seq, of size bytes or as many as there is room for, but at least
// minMessage.
func (e *end) post(seq uint64, size int) error {
	if err := e.credit(false); err != nil {
		return err
	}
	b, err := e.reserve(minMessage, min(size, e.maxMessage()))
	if err != nil {
		return err
	}
	e.Commit(compose(b, seq))
	return nil
}

// postControl sends control message number seq, of size bytes.
func (e *end) postControl(seq uint64, size int) error {
	if err := e.credit(true); err != nil {
		return err
	}
	b, err := e.reserveControl(size)
	if err != nil {
		return err
	}
	e.CommitControl(compose(b[:size], seq))
	return nil
}

// next waits for an event.
func (e *end) next(ev *session.Event) error {
	for {
		if e.Poll(ev) {
			return nil
		}
		e.Arm(session.RecvReady)
		if e.Poll(ev) {
			e.Disarm(session.RecvReady)
			return nil
		}
		if err := e.Err(); err != nil {
			if e.Poll(ev) { // an event came between the two calls
				return nil
			}
			return err
		}
		if err := e.sleep(e.recv, "event"); err != nil {
			return err
		}
	}
}

// message waits for the next message; completions before it are put aside.
func (e *end) message() ([]byte, error) {
	for {
		var ev session.Event
		if err := e.next(&ev); err != nil {
			return nil, err
		}
		if ev.Kind == session.Message {
			return ev.Msg, nil
		}
		e.done = append(e.done, ev)
	}
}

// completion waits for the next completion; a message before it is an error.
func (e *end) completion() (session.Event, error) {
	if len(e.done) > 0 {
		ev := e.done[0]
		e.done = e.done[1:]
		return ev, nil
	}
	var ev session.Event
	if err := e.next(&ev); err != nil {
		return ev, err
	}
	if ev.Kind == session.Message {
		return ev, fmt.Errorf("a message of %d bytes instead of a completion", len(ev.Msg))
	}
	return ev, nil
}

func (e *end) drop()    { e.Drop(); e.giveCredit() }
func (e *end) release() { e.Release(); e.giveCredit() }

// expect takes message number seq and drops it.
func (e *end) expect(seq uint64) error {
	m, err := e.message()
	if err != nil {
		return fmt.Errorf("message %d: %w", seq, err)
	}
	err = verify(m, seq)
	e.drop()
	return err
}

// expectAll expects count messages, from 0 on.
func (e *end) expectAll(count int) error {
	for seq := range uint64(count) {
		if err := e.expect(seq); err != nil {
			return err
		}
	}
	return nil
}

// expectOf is expect for a message of n bytes.
func (e *end) expectOf(seq uint64, n int) error {
	m, err := e.message()
	if err != nil {
		return fmt.Errorf("message %d: %w", seq, err)
	}
	if err = verify(m, seq); err == nil && len(m) != n {
		err = fmt.Errorf("message %d came as %d bytes of %d", seq, len(m), n)
	}
	e.drop()
	return err
}

// expectFrom takes the messages from number seq up to end.
func (e *end) expectFrom(seq, end uint64) error {
	for ; seq < end; seq++ {
		if err := e.expect(seq); err != nil {
			return err
		}
	}
	return nil
}

// endOf polls until nothing comes any more, and returns how the connection ended.
func (e *end) endOf() (messages int, err error) {
	for {
		var ev session.Event
		if err := e.next(&ev); err != nil {
			return messages, err
		}
		if ev.Kind == session.Message {
			messages++
			e.drop()
		}
	}
}

// minMessage is what compose needs, for the number and the size.
const minMessage = 16

// compose fills b with message number seq.
func compose(b []byte, seq uint64) int {
	put64(b, seq)
	put64(b[8:], uint64(len(b)))
	for i := range b[minMessage:] {
		b[minMessage+i] = byte(seq) ^ byte(i)*7
	}
	return len(b)
}

func verify(m []byte, seq uint64) error {
	if len(m) < minMessage {
		return fmt.Errorf("message %d came as %d bytes", seq, len(m))
	}
	if got := get64(m); got != seq {
		return fmt.Errorf("message %d came instead of %d", got, seq)
	}
	if got := get64(m[8:]); got != uint64(len(m)) {
		return fmt.Errorf("message %d: %d bytes of %d", seq, len(m), got)
	}
	for i := range m[minMessage:] {
		if m[minMessage+i] != byte(seq)^byte(i)*7 {
			return fmt.Errorf("message %d of %d bytes: wrong at %d", seq, len(m), minMessage+i)
		}
	}
	return nil
}

func put64(b []byte, v uint64) {
	for i := range 8 {
		b[i] = byte(v >> (8 * i))
	}
}

func get64(b []byte) (v uint64) {
	for i := range 8 {
		v |= uint64(b[i]) << (8 * i)
	}
	return v
}

// noise fills b with bytes that depend only on seed.
func noise(b []byte, seed uint64) {
	r := rand.NewPCG(seed, 0)
	for i := range b {
		b[i] = byte(r.Uint64())
	}
}

// together runs functions concurrently, and fails with the errors that they return.
func together(t *testing.T, fs ...func() error) {
	t.Helper()
	c := make(chan error, len(fs))
	for _, f := range fs {
		go func() { c <- f() }()
	}
	var all []error
	for range fs {
		all = append(all, <-c)
	}
	if err := errors.Join(all...); err != nil {
		t.Fatal(err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
