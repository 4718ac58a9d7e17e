package verbs

import (
	"fmt"
	"syscall"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/session"
)

// receiver receives messages: every buffer is posted, has arrived, is with the session
// (the last one or kept), or waits to be posted again together with others. The buffers
// are the endpoint's own, or its group's (srq.go).
type receiver struct {
	q         *queuePair
	group     *recvGroup // nil: mem and a receive queue of its own
	mem       []byte
	mr        *ibv.MR
	size      int // of a buffer, bytes
	count     int // of buffers
	iwarp     bool
	isInvalid ibv.WCFlags // of a message that has invalidated a key

	dropped bool // last was dropped; guarded by the session, as Poll is

	// The rest is guarded by mu of q.
	arrived      fifo[arrival]
	last         arrival // n is 0: none
	kept         fifo[arrival]
	repost       []int                   // buffers, up to repostBatch
	batch        [repostBatch]ibv.RecvWR // of postLocked: what C is given lives in the heap
	taken        int                     // buffers that are not posted
	any          bool                    // something has come
	disconnected bool                    // the peer's disconnect message has come
	buffersLost  bool                    // of a group: some of what was taken may not be found again

	lastTaken chan struct{} // of a group: see tookLast
}

// arrival is a message in a buffer.
type arrival struct {
	buffer int
	n      int // bytes
}

// open joins a group if there is one for the endpoint; else useOwn follows.
func (r *receiver) open(q *queuePair, cfg Config, dev *device, dom *domain) (err error) {
	r.q = q
	r.size, r.count = cfg.BufferSize, cfg.Buffers
	r.iwarp, r.isInvalid = dev.iwarp(), dev.withInvalidation(cfg)
	if r.group, err = dom.joinGroup(dev, cfg); err != nil {
		return err
	}
	if r.group != nil {
		r.count = srqShare
		r.lastTaken = make(chan struct{}, 1)
	}
	r.arrived = newFIFO[arrival](r.count)
	r.kept = newFIFO[arrival](r.count)
	r.repost = make([]int, 0, repostBatch)
	return nil
}

// useOwn takes the memory of the endpoint's own buffers.
func (r *receiver) useOwn(mem []byte, mr *ibv.MR) { r.mem, r.mr = mem, mr }

// buffer is a receive buffer and the registration that it lies in.
func (r *receiver) buffer(number int) ([]byte, *ibv.MR) {
	if r.group != nil {
		return r.group.buffer(number)
	}
	at := number * r.size
	return r.mem[at : at+r.size : at+r.size], r.mr
}

func (r *receiver) workRequest(number int) ibv.RecvWR {
	mem, mr := r.buffer(number)
	return recvWR(number, mem, mr)
}

func recvWR(number int, mem []byte, mr *ibv.MR) ibv.RecvWR {
	wr := ibv.RecvWR{ID: kindRecv | uint64(number), NumSGE: 1}
	wr.SGE[0] = ibv.SGE{Addr: uint64(addressOf(mem)), Length: uint32(len(mem)), LKey: mr.LKey}
	return wr
}

// postAll posts every buffer of the endpoint's own, before the peer can send.
func (r *receiver) postAll() error {
	if r.group != nil {
		return nil
	}
	wrs := make([]ibv.RecvWR, r.count)
	for i := range wrs {
		wrs[i] = r.workRequest(i)
	}
	_, err := r.q.qp.PostRecv(wrs)
	return err
}

// receivedLocked takes a message, or notes how receiving ended.
func (r *receiver) receivedLocked(wc *ibv.WC) {
	a := arrival{buffer: int(wc.ID &^ kindMask)}
	r.taken++
	if wc.Status != ibv.Success {
		// The queue pair has ended, for a reason that failLocked gets. In a group it may
		// also be that one message did not fit its buffer.
		r.againLocked(a)
		return
	}
	if r.q.ended() != nil { // which was all (session.Endpoint's contract): it comes too late
		r.againLocked(a)
		return
	}
	a.n = int(wc.ByteLen)
	first := !r.any
	r.any = true
	switch {
	case wc.Opcode != ibv.WCRecv || wc.Flags&ibv.WCWithImm != 0 || a.n > r.size:
		// An RDMA write with immediate data takes a receive too. Its length is that
		// of what was written elsewhere, and nothing is in the buffer.
		r.againLocked(a)
		r.q.failLocked(fmt.Errorf("verbs: the peer has sent what is no message (opcode %d, %d bytes): %w", wc.Opcode, a.n, syscall.ECONNRESET))
	case r.taken > r.count: // of a group: a queue of its own has no more
		r.againLocked(a)
		r.buffersLost = true // the completion queue has room for no more either
		r.q.failLocked(fmt.Errorf("verbs: the peer sends more than it has credit for: %w", syscall.ECONNRESET))
	case wc.Flags&r.isInvalid != 0:
		// No peer of ours does that. The key's window must not be invalidated again.
		r.againLocked(a)
		r.q.failLocked(fmt.Errorf("verbs: the peer has invalidated a key: %w", syscall.ECONNRESET))
	case a.n > 0:
		r.arrived.push(a)
	case first && r.iwarp: // the ready-to-receive message (iwarp.go)
		r.againLocked(a)
	default:
		r.againLocked(a)
		r.disconnected = true
		r.q.failLocked(fmt.Errorf("verbs: the peer has closed: %w", syscall.EPIPE))
	}
}

func (r *receiver) message(a arrival) []byte {
	mem, _ := r.buffer(a.buffer)
	return mem[:a.n:a.n]
}

// finishLastLocked posts the buffer of the last message again, if that was dropped.
func (r *receiver) finishLastLocked() {
	if !r.dropped {
		return
	}
	r.dropped = false
	if !r.q.gone && r.last.n > 0 {
		r.againLocked(r.last)
		r.last = arrival{}
	}
}

// nextLocked takes the next message that has arrived.
func (r *receiver) nextLocked(ev *session.Event) {
	r.last = r.arrived.pop()
	*ev = session.Event{Kind: session.Message, Msg: r.message(r.last), Last: r.arrived.n == 0}
}

func (r *receiver) keepLocked() {
	r.kept.push(r.last)
	r.last = arrival{}
}

func (r *receiver) frontLocked() []byte {
	if r.kept.n == 0 {
		return nil
	}
	return r.message(*r.kept.at(0))
}

func (r *receiver) releaseLocked() { r.againLocked(r.kept.pop()) }

// againLocked posts a buffer again, together with others. Once the endpoint is gone,
// Retire gives it back to the group.
func (r *receiver) againLocked(a arrival) {
	r.repost = append(r.repost, a.buffer)
	if len(r.repost) == repostBatch && !r.q.gone {
		r.postLocked()
	}
}

// postSomeLocked posts what waits for it, now that there is time; but not each single
// buffer.
func (r *receiver) postSomeLocked() {
	if len(r.repost) >= repostBatch/2 && !r.q.gone {
		r.postLocked()
	}
}

// postLocked posts what waits for it.
func (r *receiver) postLocked() {
	var err error
	wrs := r.batch[:len(r.repost)]
	for i, number := range r.repost {
		wrs[i] = r.workRequest(number)
	}
	switch {
	case r.group != nil: // others need them, whatever becomes of this connection
		_, err = r.group.srq.PostRecv(wrs)
	case r.q.failing == nil:
		_, err = r.q.qp.PostRecv(wrs)
	}
	r.taken -= len(r.repost)
	r.repost = r.repost[:0]
	if err != nil {
		r.buffersLost = true // of a group, which has fewer buffers now than it gave credit for
		r.q.failLocked(deviceError(err))
	}
}

// leave ends the device's use of a group's buffers. The queue pair has gone.
func (r *receiver) leave() {
	if r.group != nil {
		r.group.leave(r.buffersLost)
	}
}

// free gives a group's buffers back.
func (r *receiver) free() {
	if r.group != nil {
		r.group.giveBack(r.unposted())
		r.group = nil
	}
}

// unposted are the buffers of its group that the endpoint has at the end.
func (r *receiver) unposted() []int {
	list := r.repost
	if r.last.n > 0 {
		list = append(list, r.last.buffer)
	}
	for r.arrived.n > 0 {
		list = append(list, r.arrived.pop().buffer)
	}
	for r.kept.n > 0 {
		list = append(list, r.kept.pop().buffer)
	}
	return list
}
