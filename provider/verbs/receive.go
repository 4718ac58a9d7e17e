package verbs

import (
	"fmt"
	"syscall"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/session"
)

// receiveQueue receives messages. Each receive buffer is posted; or has a message that Poll has not
// returned yet (arrived), or that the session has (last, kept); or waits to be posted again together
// with others (repost).
type receiveQueue struct {
	q       *queuePair
	windows *windows // those that messages may invalidate
	mem     []byte
	mr      *ibv.MR
	size    int // of a buffer, in bytes
	count   int // number of buffers
	iwarp   bool

	dropped bool // last was dropped; guarded by the session, like Poll

	// The fields below are guarded by mu of q.
	arrived fifo[arrival]
	last    arrival // n is 0 if there is none
	kept    fifo[arrival]
	repost  []int                   // buffers, up to repostBatch
	batch   [repostBatch]ibv.RecvWR // for postLocked; what is passed to C must be in the heap
	any     bool                    // a message has come
}

// arrival is a message in a buffer.
type arrival struct {
	buffer int
	n      int // in bytes
}

func (r *receiveQueue) open(q *queuePair, ws *windows, cfg Config, iwarp bool, mem []byte, mr *ibv.MR) {
	r.q, r.windows, r.mem, r.mr = q, ws, mem, mr
	r.size, r.count = cfg.bufferSize, cfg.buffers
	r.iwarp = iwarp
	r.arrived = newFIFO[arrival](r.count)
	r.kept = newFIFO[arrival](r.count)
	r.repost = make([]int, 0, repostBatch)
}

func (r *receiveQueue) buffer(number int) []byte { return r.mem[number*r.size:][:r.size:r.size] }

func (r *receiveQueue) workRequest(number int) ibv.RecvWR {
	at := ibv.SGE{Addr: uint64(addressOf(r.buffer(number))), Length: uint32(r.size), LKey: r.mr.LKey}
	return ibv.RecvWR{ID: kindRecv | uint64(number), SGE: at}
}

// postAll posts all buffers, before the peer can send.
func (r *receiveQueue) postAll() error {
	wrs := make([]ibv.RecvWR, r.count)
	for i := range wrs {
		wrs[i] = r.workRequest(i)
	}
	_, err := r.q.qp.PostRecv(wrs)
	return err
}

// receivedLocked handles a received message, or the failure of a receive.
func (r *receiveQueue) receivedLocked(wc *ibv.WC) {
	if wc.Status != ibv.Success {
		return // the queue pair has ended, for a reason that failLocked is told
	}
	if r.q.reported() != nil { // after the end no message may be returned (session.Endpoint)
		return
	}
	a := arrival{buffer: int(wc.ID &^ kindMask), n: int(wc.ByteLen)}
	first := !r.any
	r.any = true
	switch {
	case wc.Opcode != ibv.WCRecv || wc.Flags&ibv.WCWithImm != 0 || a.n > r.size:
		// An RDMA write with immediate data also takes a receive. Its length is that of the bytes that
		// were written elsewhere, and nothing is in the buffer.
		r.q.failLocked(fmt.Errorf("verbs: the peer has sent what is no message (opcode %d, %d bytes): %w", wc.Opcode, a.n, syscall.ECONNRESET))
	case wc.Flags&ibv.WCWithInv != 0 && !r.windows.returnedLocked(wc.InvKey):
		// No peer with this library does that. The window of this key must not be invalidated again.
		r.q.failLocked(fmt.Errorf("verbs: the peer has invalidated a key: %w", syscall.ECONNRESET))
	case a.n > 0:
		r.arrived.push(a)
	case first && r.iwarp: // the ready-to-receive message (iwarp.go)
		r.againLocked(a)
	default:
		r.q.failLocked(fmt.Errorf("verbs: the peer has closed: %w", syscall.EPIPE))
	}
}

func (r *receiveQueue) message(a arrival) []byte { return r.buffer(a.buffer)[:a.n:a.n] }

// finishLastLocked posts the buffer of the last message again, if the message was dropped.
func (r *receiveQueue) finishLastLocked() {
	if !r.dropped {
		return
	}
	r.dropped = false
	if r.last.n > 0 {
		r.againLocked(r.last)
		r.last = arrival{}
	}
}

// nextLocked returns the next message that has arrived.
func (r *receiveQueue) nextLocked(ev *session.Event) {
	r.last = r.arrived.pop()
	*ev = session.Event{Kind: session.Message, Msg: r.message(r.last), Last: r.arrived.n == 0}
}

// againLocked queues a buffer to be posted again, together with others.
func (r *receiveQueue) againLocked(a arrival) {
	r.repost = append(r.repost, a.buffer)
	if len(r.repost) == repostBatch {
		r.postLocked()
	}
}

// postSomeLocked posts waiting buffers at a time when nothing else is urgent, but not for each single
// buffer.
func (r *receiveQueue) postSomeLocked() {
	if len(r.repost) >= repostBatch/2 {
		r.postLocked()
	}
}

// postLocked posts the waiting buffers.
func (r *receiveQueue) postLocked() {
	wrs := r.batch[:len(r.repost)]
	for i, number := range r.repost {
		wrs[i] = r.workRequest(number)
	}
	r.repost = r.repost[:0]
	if r.q.overLocked() {
		return
	}
	if _, err := r.q.qp.PostRecv(wrs); err != nil {
		r.q.failLocked(deviceError(err))
	}
}
