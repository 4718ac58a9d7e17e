package verbs

import (
	"errors"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/session"
)

// resources are what an endpoint has of its device, before and while it has a connection.
type resources struct {
	dev      *device
	dom      *domain
	cfg      Config
	peer     netip.Addr    // the peer in whose share its control buffers count
	locked   int           // bytes of RLIMIT_MEMLOCK that its queues take
	messages messageMemory // memory to send from, and behind it memory to receive into, registered separately

	q    queuePair
	send sendQueue
	recv receiveQueue
	mem  remote

	destroyed sync.Once    // guards destroyQP
	inUse     atomic.Int32 // users of the memory of messages: the device, and the session until Retire
}

// newEndpoint makes an endpoint that is to be connected by an id of rdma_cm, or, if id is nil, by what
// the ends exchange over TCP. toInit brings its queue pair to INIT, in which all receives are posted.
// Its control buffers count in the peer's share. The endpoint owns dev and the id; if newEndpoint
// fails, it releases both.
func newEndpoint(dev *device, id *cmID, peer netip.Addr, cfg Config, passive bool, toInit func(*ibv.QP) error) (*Endpoint, error) {
	peer = peer.Unmap().WithZone("")
	e, err := dev.ready.get(peer, cfg), error(nil)
	if e == nil {
		e, err = makeEndpoint(dev, peer, cfg)
	}
	if err != nil && !errors.Is(err, syscall.ENOBUFS) && dev.ready.giveWay() { // ENOBUFS: the peer has used up its share
		e.unmake()
		e, err = makeEndpoint(dev, peer, cfg)
	}
	e.q.cm, e.passive = id, passive
	if err == nil {
		dev.add(e)
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
		e.destroy()
		e.Retire()
		return nil, err
	}
	if e.cfg.sizes() == cfg.sizes() { // otherwise ready endpoints would come out smaller, too, and suit no connection
		dev.ready.refill(dev, cfg)
	}
	if id != nil {
		id.endpoint.Store(e)
	}
	return e, nil
}

// makeEndpoint makes an endpoint without a connection, whose queue pair is in RESET. After an error,
// what has been made must be freed as well.
func makeEndpoint(dev *device, peer netip.Addr, cfg Config) (*Endpoint, error) {
	e := &Endpoint{resources: resources{dev: dev, peer: peer, cfg: cfg}}
	e.q.user, e.mem.q, e.mem.send = &e.resources, &e.q, &e.send
	e.inUse.Store(2)
	return e, e.create()
}

// create makes the resources, with smaller buffers if memory is short.
func (r *resources) create() (err error) {
	if r.dom, err = r.dev.useDomain(r.cfg); err != nil {
		return err
	}
	r.mem.open(r.cfg, r.dev, r.dom)
	if r.cfg, err = r.dev.within(r.cfg, r.sends()); err != nil {
		return err
	}
	queues := r.dev.lockedByQueues(r.sends(), r.cfg.buffers)
	for r.cfg = r.cfg.fitting(memlockAvailable(), queues); ; {
		err = r.createQueues()
		smaller, ok := r.cfg.smaller()
		if !ok || !errors.Is(err, syscall.ENOMEM) {
			return err
		}
		r.destroyQueues()
		r.messages.free()
		r.cfg = smaller
	}
}

// sends returns how many work requests the send queue holds.
func (r *resources) sends() int { return maxSends + ownMessages + r.mem.sends() }

// createQueues makes the buffers for messages, and the queues.
func (r *resources) createQueues() (err error) {
	if err = r.createBuffers(); err != nil {
		return err
	}
	sends := r.sends()
	r.locked = r.dev.lockedByQueues(sends, r.cfg.buffers)
	lockedQueues.Add(int64(r.locked))
	// The queue must hold a completion for everything that is posted.
	vector := int(r.dev.vectors.Add(1) % uint32(max(r.dev.ctx.CompVectors, 1)))
	if err = withRoom(func() error { // because some devices' queues are locked memory, too
		r.q.cq, err = r.dev.ctx.CreateCQ(sends+r.cfg.buffers, r.dev.channel, vector)
		return err
	}); err != nil {
		return err
	}
	r.q.cq.Owner = &r.q
	return r.createQP(uint32(sends))
}

// createBuffers makes the buffers for messages, in two registrations (rule D1): no device may write to
// the memory that is sent from.
func (r *resources) createBuffers() (err error) {
	r.send, r.recv = sendQueue{}, receiveQueue{}
	sends, m := r.cfg.sendBytes(), &r.messages
	if *m, err = newMessageMemory(peerBudget{r.cfg.control, r.peer}, sends+r.cfg.receiveBytes()); err != nil {
		return err
	}
	outgoing, incoming := m.mem[:sends:sends], m.mem[sends:]
	readOnly, err := m.register(r.dom.pd, outgoing, 0)
	if err != nil {
		return err
	}
	writable, err := m.register(r.dom.pd, incoming, ibv.LocalWrite)
	if err != nil {
		return err
	}
	r.send.open(&r.q, r.cfg, r.dev.iwarp(), outgoing, readOnly)
	r.recv.open(&r.q, &r.mem.windows, r.cfg, r.dev.iwarp(), incoming, writable)
	return nil
}

// createQP requests as much inline data as is useful, and less if the device refuses. If the device
// refuses even none, memory may be short, and the caches are flushed once.
func (r *resources) createQP(sends uint32) (err error) {
	err = withRoom(func() error {
		for _, inline := range r.dev.inlineSizes() {
			c := ibv.QPConfig{
				PD: r.dom.pd, SendCQ: r.q.cq, RecvCQ: r.q.cq,
				Cap: ibv.QPCap{SendWR: sends, RecvWR: uint32(r.cfg.buffers), InlineData: inline},
			}
			if r.q.qp, err = ibv.CreateQP(c); err == nil {
				r.q.qp.Owner = &r.q
				r.send.inline = int(min(r.q.qp.Cap.InlineData, inline))
			}
			if !errors.Is(err, syscall.EINVAL) && !errors.Is(err, syscall.ENOMEM) { // otherwise requesting less may help
				break
			}
		}
		return err
	})
	return r.dev.withoutRC(err)
}

// limits returns the limits of an endpoint that was created.
func limits(e *Endpoint) session.Limits {
	off, moves := e.cfg.Disable, e.mem.maxExpose > 0 // without exposures nothing else can be registered either
	return session.Limits{
		Provider:   Name,
		MaxMessage: e.cfg.bufferSize,
		MaxRDMA:    e.mem.maxRDMA,
		MaxExpose:  e.mem.maxExpose,
		Threshold:  e.cfg.Threshold,
		Inbox:      inboxFrom,
		InboxAfter: inboxAfter,
		CanRead:    moves && e.dev.reads() && off&session.FeatureRDMARead == 0,
		CanWrite:   moves && off&session.FeatureRDMAWrite == 0,
		Window:     e.cfg.buffers - repostBatch - ownMessages,
		Spin:       spin,
	}
}

// destroyQueues destroys what createQueues has made, except the memory and the queue pair, which is
// destroyed already or was not made.
func (r *resources) destroyQueues() {
	r.messages.deregister()
	if r.q.cq != nil {
		r.q.cq.Close()
		r.q.cq = nil
	}
	lockedQueues.Add(-int64(r.locked))
	r.locked = 0
}

// completedLocked implements completer.
func (r *resources) completedLocked(wc *ibv.WC) {
	switch wc.ID & kindMask {
	case kindRecv:
		r.recv.receivedLocked(wc)
	case kindSend:
		r.send.sentLocked(wc)
	case kindRead:
		r.mem.transferredLocked(wc, &r.mem.reads)
	case kindWrite:
		r.mem.transferredLocked(wc, &r.mem.writes)
	case kindUnbind:
		r.mem.windows.unboundLocked(wc)
	}
	if wc.Status != ibv.Success {
		r.q.failLocked(statusError(wc))
	}
}

// transfersLocked implements completer.
func (r *resources) transfersLocked() int { return r.mem.reads.n + r.mem.writes.n }
