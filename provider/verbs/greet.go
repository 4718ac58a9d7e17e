package verbs

import (
	"context"
	"errors"
	"time"

	"github.com/sanconn/san/ibv"
)

// rnrTimer is 10 µs: rdma_cm leaves it at 0, which means 655 ms.
const rnrTimer = 1

// established finishes a new connection, before it is handed out.
func (e *Endpoint) established(ctx context.Context) error {
	if e.dev.iwarp() {
		return e.greet(ctx)
	}
	// With retries at 0 nobody waits for it; a peer may be set otherwise.
	e.qp.Modify(ibv.QPAttr{MinRNRTimer: rnrTimer}, ibv.MaskMinRNRTimer)
	return nil
}

// Greeting. On iWARP the active side has to speak first (RFC 5044, 7.1.3),
// whoever the session lets speak. So it greets, with an empty message, and the
// passive side answers with another.
//
// To greet once is not enough. siw's passive side answers the request to connect,
// whereupon the greeting may come, and only then takes over the socket
// (siw_accept): what came in between stays in the socket until more comes. More
// is a write of nothing to nowhere, of which the peer's queue pair learns nothing.
const (
	firstNudge = 2 * time.Millisecond // doubled with each
	slowNudge  = 128 * time.Millisecond
)

// greet returns when the peer has been heard.
func (e *Endpoint) greet(ctx context.Context) error {
	heard := func() bool { return e.heard }
	if e.passive {
		err := e.await(ctx, heard)
		if err == nil {
			e.sayEmpty()
		}
		return err
	}
	e.sayEmpty()
	for after := firstNudge; ; after = min(2*after, slowNudge) {
		short, cancel := context.WithTimeout(ctx, after)
		err := e.await(short, heard)
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil {
			return err
		}
		e.nudge()
	}
}

// nudge has the peer's kernel look at its socket, unless what was said before
// has not left yet.
func (e *Endpoint) nudge() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.failing == nil && !e.gone && e.underway() == 0 {
		e.wr[0] = ibv.SendWR{Opcode: ibv.OpWrite}
		e.postSend(&e.wr[0], true)
	}
}
