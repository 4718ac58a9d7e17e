package verbs

import (
	"context"
	"errors"
	"time"

	"github.com/sanconn/san/ibv"
)

// The ready-to-receive message. On iWARP the active side has to send first (RFC 5044, 7.1.3; RFC 6581
// lets the driver do it, which not all drivers do). So the active side sends an empty message, and the
// passive side answers with another one. siw's passive side takes over the socket only after it has
// answered the connect request (siw_accept in sw/siw/siw_cm.c): a message that comes before stays in
// the socket until more comes. So the active side sends more: empty RDMA writes, which the peer's queue
// pair does not report.
const (
	firstNudge = 2 * time.Millisecond // doubled each time
	slowNudge  = 128 * time.Millisecond
)

// readyToReceive returns when the peer's message has come.
func (e *Endpoint) readyToReceive(ctx context.Context) error {
	come := func() bool { return e.recv.any }
	if e.passive {
		err := e.q.await(ctx, come)
		if err == nil {
			e.send.postEmpty()
		}
		return err
	}
	e.send.postEmpty()
	for after := firstNudge; ; after = min(2*after, slowNudge) {
		short, cancel := context.WithTimeout(ctx, after)
		err := e.q.await(short, come)
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil {
			return err
		}
		e.q.mu.Lock()
		if e.send.underwayLocked() == 0 { // otherwise the first message has not left yet
			e.send.postEmptyLocked(ibv.OpWrite)
		}
		e.q.mu.Unlock()
	}
}
