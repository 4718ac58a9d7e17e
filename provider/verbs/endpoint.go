package verbs

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/session"
)

// Endpoint is a reliable-connected queue pair with its completion queue and its
// buffers. It implements session.Endpoint.
//
// Completions are taken from the queue in batches by whoever looks, the session's
// reader in Poll or its writer in Reserve, and sorted: what was received and
// the completions of remote access wait here until Poll hands them out.
//
// The peer's end: an orderly Close sends an empty message after all others (no
// session message is empty), so it is found in order, and is EPIPE. Anything else
// that ends the connection, such as an event of rdma_cm or a failed work request, is
// ECONNRESET or ETIMEDOUT, after the completion queue has been emptied.
type Endpoint struct {
	dev           *device
	link          *link      // nil: connected without rdma_cm, and
	tcp           *exchanged // instead
	dom           *domain
	cfg           Config
	limits        session.Limits
	local, remote netip.AddrPort
	passive       bool

	cq                     *ibv.CQ
	qp                     *ibv.QP
	sendRegion, recvRegion region
	group                  *recvGroup // nil: recvRegion and a receive queue of its own
	inline                 int        // bytes

	waker    atomic.Pointer[session.Waker]
	armed    atomic.Uint32 // session.Events
	notified atomic.Bool   // the completion queue will announce its next completion; set with mu held
	err      atomic.Pointer[error]
	ended    sync.Once
	retired  atomic.Bool
	inUse    atomic.Int32 // the memory of messages: by the device, and until Retire by the session
	reached  atomic.Bool  // the peer may have sent something
	watchers watchers

	mu      sync.Mutex  // guards all below, and what is posted and polled
	gone    bool        // the queues are being destroyed
	failing error       // why the connection is over; err follows
	late    *time.Timer // calls giveUp after failing was set
	wcs     [32]ibv.WC
	dry     bool // the last look found nothing

	sendState
	recvState
	remoteState
}

var _ session.Endpoint = (*Endpoint)(nil)

// A work request's ID is its kind in the top byte, and below it a count of its
// kind or the number of its buffer.
const (
	kindShift  = 56
	kindSend   = uint64(1) << kindShift
	kindRead   = uint64(2) << kindShift
	kindWrite  = uint64(3) << kindShift
	kindRecv   = uint64(4) << kindShift
	kindBind   = uint64(5) << kindShift
	kindUnbind = uint64(6) << kindShift
	kindPart   = uint64(7) << kindShift // of a transfer, but for its end
	kindMask   = uint64(0xff) << kindShift
)

// newEndpoint makes the queue pair, of a link's id or (nil) of its own, with all
// receive buffers posted. It owns dev and link from now on, also when it fails.
func newEndpoint(dev *device, l *link, cfg Config, passive bool) (*Endpoint, error) {
	e := &Endpoint{dev: dev, link: l, cfg: cfg, passive: passive}
	e.inUse.Store(2)
	if err := e.build(); err != nil {
		if l != nil && passive {
			l.id.Reject(hello{helloVersion, refusalFor(err)}.bytes())
		}
		e.free()
		e.Retire()
		return nil, err
	}
	dev.add(e)
	if l != nil {
		l.endpoint.Store(e)
	}
	return e, nil
}

func (e *Endpoint) build() (err error) {
	cfg, dev := e.cfg, e.dev
	if e.dom, err = dev.useDomain(cfg); err != nil {
		return err
	}
	for e.cfg = cfg.within(memlockLeft()); ; {
		if err = e.queues(); err == nil {
			break
		}
		smaller, ok := e.cfg.smaller()
		if !ok || !errors.Is(err, syscall.ENOMEM) {
			return err
		}
		e.freeQueues()
		e.freeMemory()
		e.cfg = smaller
	}
	e.initSend()
	e.initReceive()
	e.initRemote()
	e.setLimits()
	if e.link == nil {
		return nil // exchange.go brings it to INIT first
	}
	return e.postAll()
}

// queues makes the control buffers and the queues.
func (e *Endpoint) queues() (err error) {
	if e.sendRegion, err = newRegion(e.cfg.control, e.dom.pd, e.cfg.sendBytes(), 0); err != nil {
		return err
	}
	if err = e.makeReceiveBuffers(); err != nil {
		return err
	}
	e.windows.on = e.dev.useWindows(e.cfg)
	sends := maxSends + ownMessages + maxReads + maxWrites
	if e.dev.iwarp() {
		sends += maxReads + maxWrites // of two parts each (siw.go)
	}
	if e.windows.on {
		sends += 2 * maxWindows // a bind and an invalidation each
	}
	// The queue has to hold a completion for everything that is posted.
	if err = withRoom(func() error { // as some devices' queues are locked memory, too
		e.cq, err = e.dev.ctx.CreateCQ(sends+e.cfg.Buffers, e.dev.channel, e.dev.nextVector())
		return err
	}); err != nil {
		return err
	}
	e.cq.Owner = e
	return e.createQP(uint32(sends))
}

// freeQueues gives back what queues has made, but for the memory and the queue pair,
// which is gone or was not made.
func (e *Endpoint) freeQueues() {
	e.sendRegion.deregister()
	e.recvRegion.deregister()
	if e.cq != nil {
		e.cq.Close()
		e.cq = nil
	}
	if e.group != nil {
		e.group.leave(e.buffersLost)
	}
}

// freeMemory gives back the memory of messages.
func (e *Endpoint) freeMemory() {
	e.sendRegion.free()
	e.recvRegion.free()
	if e.group != nil {
		e.group.giveBack(e.buffersTaken())
		e.group = nil
	}
}

// inlineSizes are tried in turn.
var inlineSizes = [...]uint32{maxInline, 128, 64, 0}

// createQP asks for as much inline data as is useful, and for less where the device
// refuses, as devices do not report their limit; some (hns) give less by themselves. It
// begins with what the last queue pair got: some devices refuse more with ENOMEM
// (bnxt_re's library sets no errno), for which the caches are flushed.
func (e *Endpoint) createQP(sends uint32) (err error) {
	begin := int(e.dev.inline.Load())
	if e.dev.mana() {
		begin = len(inlineSizes) - 1
	}
	for i := begin; i < len(inlineSizes); i++ {
		inline := inlineSizes[i]
		c := ibv.QPConfig{
			PD: e.dom.pd, SendCQ: e.cq, RecvCQ: e.cq,
			Cap: ibv.QPCap{SendWR: sends, RecvWR: uint32(e.cfg.Buffers), SendSGE: 1, RecvSGE: 1, InlineData: inline},
		}
		if e.group != nil {
			c.SRQ, c.Cap.RecvWR, c.Cap.RecvSGE = e.group.srq, 0, 0
		}
		create := func() error {
			if e.link != nil {
				e.qp, err = e.link.id.CreateQP(c)
			} else {
				e.qp, err = ibv.CreateQP(c)
			}
			return err
		}
		if i == begin {
			err = withRoom(create)
		} else { // some devices say ENOMEM if so much does not go inline
			err = create()
		}
		if err == nil {
			e.qp.Owner = e
			e.dev.inline.Store(int32(i))
			e.inline = int(min(e.qp.Cap.InlineData, inline))
			return nil
		}
		if !errors.Is(err, syscall.EINVAL) && !errors.Is(err, syscall.ENOMEM) {
			break
		}
	}
	return err
}

func (e *Endpoint) setLimits() {
	off := e.cfg.Disable
	e.limits = session.Limits{
		Provider:   Name,
		MaxMessage: e.cfg.BufferSize,
		MaxRDMA:    maxRDMA,
		MaxExpose:  exposeLimit(memlock()),
		Threshold:  e.cfg.Threshold,
		Inbox:      inboxFrom,
		CanRead:    e.dev.caps.MaxQPInitiatorRead > 0 && off&session.FeatureRDMARead == 0,
		CanWrite:   off&session.FeatureRDMAWrite == 0,
		Window:     e.cfg.Buffers - repostBatch - ownMessages,
		Spin:       spin,
	}
	if !e.windows.on {
		e.limits.InboxTo = inboxTo
	}
	if e.limits.MaxExpose == 0 { // then nothing else can be registered either
		e.limits.CanRead, e.limits.CanWrite = false, false
	}
}

// spin is how long polling pays: a round trip between hosts takes 2 to 10 µs, and being
// woken through the completion channel 5 to 20 µs.
const spin = 50 * time.Microsecond

// Limits implements session.Endpoint.
func (e *Endpoint) Limits() session.Limits { return e.limits }

// Memory implements session.Endpoint.
func (e *Endpoint) Memory() session.Memory { return memory{e} }

// memory is an endpoint's access to remote memory.
type memory struct{ *Endpoint }

// LocalAddr is this end's address, with the TCP port that the connection is for; it
// equals the peer's RemoteAddr.
func (e *Endpoint) LocalAddr() netip.AddrPort { return e.local }

// RemoteAddr is the peer's address.
func (e *Endpoint) RemoteAddr() netip.AddrPort { return e.remote }

// Device is the name of the RDMA device.
func (e *Endpoint) Device() string { return e.dev.ctx.Name }

// Start implements session.Endpoint.
func (e *Endpoint) Start(w session.Waker) {
	e.waker.Store(&w)
	if e.err.Load() != nil {
		e.wake(session.RecvReady | session.SendReady)
	}
}

func (e *Endpoint) wake(ev session.Events) {
	if w := e.waker.Load(); w != nil {
		(*w).Wake(ev)
	}
}

// Arm implements session.Endpoint. One notification serves all events: what is
// armed is woken by the next completion, whichever it is.
func (e *Endpoint) Arm(ev session.Events) {
	e.armed.Or(uint32(ev))
	e.notify()
}

// notify asks the completion queue to announce its next completion, unless somebody has
// done so. When it returns the queue has been asked, by whomever: notified is set and
// acted on under mu.
func (e *Endpoint) notify() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.gone || !e.notified.CompareAndSwap(false, true) {
		return
	}
	if err := e.cq.Notify(false); err != nil {
		e.fail(deviceError(err))
	}
}

// Disarm implements session.Endpoint.
func (e *Endpoint) Disarm(ev session.Events) { e.armed.And(^uint32(ev)) }

// notice is called by the device's waiter when the completion queue announces
// something. The order matters: an Arm that comes now either finds that the
// queue has to be asked again, or its bits are seen below.
func (e *Endpoint) notice() {
	e.notified.Store(false)
	if ev := session.Events(e.armed.Swap(0)); ev != 0 {
		e.wake(ev)
	}
	e.alert()
	e.mu.Lock()
	if e.failing != nil {
		e.drain()
	}
	e.mu.Unlock()
}

// Err implements session.Endpoint.
func (e *Endpoint) Err() error {
	if p := e.err.Load(); p != nil {
		return *p
	}
	return nil
}

// fail notes why the connection is over. Err reports it once no transfer to or from
// memory of this end is under way: what was posted is flushed first, and its
// completions are there for Poll. mu is held.
func (e *Endpoint) fail(err error) {
	if e.failing != nil {
		return
	}
	e.failing = err
	if e.settle(); e.err.Load() != nil {
		return
	}
	if e.notified.CompareAndSwap(false, true) {
		e.cq.Notify(false)
	}
	e.late = time.AfterFunc(flushTime, e.giveUp)
}

// flushTime bounds how long a connection that has failed waits for the
// completions of what it had posted.
const flushTime = time.Second

// giveUp ends transfers whose completions did not come: the device has gone, or
// they were posted while the queue pair failed (siw never flushes those). In
// the error state nothing touches their memory.
func (e *Endpoint) giveUp() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.gone {
		return
	}
	e.qp.Modify(ibv.QPAttr{State: ibv.QPError}, ibv.MaskState)
	e.drain()
	for _, q := range []*fifo[transfer]{&e.reads, &e.writes} {
		for q.n > 0 {
			t := q.pop()
			t.err = e.failing
			e.done.push(t)
		}
	}
	e.publish()
}

// settle publishes the end once no transfer is under way. mu is held.
func (e *Endpoint) settle() {
	if e.failing != nil && e.reads.n+e.writes.n == 0 {
		e.publish()
	}
}

// publish makes Err report the end, and wakes everybody. mu is held.
func (e *Endpoint) publish() {
	err := e.failing
	if !e.err.CompareAndSwap(nil, &err) {
		return
	}
	if e.late != nil {
		e.late.Stop()
	}
	e.wake(session.RecvReady | session.SendReady)
	e.alert()
}

// broken is fail for callers that do not hold mu. It takes the completions first.
func (e *Endpoint) broken(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.drain()
	e.fail(err)
	if !e.gone {
		e.qp.Modify(ibv.QPAttr{State: ibv.QPError}, ibv.MaskState) // flushes, and ends the peer's access
	}
}

// drain sorts what the completion queue has. mu is held.
func (e *Endpoint) drain() {
	if !e.gone {
		e.take()
	}
	e.settle()
}

// dryPolls is how often one call into C polls a queue that was empty last time: the
// caller most likely waits, and a poll takes a fraction of the call.
const dryPolls = 8

// take sorts completions without publishing an end. mu is held.
func (e *Endpoint) take() {
	for {
		times := 1
		if e.dry {
			times = dryPolls
		}
		n, err := e.cq.Spin(e.wcs[:], times)
		e.dry = n == 0
		if err != nil {
			e.fail(deviceError(err))
			return
		}
		for i := range e.wcs[:n] {
			e.completed(&e.wcs[i])
		}
		if n < len(e.wcs) {
			return
		}
	}
}

func (e *Endpoint) completed(wc *ibv.WC) {
	switch wc.ID & kindMask {
	case kindRecv:
		e.received(wc)
	case kindSend:
		e.sent(wc)
	case kindRead:
		e.moved(wc, &e.reads)
	case kindWrite:
		e.moved(wc, &e.writes)
	case kindUnbind:
		e.unbound(wc)
	}
	if wc.Status != ibv.Success {
		e.fail(statusError(wc.Status))
	}
}

// deviceError is an error of the device that ends the connection. The device's errno is
// kept as text only, and replaced by ECONNRESET, which programs look for (siw says
// ENOTCONN when posting to a queue pair whose peer has gone).
func deviceError(err error) error { return fmt.Errorf("%v: %w", err, syscall.ECONNRESET) }

// statusError is what a failed work request says about the connection.
func statusError(s ibv.Status) error {
	errno := syscall.ECONNRESET
	if s == ibv.RetryExcErr || s == ibv.RespTimeoutErr {
		errno = syscall.ETIMEDOUT
	}
	return fmt.Errorf("verbs: %w: %w", s, errno)
}

var errEnded = fmt.Errorf("verbs: the connection has ended: %w", syscall.ENOTCONN)
