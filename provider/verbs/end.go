package verbs

import (
	"context"
	"fmt"
	"syscall"
	"time"
)

const (
	// drainTime bounds how long Close waits until the device has delivered what was
	// committed. Live peers take microseconds.
	drainTime = time.Second
	// teardownTime bounds how long Close and Abort wait for calls of librdmacm
	// that may block, on iWARP; the rest goes on in the background.
	teardownTime = 2 * time.Second
)

// Close implements session.Endpoint. It blocks for at most 1 s (drainTime), plus 4 s on
// iWARP (twice teardownTime), and for as long as the kernel takes to register and
// deregister memory.
func (e *Endpoint) Close() error {
	e.ended.Do(func() {
		e.sendDisconnect()
		e.tearDown(true, teardownTime)
	})
	return nil
}

// Abort implements session.Endpoint. It blocks for at most teardownTime on iWARP, and for
// the kernel as Close does.
func (e *Endpoint) Abort() {
	e.ended.Do(func() { e.tearDown(false, teardownTime) })
}

// abandon ends a connection that was never handed out. It waits for less than Abort.
func (e *Endpoint) abandon() {
	e.ended.Do(func() { e.tearDown(false, 0) })
	e.Retire()
}

// Retire implements session.Endpoint.
func (e *Endpoint) Retire() {
	if !e.retired.Swap(true) {
		e.mem.allocs.PutAll() // what was not freed
		e.letGo()
	}
}

// letGo ends one use of the memory of messages: by the device, whose queue pair may still
// be being destroyed when Abort returns on iWARP, and by the session.
func (e *Endpoint) letGo() {
	if e.inUse.Add(-1) == 0 {
		e.messages.free()
	}
}

// sendDisconnect sends the disconnect message, the provider's last, and waits until the
// device has delivered everything, as rdma_disconnect discards what is still queued (rxe).
func (e *Endpoint) sendDisconnect() {
	e.send.postEmpty()
	ctx, cancel := context.WithTimeout(context.Background(), drainTime)
	defer cancel()
	// The wait ends early if the peer has closed as well and no longer reads.
	e.q.await(ctx, func() bool { return e.send.underwayLocked() == 0 })
}

var errClosed = fmt.Errorf("verbs: closed at this end: %w", syscall.ENOTCONN)

// tearDown ends the connection. When it returns, the queue pair is gone or in
// the error state: nothing touches this process's memory.
func (e *Endpoint) tearDown(orderly bool, wait time.Duration) {
	e.dev.remove(e)
	e.q.close(errClosed)
	if !e.mayBlock() {
		e.free()
		return
	}
	if orderly {
		blocking.run(wait, e.cm.disconnect)
	}
	e.q.mu.Lock()
	e.q.toErrorLocked()
	e.q.mu.Unlock()
	e.mem.revokeAll() // now: another connection of a shared domain could use the keys
	blocking.run(wait, e.free)
	e.q.publish()
}

// mayBlock reports whether the calls that end the connection may wait for the network.
func (e *Endpoint) mayBlock() bool { return e.cm != nil && e.dev.iwarp() }

// free gives back what there is, in the order that the kernel wants.
func (e *Endpoint) free() {
	e.freeObjects()
	if e.tcp != nil {
		e.tcp.close()
	}
	// The device before the id: once it has been removed, librdmacm closes its
	// context with the last id.
	e.dev.release()
	if e.cm != nil {
		e.cm.close()
	}
}

// freeObjects gives back the queue pair before the registrations, those before the protection domain.
func (e *Endpoint) freeObjects() {
	e.destroyQP()
	e.q.publish()
	e.mem.close()
	e.freeQueues()
	e.letGo()
	if e.dom != nil {
		e.dom.release()
	}
}

// destroyQP ends the connection and the queue pair, if there is one. Nothing is posted
// any more.
func (e *Endpoint) destroyQP() {
	e.destroyed.Do(func() {
		if e.q.qp == nil {
			return
		}
		if e.cm != nil {
			e.cm.disconnect()
		}
		e.mem.windows.close()
		e.q.mu.Lock()
		e.q.destroyed = true
		e.q.mu.Unlock()
		if e.cm != nil {
			e.cm.destroyQP(e.q.qp)
		} else {
			e.q.qp.Close()
		}
	})
}

// giveUp implements completer: the device has gone, or the transfers were posted while
// the queue pair failed (siw never flushes those). Until the queue pair is destroyed the
// device may use their memory.
func (e *Endpoint) giveUp() {
	if e.mayBlock() {
		blocking.run(0, e.abandonTransfers)
	} else {
		e.abandonTransfers()
	}
}

func (e *Endpoint) abandonTransfers() {
	e.destroyQP()
	e.q.mu.Lock()
	defer e.q.mu.Unlock()
	if e.q.closed {
		return // free ends them
	}
	e.q.drainLocked()
	e.mem.abandonLocked(e.q.cause)
	e.q.publishLocked()
}
