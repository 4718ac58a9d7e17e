//go:build linux && cgo

package verbs

import (
	"errors"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/session"
)

// started makes a connection, and starts it with a waker.
func started(t *testing.T, port int) (*Endpoint, wakes) {
	t.Helper()
	e, _ := fakePair(t, port, Config{})
	w := make(wakes, 1)
	e.Start(w)
	return e, w
}

// expectReset checks that the connection is over, and that the session was woken for it.
func expectReset(t *testing.T, what string, e *Endpoint, w wakes) {
	t.Helper()
	if err := e.Err(); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%s: %v", what, err)
	}
	if len(w) == 0 {
		t.Errorf("%s: nobody is woken", what)
	}
}

// The end of a connection is reported when no transfer can access memory of this end any more, and not
// before.
func testEndWaitsForTransfers(t *testing.T) {
	f := useFake(t)
	port := 47_000
	for what, over := range map[string]func(*Endpoint){
		"a read that is flushed":     func(e *Endpoint) { e.complete(ibv.WC{ID: kindRead, Status: ibv.WRFlushErr}) },
		"a read that is not flushed": func(e *Endpoint) { e.flushTimedOut() },
		"a read that ends well": func(e *Endpoint) {
			f.set(fakeCompleted, int64(kindRead))
			f.set(fakeCompletions, 1)
			e.q.notice()
		},
	} {
		port++
		e, w := started(t, port)
		mem := e.mem.Alloc(4096)
		if err := e.mem.Read(mem, session.Descriptor{Addr: 1 << 40, Key: 1, Len: 4096}, 0, 7); err != nil {
			t.Fatal(err)
		}
		e.q.fail(deviceError(syscall.EIO))
		if err := e.Err(); err != nil || len(w) != 0 {
			t.Errorf("%s: it is over while the device may write to memory: %v", what, err)
		}
		if e.q.late == nil || !e.q.notified.Load() {
			t.Errorf("%s: nobody waits for it", what)
		}
		over(e)
		expectReset(t, what, e, w)
		var ev session.Event
		if !e.Poll(&ev) || ev.Kind != session.ReadDone || ev.ID != 7 || (ev.Err == nil) != (what == "a read that ends well") {
			t.Errorf("%s: %+v", what, ev)
		}
		e.mem.Free(mem)
	}
}

// A library call that fails ends the connection, and the session is woken.
func testFailuresEnd(t *testing.T) {
	f := useFake(t)
	fails := func() {
		f.set(fakeErrno, int64(syscall.EIO))
		f.set(fakeCountdown, 0)
	}
	e, w := started(t, 47_010)
	e.Commit(len(e.Reserve(8, 8)))
	if err := e.Err(); err != nil {
		t.Fatal(err)
	}
	e.Reserve(8, 8)
	fails()
	e.Commit(8)
	expectReset(t, "a message that is not posted", e, w)
	if e.Reserve(8, 8) != nil || e.ReserveControl(8) != nil {
		t.Error("there is room for a message behind the end")
	}

	e, w = started(t, 47_011)
	fails()
	e.q.mu.Lock()
	for n := range repostBatch {
		e.recv.againLocked(arrival{buffer: n, n: 8})
	}
	e.q.mu.Unlock()
	expectReset(t, "a buffer that is not posted", e, w)

	e, w = started(t, 47_012)
	e.q.notified.Store(false)
	fails()
	e.Arm(session.RecvReady)
	expectReset(t, "a queue that announces nothing", e, w)

	e, w = started(t, 47_013)
	f.set(fakeCompleted, int64(kindSend))
	f.set(fakeCompletions, 100)
	if e.Poll(&session.Event{}); f.get(fakeCompletions) != 0 { // no event would report the rest
		t.Errorf("a look leaves %d of 100 completions", f.get(fakeCompletions))
	}
	f.set(fakeCompletions, -1)
	e.Poll(&session.Event{})
	f.set(fakeCompletions, 0)
	expectReset(t, "a queue that fails", e, w)
}

// Messages that have come are delivered before an end that comes later, and the peer's access is
// revoked. A session that starts after the end is woken.
func testEndBehindDisconnect(t *testing.T) {
	f := useFake(t)
	e, _ := started(t, 47_020)
	f.set(fakeCompleted, int64(kindRecv))
	f.set(fakeOpcode, int64(ibv.WCRecv))
	f.set(fakeCompletions, 1)
	broken := f.get(fakeBroken)
	e.q.fail(deviceError(syscall.EIO))
	if err := e.Err(); !errors.Is(err, syscall.EPIPE) || f.get(fakeBroken) != broken+1 {
		t.Errorf("behind the peer's disconnect message: %v, its access ended: %v", err, f.get(fakeBroken) > broken)
	}

	// cxgb4 and siw post nothing once the peer's TCP connection has ended.
	e, _ = started(t, 47_021)
	e.Reserve(8, 8)
	f.set(fakeCompletions, 1)
	f.set(fakeErrno, int64(syscall.ENOTCONN))
	f.set(fakeCountdown, 0)
	e.Commit(8)
	f.set(fakeOpcode, 0)
	if err := e.Err(); !errors.Is(err, syscall.EPIPE) {
		t.Errorf("a message that is not posted, behind the peer's disconnect message: %v", err)
	}

	e, _ = started(t, 47_022)
	e.complete(ibv.WC{ID: kindSend | 1, Status: ibv.RetryExcErr}, ibv.WC{ID: kindRecv, Opcode: ibv.WCRecv, ByteLen: 8})
	if err := e.Err(); !errors.Is(err, syscall.ETIMEDOUT) || !e.Poll(&session.Event{}) {
		t.Errorf("a message behind a send that has failed is lost: %v", err)
	}

	// The peer's disconnection may arrive before its messages.
	defer func(was time.Duration) { disconnectGrace = was }(disconnectGrace)
	disconnectGrace = time.Hour
	e, _ = started(t, 47_023)
	e.q.hangUp(deviceError(syscall.EIO), func() {})
	if err := e.Err(); err != nil {
		t.Errorf("it ends with the disconnection: %v", err)
	}
	f.set(fakeOpcode, int64(ibv.WCRecv))
	f.set(fakeCompletions, 1)
	e.Poll(&session.Event{})
	f.set(fakeOpcode, 0)
	if err := e.Err(); !errors.Is(err, syscall.EPIPE) {
		t.Errorf("behind the disconnection, and the peer's last message: %v", err)
	}
	disconnectGrace = time.Millisecond
	e, _ = started(t, 47_024)
	disconnected := make(chan struct{})
	e.q.hangUp(deviceError(syscall.EIO), func() { close(disconnected) })
	select {
	case <-disconnected:
	case <-time.After(10 * time.Second):
		t.Error("this end does not disconnect")
	}
	if err := e.Err(); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("behind the disconnection alone: %v", err)
	}

	e, _ = started(t, 47_014)
	e.q.fail(deviceError(syscall.EIO))
	hungUp := false
	e.q.hangUp(deviceError(syscall.EIO), func() { hungUp = true })
	if !hungUp {
		t.Error("this end does not disconnect behind a failure of its own")
	}
	e.complete(ibv.WC{ID: kindRecv, Opcode: ibv.WCRecv, ByteLen: 8})
	if e.Poll(&session.Event{}) {
		t.Error("a message behind the end")
	}
	w := make(wakes, 1)
	e.Start(w)
	expectReset(t, "a session that starts behind the end", e, w)
}

// A transfer that is not flushed ends only when its queue pair is destroyed: until then the device may
// access its memory. So does a transfer of an endpoint that is aborted.
func testUnflushedTransfers(t *testing.T) {
	f := useFake(t)
	port := 50_000
	for _, cfg := range fakeConfigs {
		for what, end := range map[string]func(*Endpoint){
			"not flushed": func(e *Endpoint) {
				e.q.fail(deviceError(syscall.EIO))
				e.flushTimedOut()
			},
			"aborted": (*Endpoint).Abort,
		} {
			port++
			e, _ := fakePair(t, port, cfg)
			queuePairs := f.get(fakeQPs)
			left := int64(-1) // the number of queue pairs when the end is reported
			e.Start(wakeFunc(func(session.Events) { left = f.get(fakeQPs) }))
			mem := e.mem.Alloc(4096)
			if err := e.mem.Read(mem, session.Descriptor{Addr: 1 << 40, Key: 1, Len: 4096}, 0, 7); err != nil {
				t.Fatal(err)
			}
			end(e)
			if err := e.Err(); err == nil || left != queuePairs-1 {
				t.Errorf("%s: %v; it was reported with %d queue pairs, of %d before", what, err, left, queuePairs)
			}
			if e.q.closed {
				continue
			}
			var ev session.Event
			if !e.Poll(&ev) || ev.Kind != session.ReadDone || ev.ID != 7 || ev.Err == nil {
				t.Errorf("%s: %+v", what, ev)
			}
			e.q.fail(deviceError(syscall.EIO)) // as an event that comes late would do
		}
	}
}

// A transfer that could not be posted holds no memory. If the device had no room for it, it is tried
// again.
func testTransfersNotPosted(t *testing.T) {
	f := useFake(t)
	before := int64(0)
	if without(session.FeatureRegCache) {
		before = 1 // the memory is registered first
	}
	for i, tt := range []struct {
		errno syscall.Errno
		want  error
	}{{syscall.ENOMEM, session.ErrWouldBlock}, {syscall.EIO, syscall.EIO}} {
		e, _ := fakePair(t, 51_010+i, Config{})
		mem := e.mem.Alloc(4096)
		putInCache(t, e, mem)
		f.set(fakeErrno, int64(tt.errno))
		f.set(fakeCountdown, before)
		err := e.mem.Write(mem, session.Descriptor{Addr: 1 << 40, Key: 1, Len: 4096}, 0, 7)
		if !errors.Is(err, tt.want) || f.failed() != "post_send" {
			t.Errorf("%v of %s: %v, want %v", tt.errno, f.failed(), err, tt.want)
		}
		if s := e.dom.cache.Stats(); s.IdleBytes != s.Bytes {
			t.Errorf("%v: %d bytes are in use", tt.errno, s.Bytes-s.IdleBytes)
		}
		e.mem.Free(mem)
	}
}

// After the end nothing can be exposed any more, also not in a domain that is still used.
func testExposeBehindEnd(t *testing.T) {
	useFake(t)
	for i, cfg := range fakeConfigs {
		for j, end := range []func(*Endpoint){(*Endpoint).Abort, func(e *Endpoint) { e.Close() }} {
			e, _ := fakePair(t, 51_020+2*i+j, cfg)
			end(e)
			if d, err := e.mem.Expose(make([]byte, 4096), session.RemoteRead); err == nil {
				t.Errorf("%+v", d)
			}
		}
	}
}

// Each event that means the end of a connection ends it by itself, because a device that is removed may
// report only one of them.
func testEventsEnd(t *testing.T) {
	useFake(t)
	port := 51_040
	for what, happens := range map[string]func(*Endpoint){
		"a queue pair's failure":    func(e *Endpoint) { e.dev.event(ibv.AsyncEvent{Type: ibv.EventQPFatal, QP: e.q.qp}) },
		"a request that is refused": func(e *Endpoint) { e.dev.event(ibv.AsyncEvent{Type: ibv.EventQPReqErr, QP: e.q.qp}) },
		"access that is refused":    func(e *Endpoint) { e.dev.event(ibv.AsyncEvent{Type: ibv.EventQPAccessErr, QP: e.q.qp}) },
		"a queue that overruns":     func(e *Endpoint) { e.dev.event(ibv.AsyncEvent{Type: ibv.EventCQErr, CQ: e.q.cq}) },
		"the device's failure":      func(e *Endpoint) { e.dev.event(ibv.AsyncEvent{Type: ibv.EventDeviceFatal}) },
		"the device's removal":      func(e *Endpoint) { e.q.cm.event(ibv.Event{Type: ibv.DeviceRemoval}) },
	} {
		port++
		e, w := started(t, port)
		for _, of := range []ibv.AsyncEventType{ibv.EventQPFatal, ibv.EventCQErr} {
			e.dev.event(ibv.AsyncEvent{Type: of}) // events for objects that were closed in the meantime
		}
		if err := e.Err(); err != nil {
			t.Errorf("an event of another connection: %v", err)
		}
		happens(e)
		expectReset(t, what, e, w)
		e.discard()
	}
}

// If a device fails to revoke the peer's access, the end of the connection revokes it.
func testRevokeKept(t *testing.T) {
	f := useFake(t)
	e, peer := fakePair(t, 51_030, Config{})
	w := make(wakes, 1)
	e.Start(w)
	d, err := e.mem.Expose(make([]byte, 4096), session.RemoteRead)
	if err != nil {
		t.Fatal(err)
	}
	const memoryRegions = fakeObjects + 1
	before := f.get(memoryRegions)
	f.set(fakeKeeps, 1)
	broken := f.get(fakeBroken)
	e.mem.Revoke(d)
	f.set(fakeKeeps, 0)
	expectReset(t, "a revoke in vain", e, w)
	if f.get(fakeBroken) != broken+1 || f.get(memoryRegions) != before {
		t.Errorf("the queue pair was broken %d times, and %d registrations have gone", f.get(fakeBroken)-broken, before-f.get(memoryRegions))
	}
	e.discard()
	peer.discard()
	f.set(memoryRegions, 0) // these registrations are lost for good
}

// A goroutine that arms while the queue reports an event is woken by that event, or the queue is armed
// again.
func testNotices(t *testing.T) {
	f := useFake(t)
	e, _ := fakePair(t, 49_000, Config{})
	w := make(wakes, 2)
	e.Start(w)
	announced := f.get(fakeNotifies)
	e.Disarm(^session.Events(0))
	e.q.notice() // consumes the notification that connecting has requested
	begin, armed := make(chan struct{}), make(chan struct{}, 1)
	defer close(begin)
	go func() {
		for range begin {
			e.Arm(session.SendReady)
			armed <- struct{}{}
		}
	}()
	const rounds = 20_000
	for round := range rounds {
		e.Arm(session.RecvReady)
		begin <- struct{}{}
		last := false // the other goroutine has armed, so nothing more happens by itself
		for turn, missing := 0, session.RecvReady|session.SendReady; missing != 0; turn++ {
			if asked := f.get(fakeNotifies); asked > announced {
				announced = asked
				for range rand.IntN(200) { // so that the other Arm comes before, during and after notice
					f.get(fakeNotifies)
				}
				e.q.notice()
			} else if last && len(w) == 0 {
				t.Fatalf("round %d: %b is armed, and the queue was not asked", round, e.q.armed.Load())
			}
			select {
			case ev := <-w:
				missing &^= ev
				continue
			default:
			}
			if turn < 1000 { // notice that the queue is armed again as early as possible
				continue
			}
			if !last {
				<-armed // waits, so that the other goroutine gets a processor
				last = true
			}
		}
		if !last {
			<-armed
		}
	}
}

// The memory of messages, and of Alloc, belongs to the endpoint until Retire, and is not used for
// another connection before. Its registrations are removed by Close and Abort.
func testRetire(t *testing.T) {
	f := useFake(t)
	const memoryRegions = fakeObjects + 1
	used := func() (control, allocated int64) {
		_, control = controlArena().Bytes()
		_, allocated = regcache.DefaultArena().Bytes()
		return control, allocated
	}
	for i, end := range []func(*Endpoint){(*Endpoint).Abort, func(e *Endpoint) { e.Close() }} {
		e, _ := fakePair(t, 51_000+i, Config{})
		room, control := e.Reserve(1000, 1000), e.ReserveControl(session.MaxControl)
		if room == nil || control == nil || e.mem.Alloc(64<<10) == nil {
			t.Fatal("no memory")
		}
		bytes, allocated := used()
		registered := f.get(memoryRegions)
		end(e)
		if b, a := used(); b != bytes || a != allocated {
			t.Errorf("before Retire %d and %d bytes of it are others'", bytes-b, allocated-a)
		}
		if n := f.get(memoryRegions); n != registered-2 {
			t.Errorf("%d registrations have gone, want those of messages", registered-n)
		}
		e.Commit(1000)
		e.CommitControl(session.MaxControl)
		e.Retire()
		if b, a := used(); b >= bytes || a >= allocated {
			t.Errorf("behind Retire %d and %d bytes are free", bytes-b, allocated-a)
		}
	}
}
