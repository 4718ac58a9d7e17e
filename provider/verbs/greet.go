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
	// With our RNR retry count of 0 nobody waits for it; a peer may have another.
	e.qp.Modify(ibv.QPAttr{MinRNRTimer: rnrTimer}, ibv.MaskMinRNRTimer)
	return nil
}

// Greeting. On iWARP the active side has to send first (RFC 5044, 7.1.3), whichever
// end the session lets send. So it greets with an empty message, and the passive side
// answers with another.
//
// One greeting is not enough. siw's passive side answers the connect request, after
// which the greeting may come, and only then takes over the socket (siw_accept): what
// came in between stays in the socket until more comes. So we send more: an empty RDMA
// write, which the peer's queue pair does not notice.
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

// nudge makes the peer's kernel look at its socket, unless what was sent before has
// not left yet.
func (e *Endpoint) nudge() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.failing == nil && !e.gone && e.underway() == 0 {
		e.wr[0] = ibv.SendWR{Opcode: ibv.OpWrite}
		e.postSend(&e.wr[0], true)
	}
}
