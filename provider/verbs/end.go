package verbs

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"github.com/sanconn/san/ibv"
)

const (
	// drainTime bounds how long Close waits until the device has delivered what was committed. With
	// live peers that takes microseconds.
	drainTime = time.Second
	// teardownTime bounds how long Close and Abort wait for calls of librdmacm that may block, on
	// iWARP. The calls go on in the background.
	teardownTime = 2 * time.Second
)

// Close implements session.Endpoint. It blocks for at most 1 s (drainTime), plus 4 s on iWARP (twice
// teardownTime), plus the time in which the kernel registers and deregisters memory.
func (e *Endpoint) Close() error {
	e.closing.Do(func() {
		e.sendDisconnect()
		e.tearDown(true, teardownTime)
	})
	return nil
}

// Abort implements session.Endpoint. It blocks for at most teardownTime on iWARP, plus the kernel's
// time as in Close.
func (e *Endpoint) Abort() {
	e.closing.Do(func() { e.tearDown(false, teardownTime) })
}

// abortUnused ends a connection that was never handed out. It does not wait as long as Abort.
func (e *Endpoint) abortUnused() {
	e.closing.Do(func() { e.tearDown(false, 0) })
	e.Retire()
}

// Retire implements session.Endpoint.
func (e *Endpoint) Retire() {
	if !e.retired.Swap(true) {
		e.mem.allocs.PutAll() // what the session has not freed
		e.unrefMessages()
	}
}

// unrefMessages ends one use of the memory of messages: by the device, whose queue pair on iWARP may
// still be in destruction when Abort returns, or by the session.
func (r *resources) unrefMessages() {
	if r.inUse.Add(-1) == 0 {
		r.messages.free()
	}
}

// sendDisconnect sends the disconnect message, the provider's last one, and waits until the device has
// delivered everything, because rdma_disconnect discards what is still queued (rxe).
func (e *Endpoint) sendDisconnect() {
	e.send.postEmpty()
	ctx, cancel := context.WithTimeout(context.Background(), drainTime)
	defer cancel()
	// The wait ends early if the peer has closed as well and does not read any more.
	e.q.await(ctx, func() bool { return e.send.underwayLocked() == 0 })
}

var errClosed = fmt.Errorf("verbs: closed at this end: %w", syscall.ENOTCONN)

// tearDown ends the connection. When it returns, the queue pair is destroyed or in the error state:
// nothing accesses this process's memory.
func (e *Endpoint) tearDown(orderly bool, wait time.Duration) {
	e.q.close(errClosed)
	if !e.mayBlock() {
		e.destroy()
		return
	}
	if orderly {
		blocking.run(wait, e.q.cm.disconnect)
	}
	e.q.mu.Lock()
	e.q.toErrorLocked()
	e.q.mu.Unlock()
	e.mem.revokeAll() // now, because another connection of a shared domain could use the keys
	blocking.run(wait, e.destroy)
	e.q.publish()
}

// mayBlock reports whether the calls that end the connection may wait for the network.
func (r *resources) mayBlock() bool { return r.q.cm != nil && r.dev.iwarp() }

// destroy frees the endpoint, in the order that the kernel requires.
func (e *Endpoint) destroy() {
	e.destroyObjects()
	e.dev.remove(e)
	if e.tcp != nil {
		e.tcp.Close()
		e.watch.Wait()
	}
	// The device before the id: after the device's removal, librdmacm closes its context with the last
	// id.
	e.dev.release()
	if e.q.cm != nil {
		e.q.cm.close()
	}
}

// destroyObjects destroys the queue pair before the registrations, and these before the protection
// domain.
func (r *resources) destroyObjects() {
	r.destroyQP()
	r.q.publish()
	r.mem.close()
	r.destroyQueues()
	r.unrefMessages()
	switch {
	case r.dom == nil:
	case r.dom.shared:
		r.mem.user.Leave()
	default:
		r.dom.close()
	}
}

// destroyQP ends the connection and destroys the queue pair, if there is one. Nothing may be posted any
// more.
func (r *resources) destroyQP() {
	r.destroyed.Do(func() {
		if r.q.qp == nil {
			return
		}
		if r.q.cm != nil {
			r.q.cm.disconnect()
		}
		r.mem.windows.close()
		r.q.mu.Lock()
		r.q.destroyed = true
		r.q.mu.Unlock()
		if r.q.cm != nil { // not during an rdma_disconnect for the peer's end, which uses it
			r.q.cm.call(func(*ibv.ID) error { return r.q.qp.Close() })
		} else {
			r.q.qp.Close()
		}
	})
}

// flushTimedOut implements completer. The device has gone, or the transfers were posted while the queue
// pair failed (siw never flushes those). The device may use their memory until the queue pair is
// destroyed.
func (r *resources) flushTimedOut() {
	if r.mayBlock() {
		blocking.run(0, r.abandonTransfers)
	} else {
		r.abandonTransfers()
	}
}

func (r *resources) abandonTransfers() {
	r.destroyQP()
	r.q.mu.Lock()
	defer r.q.mu.Unlock()
	if r.q.closed {
		return // destroy ends them
	}
	r.q.drainLocked()
	r.mem.abandonLocked(r.q.cause)
	r.q.publishLocked()
}
