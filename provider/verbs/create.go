package verbs

import (
	"errors"
	"net/netip"
	"syscall"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/session"
)

// newEndpoint makes an endpoint that is yet to be connected: by an id of rdma_cm, or, if id is nil,
// by what the ends exchange. toInit brings its queue pair to INIT, where all receives are posted.
// Its control buffers count as the peer's. It owns dev and the id from now on, and releases both
// when it fails.
func newEndpoint(dev *device, id *cmID, peer netip.Addr, cfg Config, passive bool, toInit func(*ibv.QP) error) (*Endpoint, error) {
	peer = peer.Unmap().WithZone("")
	e, err := dev.takeReady(peer, cfg), error(nil)
	if e == nil {
		e, err = makeEndpoint(dev, peer, cfg)
	}
	e.cm, e.passive = id, passive
	if err == nil {
		e.limits = limits(e)
		err = toInit(e.q.qp)
	}
	if err == nil {
		err = e.recv.postAll()
	}
	if err != nil {
		if id != nil && passive {
			id.reject(refusalFor(err))
		}
		e.q.close(err)
		e.free()
		e.Retire()
		return nil, err
	}
	dev.add(e)
	dev.refill(cfg)
	if id != nil {
		id.endpoint.Store(e)
	}
	return e, nil
}

// makeEndpoint makes an endpoint without a connection, whose queue pair is in RESET. What there is
// after an error is to be freed, too.
func makeEndpoint(dev *device, peer netip.Addr, cfg Config) (*Endpoint, error) {
	e := &Endpoint{dev: dev, peer: peer, cfg: cfg}
	e.q.user, e.mem.q, e.mem.send = e, &e.q, &e.send
	e.inUse.Store(2)
	return e, e.create()
}

// create makes what the endpoint has, with smaller buffers where memory is short.
func (e *Endpoint) create() (err error) {
	if e.dom, err = e.dev.useDomain(e.cfg); err != nil {
		return err
	}
	e.mem.open(e.cfg, e.dev, e.dom)
	if e.cfg, err = e.dev.within(e.cfg, e.sends()); err != nil {
		return err
	}
	queues := e.dev.lockedByQueues(e.sends(), e.cfg.buffers)
	for e.cfg = e.cfg.fitting(room(memlockLeft(), queues)); ; {
		if err = e.createQueues(); err == nil {
			break
		}
		smaller, ok := e.cfg.smaller()
		if !ok || !errors.Is(err, syscall.ENOMEM) {
			return err
		}
		e.freeQueues()
		e.messages.free()
		e.cfg = smaller
	}
	return nil
}

// sends is how many work requests the send queue holds.
func (e *Endpoint) sends() int { return maxSends + ownMessages + e.mem.sends() }

// createQueues makes the buffers for messages and the queues.
func (e *Endpoint) createQueues() (err error) {
	if err = e.createBuffers(); err != nil {
		return err
	}
	sends := e.sends()
	e.locked = e.dev.lockedByQueues(sends, e.cfg.buffers)
	lockedQueues.Add(int64(e.locked))
	// The queue has to hold a completion for everything that is posted.
	vector := int(e.dev.vectors.Add(1) % uint32(max(e.dev.ctx.CompVectors, 1)))
	if err = withRoom(func() error { // as some devices' queues are locked memory, too
		e.q.cq, err = e.dev.ctx.CreateCQ(sends+e.cfg.buffers, e.dev.channel, vector)
		return err
	}); err != nil {
		return err
	}
	e.q.cq.Owner = e
	return e.createQP(uint32(sends))
}

// createBuffers makes the buffers for messages, in two registrations (rule D1): no device
// writes to what is sent from.
func (e *Endpoint) createBuffers() (err error) {
	e.send, e.recv = sendQueue{}, receiveQueue{}
	sends, m := e.cfg.sendBytes(), &e.messages
	if *m, err = newRegion(share{e.cfg.control, e.peer}, sends+e.cfg.receiveBytes()); err != nil {
		return err
	}
	outgoing, incoming := m.mem[:sends:sends], m.mem[sends:]
	readOnly, err := m.register(e.dom.pd, outgoing, 0)
	if err != nil {
		return err
	}
	writable, err := m.register(e.dom.pd, incoming, ibv.LocalWrite)
	if err != nil {
		return err
	}
	e.send.open(&e.q, e.cfg, e.dev, outgoing, readOnly)
	e.recv.open(&e.q, &e.mem.windows, e.cfg, e.dev, incoming, writable)
	return nil
}

// createQP asks for as much inline data as is useful, and for less where the device refuses. If
// even none is too much, that may be for want of memory, and the caches are flushed once.
func (e *Endpoint) createQP(sends uint32) (err error) {
	err = withRoom(func() error {
		for _, inline := range e.dev.inlineSizes() {
			c := ibv.QPConfig{
				PD: e.dom.pd, SendCQ: e.q.cq, RecvCQ: e.q.cq,
				Cap: ibv.QPCap{SendWR: sends, RecvWR: uint32(e.cfg.buffers), InlineData: inline},
			}
			if e.q.qp, err = ibv.CreateQP(c); err == nil {
				e.q.qp.Owner = e
				e.send.inline = int(min(e.q.qp.Cap.InlineData, inline))
			}
			if !mayBeInline(err) {
				break
			}
		}
		return err
	})
	return e.dev.withoutRC(err)
}

// limits describes the endpoint that was created.
func limits(e *Endpoint) session.Limits {
	off := e.cfg.Disable
	l := session.Limits{
		Provider:   Name,
		MaxMessage: e.cfg.bufferSize,
		MaxRDMA:    e.mem.maxRDMA,
		MaxExpose:  e.mem.maxExpose,
		Threshold:  e.cfg.Threshold,
		Inbox:      inboxFrom,
		InboxAfter: inboxAfter,
		CanRead:    e.dev.reads() && off&session.FeatureRDMARead == 0,
		CanWrite:   off&session.FeatureRDMAWrite == 0,
		Window:     e.cfg.buffers - repostBatch - ownMessages,
		Spin:       spin,
	}
	if l.MaxExpose == 0 { // then nothing else can be registered either
		l.CanRead, l.CanWrite = false, false
	}
	return l
}

// freeQueues gives back what createQueues has made, but for the memory and the queue
// pair, which is gone or was not made.
func (e *Endpoint) freeQueues() {
	e.messages.deregister()
	if e.q.cq != nil {
		e.q.cq.Close()
		e.q.cq = nil
	}
	lockedQueues.Add(-int64(e.locked))
	e.locked = 0
}
