package verbs

import (
	"fmt"
	"syscall"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/session"
)

// Receiving: every buffer is posted, has arrived, is with the session (the last one or
// kept), or waits to be posted again together with others. The buffers are the
// endpoint's own, or its group's (srq.go).
type recvState struct {
	arrived fifo[arrival]
	last    arrival // n is 0: none
	dropped bool    // last was dropped; guarded by the session, as Poll is
	kept    fifo[arrival]
	repost  []int                   // buffers, up to repostBatch
	batch   [repostBatch]ibv.RecvWR // of postAgain: what C is given lives in the heap
	taken   int                     // buffers that are not posted
	heard   bool                    // something has come
	parted  bool                    // the peer's farewell has come

	lastTaken   chan struct{} // of a group: see tookLast
	buffersLost bool          // of a group: some of what was taken may not be found again
}

// arrival is a message in a buffer.
type arrival struct {
	buffer int
	n      int // bytes
}

func (e *Endpoint) initReceive() {
	e.arrived = newFIFO[arrival](e.cfg.Buffers)
	e.kept = newFIFO[arrival](e.cfg.Buffers)
	e.repost = make([]int, 0, repostBatch)
}

// makeReceiveBuffers makes the endpoint's own, or joins a group.
func (e *Endpoint) makeReceiveBuffers() (err error) {
	if e.group, err = e.dom.joinGroup(e.dev, e.cfg); err != nil {
		return err
	}
	if e.group != nil {
		e.cfg.Buffers = srqShare
		e.lastTaken = make(chan struct{}, 1)
		return nil
	}
	e.recvRegion, err = newRegion(e.cfg.control, e.dom.pd, e.cfg.receiveBytes(), ibv.LocalWrite)
	return err
}

// buffer is a receive buffer and the registration that it lies in.
func (e *Endpoint) buffer(number int) ([]byte, *ibv.MR) {
	if e.group != nil {
		return e.group.buffer(number)
	}
	r, at := &e.recvRegion, number*e.cfg.BufferSize
	return r.mem[at : at+e.cfg.BufferSize : at+e.cfg.BufferSize], r.mr
}

func (e *Endpoint) recvWR(number int) ibv.RecvWR {
	mem, mr := e.buffer(number)
	return recvWR(number, mem, mr)
}

func recvWR(number int, mem []byte, mr *ibv.MR) ibv.RecvWR {
	wr := ibv.RecvWR{ID: kindRecv | uint64(number), NumSGE: 1}
	wr.SGE[0] = ibv.SGE{Addr: uint64(addressOf(mem)), Length: uint32(len(mem)), LKey: mr.LKey}
	return wr
}

// postAll posts every buffer of the endpoint's own, before the peer can send.
func (e *Endpoint) postAll() error {
	if e.group != nil {
		return nil
	}
	wrs := make([]ibv.RecvWR, e.cfg.Buffers)
	for i := range wrs {
		wrs[i] = e.recvWR(i)
	}
	_, err := e.qp.PostRecv(wrs)
	return err
}

// received takes a message, or notes how receiving ended. mu is held.
func (e *Endpoint) received(wc *ibv.WC) {
	a := arrival{buffer: int(wc.ID &^ kindMask)}
	e.taken++
	if wc.Status != ibv.Success {
		// The queue pair has ended; fail notes why. In a group it may also be that one
		// message did not fit its buffer.
		e.again(a)
		return
	}
	a.n = int(wc.ByteLen)
	first := !e.heard
	e.heard = true
	switch {
	case wc.Opcode != ibv.WCRecv || wc.Flags&ibv.WCWithImm != 0 || a.n > e.cfg.BufferSize:
		// An RDMA write with immediate data takes a receive too. Its length is that
		// of what was written elsewhere, and nothing is in the buffer.
		e.again(a)
		e.fail(fmt.Errorf("verbs: the peer has sent what is no message (opcode %d, %d bytes): %w", wc.Opcode, a.n, syscall.ECONNRESET))
	case e.taken > e.cfg.Buffers: // of a group: a queue of its own has no more
		e.again(a)
		e.buffersLost = true // the completion queue has room for no more either
		e.fail(fmt.Errorf("verbs: the peer sends more than it has credit for: %w", syscall.ECONNRESET))
	case wc.Flags&ibv.WCWithInv != 0 || e.cfg.ForceWindows && wc.Flags&rxeWithInv != 0:
		// We never ask for that. The key's window must not be invalidated again.
		e.again(a)
		e.fail(fmt.Errorf("verbs: the peer has invalidated a key: %w", syscall.ECONNRESET))
	case a.n > 0:
		e.arrived.push(a)
	case first && e.dev.iwarp(): // the greeting
		e.again(a)
	default:
		e.again(a)
		e.parted = true
		e.fail(fmt.Errorf("verbs: the peer has closed: %w", syscall.EPIPE))
	}
}

func (e *Endpoint) message(a arrival) []byte {
	mem, _ := e.buffer(a.buffer)
	return mem[:a.n:a.n]
}

// Poll implements session.Endpoint.
func (e *Endpoint) Poll(ev *session.Event) bool {
	e.mu.Lock()
	if e.dropped {
		e.dropped = false
		if !e.gone && e.last.n > 0 {
			e.again(e.last)
			e.last = arrival{}
		}
	}
	if e.done.n == 0 && e.arrived.n == 0 {
		e.drain()
	}
	switch {
	case e.done.n > 0:
		d := e.done.pop()
		e.mu.Unlock()
		d.region.Release() // before anybody is told (rule E2)
		*ev = session.Event{Kind: d.kind, ID: d.id, Err: d.err}
		return true
	case e.arrived.n > 0:
		e.last = e.arrived.pop()
		*ev = session.Event{Kind: session.Message, Msg: e.message(e.last), Last: e.arrived.n == 0}
		e.mu.Unlock()
		return true
	}
	if len(e.repost) >= repostBatch/2 && !e.gone {
		e.postAgain() // there is time now; but not for each single buffer
	}
	e.mu.Unlock()
	return false
}

// Drop implements session.Endpoint. The buffer is posted by the next Poll or later, as
// the program is waiting for what the message brought.
func (e *Endpoint) Drop() { e.dropped = true }

// Keep implements session.Endpoint.
func (e *Endpoint) Keep() {
	e.mu.Lock()
	e.kept.push(e.last)
	e.last = arrival{}
	e.mu.Unlock()
}

// Front implements session.Endpoint.
func (e *Endpoint) Front() []byte {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.kept.n == 0 {
		return nil
	}
	return e.message(*e.kept.at(0))
}

// Release implements session.Endpoint.
func (e *Endpoint) Release() {
	e.mu.Lock()
	e.again(e.kept.pop())
	e.mu.Unlock()
}

// again posts a buffer again, together with others. Once the endpoint is gone, Retire
// gives it back to the group. mu is held.
func (e *Endpoint) again(a arrival) {
	e.repost = append(e.repost, a.buffer)
	if len(e.repost) == repostBatch && !e.gone {
		e.postAgain()
	}
}

// postAgain posts what waits for it. mu is held.
func (e *Endpoint) postAgain() {
	var err error
	wrs := e.batch[:len(e.repost)]
	for i, number := range e.repost {
		wrs[i] = e.recvWR(number)
	}
	switch {
	case e.group != nil: // others need them, whatever becomes of this connection
		_, err = e.group.srq.PostRecv(wrs)
	case e.failing == nil:
		_, err = e.qp.PostRecv(wrs)
	}
	e.taken -= len(e.repost)
	e.repost = e.repost[:0]
	if err != nil {
		e.buffersLost = true // of a group, which has fewer buffers now than it gave credit for
		e.fail(deviceError(err))
	}
}
