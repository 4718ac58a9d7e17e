package verbs

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"github.com/sanconn/san/ibv"
)

const (
	// drainTime bounds how long Close waits until the device has delivered what was
	// committed. Live peers take microseconds.
	drainTime = time.Second
	// teardownTime bounds how long Close and Abort wait for calls of librdmacm
	// that may block, on iWARP; the rest goes on in the background.
	teardownTime = 2 * time.Second
)

// Close implements session.Endpoint. It blocks for at most 1 s (drainTime), plus 0.1 s
// with a shared receive queue (lastTime), plus 4 s on iWARP (twice teardownTime), and
// for as long as the kernel takes to register and deregister memory.
func (e *Endpoint) Close() error {
	e.ended.Do(func() {
		e.farewell()
		e.tearDown(true, teardownTime)
	})
	return nil
}

// Abort implements session.Endpoint. It blocks for at most lastTime with a shared
// receive queue, teardownTime on iWARP, and for the kernel as Close does.
func (e *Endpoint) Abort() {
	e.ended.Do(func() { e.tearDown(false, teardownTime) })
}

// abandon ends a connection that was never handed out. It waits for less than Abort.
func (e *Endpoint) abandon() {
	e.ended.Do(func() { e.tearDown(false, 0) })
	e.Retire()
}

// discard ends a connection that nobody uses.
func (e *Endpoint) discard() {
	e.Abort()
	e.Retire()
}

// Retire implements session.Endpoint.
func (e *Endpoint) Retire() {
	if !e.retired.Swap(true) {
		e.freeAllocs()
		e.letGo()
	}
}

// letGo ends one use of the memory of messages: by the device, whose queue pair may still
// be being destroyed when Abort returns on iWARP, and by the session.
func (e *Endpoint) letGo() {
	if e.inUse.Add(-1) == 0 {
		e.freeMemory()
	}
}

// farewell sends the provider's last message, and waits until the device has delivered
// everything, as rdma_disconnect discards what is still queued (rxe).
func (e *Endpoint) farewell() {
	e.sayEmpty()
	ctx, cancel := context.WithTimeout(context.Background(), drainTime)
	defer cancel()
	// The wait ends early if the peer has closed as well and no longer reads.
	e.await(ctx, func() bool { return e.underway() == 0 })
}

var errClosed = fmt.Errorf("verbs: closed at this end: %w", syscall.ENOTCONN)

// tearDown gives everything back. When it returns, the queue pair is gone or in
// the error state: nothing touches this process's memory.
func (e *Endpoint) tearDown(orderly bool, wait time.Duration) {
	e.dev.remove(e)
	e.mu.Lock()
	e.gone = true
	if e.failing == nil {
		e.failing = errClosed
	}
	e.publish()
	e.mu.Unlock()
	if e.link == nil || !e.dev.iwarp() {
		e.free()
		return
	}
	// On iWARP these calls may wait for the network.
	if orderly {
		blocking.run(wait, e.link.disconnect)
	}
	e.qp.Modify(ibv.QPAttr{State: ibv.QPError}, ibv.MaskState)
	e.revokeAll() // now: another connection of a shared domain could use the keys
	blocking.run(wait, e.free)
}

// free gives back what there is, in the order that the kernel wants: the queue
// pair before the registrations, those before the protection domain.
func (e *Endpoint) free() {
	if e.link != nil && e.qp != nil {
		e.link.disconnect()
	}
	if e.group != nil && e.qp != nil {
		e.quiesce()
	}
	// Nothing of remote access begins any more; what had begun ends first.
	e.use.Lock()
	e.closeWindows()
	e.use.Unlock()
	switch {
	case e.qp == nil:
	case e.link != nil:
		e.link.destroyQP(e.qp)
	default:
		e.qp.Close()
	}
	for e.reads.n > 0 {
		e.reads.pop().region.Release()
	}
	for e.writes.n > 0 {
		e.writes.pop().region.Release()
	}
	for e.done.n > 0 {
		e.done.pop().region.Release()
	}
	e.revokeAll()
	e.freeQueues()
	e.letGo()
	if e.dom != nil {
		e.dom.release()
	}
	if e.tcp != nil {
		e.tcp.close()
	}
	// The device before the id: once it has been removed, librdmacm closes its
	// context with the last id.
	e.dev.release()
	if e.link != nil {
		e.link.close()
	}
}

// revokeAll takes back what is exposed. The endpoint is gone.
func (e *Endpoint) revokeAll() {
	x := &e.exposures
	e.use.Lock() // earlier Revokes have released what they took out; later ones find nothing
	defer e.use.Unlock()
	x.mu.Lock()
	exposed := x.m
	x.m = nil
	x.mu.Unlock()
	for _, x := range exposed {
		x.region.Release()
	}
}
