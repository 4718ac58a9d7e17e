package verbs

import (
	"cmp"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/session"
)

// queuePair is a queue pair with its completion queue. It handles completions, the end of the
// connection, and wake-ups. Send queue, receive queue and remote post to it, and report failures to it.
type queuePair struct {
	qp   *ibv.QP
	cq   *ibv.CQ
	cm   *cmID // the id that connects it; nil: without rdma_cm
	user completer

	waker     atomic.Pointer[session.Waker]
	armed     atomic.Uint32         // session.Events
	notified  atomic.Bool           // an announcement of the next completion is requested; set with mu held
	published atomic.Pointer[error] // cause, once Poll has all that came before it
	watchers  watchers

	mu        sync.Mutex  // guards the fields below, what is posted and polled, and the state of both queues and of remote
	closed    bool        // this end is destroying its queues
	destroyed bool        // qp is destroyed, or about to be
	cause     error       // why the connection is over; or nil
	late      *time.Timer // calls user.flushTimedOut if transfers outlast cause
	wcs       [32]ibv.WC
	reaping   bool // reapLocked is running, and uses wcs
	dry       bool // the last poll found no completion
}

// completer handles a queue pair's completions.
type completer interface {
	// completedLocked handles a completion. It reports a failure by failLocked.
	completedLocked(*ibv.WC)
	// transfersLocked returns how many transfers to and from memory of this end are in progress.
	transfersLocked() int
	// flushTimedOut ends transfers whose completions did not come within flushTime, and publishes the
	// end.
	flushTimedOut()
}

// A work request's ID has its kind in the top byte. Below is a count of this kind, or the number of its
// buffer.
const (
	kindShift  = 56
	kindSend   = uint64(1) << kindShift
	kindRead   = uint64(2) << kindShift
	kindWrite  = uint64(3) << kindShift
	kindRecv   = uint64(4) << kindShift
	kindBind   = uint64(5) << kindShift
	kindUnbind = uint64(6) << kindShift
	kindPart   = uint64(7) << kindShift // of a transfer, except for its last part
	kindMask   = uint64(0xff) << kindShift
)

// overLocked reports whether nothing may be posted any more.
func (q *queuePair) overLocked() bool { return q.cause != nil }

func (q *queuePair) over() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.overLocked()
}

// reported returns why the connection is over, once Poll has all that came before the end; until then
// nil.
func (q *queuePair) reported() error {
	if p := q.published.Load(); p != nil {
		return *p
	}
	return nil
}

func (q *queuePair) wake(ev session.Events) {
	if w := q.waker.Load(); w != nil {
		(*w).Wake(ev)
	}
}

// failLocked records why the connection is over. It reaps completions first, because one of them may
// give an earlier reason. The end is published when no RDMA read or write of this end is in progress:
// then Poll has the completions of all that was flushed.
func (q *queuePair) failLocked(err error) {
	if q.reaping { // drainLocked continues, and publishes
		q.cause = cmp.Or(q.cause, err)
		return
	}
	q.reapLocked()
	q.cause = cmp.Or(q.cause, err)
	q.publishFlushedLocked()
}

// flushTime bounds how long a failed connection waits for the completions of what it had posted.
const flushTime = time.Second

// fail ends the connection and the peer's access, for callers that do not hold mu.
func (q *queuePair) fail(err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.failLocked(err)
	if !q.closed {
		q.toErrorLocked()
	}
}

// disconnectGrace is how long completions of a peer's messages may come after its end was reported by
// rdma_cm or TCP. The messages were acknowledged before that, but a device completes a message after it
// has acknowledged it: microseconds after, longer if the processors are busy (hwsim's device is a
// thread). It is a variable for tests.
var disconnectGrace = 100 * time.Millisecond

// hangUp ends the connection and the peer's access after the peer's last message, and then calls
// disconnect. It does not block.
func (q *queuePair) hangUp(err error, disconnect func()) {
	end := func() {
		q.fail(err)
		disconnect()
	}
	q.mu.Lock()
	q.drainLocked()
	over := q.overLocked()
	q.mu.Unlock()
	if over {
		end()
	} else {
		time.AfterFunc(disconnectGrace, end) // has no effect on an endpoint that has ended
	}
}

// close keeps the device's events from the queues, which are about to be freed.
func (q *queuePair) close(err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.cause = cmp.Or(q.cause, err)
}

// toErrorLocked puts the queue pair into the error state: posted work requests are flushed, and the
// peer's access ends.
func (q *queuePair) toErrorLocked() {
	if !q.destroyed {
		q.qp.Modify(ibv.QPAttr{State: ibv.QPError}, ibv.MaskState)
	}
}

// publishFlushedLocked publishes the end, or waits for the transfers in progress.
func (q *queuePair) publishFlushedLocked() {
	switch {
	case q.cause == nil || q.published.Load() != nil:
	case q.user.transfersLocked() == 0:
		q.publishLocked()
	case q.late == nil && !q.closed:
		if q.notified.CompareAndSwap(false, true) {
			q.cq.Notify()
		}
		q.late = time.AfterFunc(flushTime, q.user.flushTimedOut)
	}
}

// publish makes reported return why the connection is over, if it is.
func (q *queuePair) publish() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.cause != nil {
		q.publishLocked()
	}
}

// publishLocked makes reported return the end, and wakes everybody.
func (q *queuePair) publishLocked() {
	err := q.cause
	if !q.published.CompareAndSwap(nil, &err) {
		return
	}
	if q.late != nil {
		q.late.Stop()
	}
	q.wake(session.RecvReady | session.SendReady)
	q.watchers.alert()
}

// deviceError returns the error for a failure of the device, which ends the connection. The device's
// errno is only in the text. Programs look for ECONNRESET instead (siw fails with ENOTCONN when posting
// to a queue pair whose peer has gone).
func deviceError(err error) error { return fmt.Errorf("%v: %w", err, syscall.ECONNRESET) }

// statusError returns the error by which a failed work request ends the connection.
func statusError(wc *ibv.WC) error {
	errno := syscall.ECONNRESET
	if wc.Status == ibv.RetryExcErr || wc.Status == ibv.RespTimeoutErr {
		errno = syscall.ETIMEDOUT
	}
	return fmt.Errorf("verbs: %w: %w", wc.Err(), errno)
}

var errOver = fmt.Errorf("verbs: the connection has ended: %w", syscall.ENOTCONN)
