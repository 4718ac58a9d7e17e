package verbs

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/session"
)

// device is an RDMA device in use: its limits and the goroutines that wait for
// its events. It lives from the first listener or endpoint that needs it to the last.
type device struct {
	key     any
	ctx     *ibv.Context
	caps    ibv.Caps
	most    sizes
	channel *ibv.CompChannel
	async   *ibv.AsyncChannel
	filler  *ibv.CQ       // or nil
	users   int           // guarded by devices.mu
	stop    chan struct{} // closed when the last use has ended
	closed  chan struct{} // closed after that, when the device is closed
	waiters sync.WaitGroup

	mu        sync.Mutex // guards the fields below
	endpoints map[*Endpoint]struct{}
	shared    *domain     // of its connections, see useDomain
	ready     []*Endpoint // see takeReady

	refilling atomic.Bool // see refill
	refills   sync.WaitGroup

	vectors atomic.Uint32 // that completion queues have had: they take the device's interrupts in turn

	windows atomic.Bool // the probe has shown that they can be trusted: see take
	returns atomic.Bool // … and that a peer's message can invalidate one

	measuring sync.Once
	copying   atomic.Int64 // nanoseconds in which measureBytes are copied; 0: not known
	copies    atomic.Int32 // how many copies of memory cost as much as to register it; 0: not known
}

// devices has each device that is in use or being closed, except for those that were opened by
// name and have failed: the next use opens these anew. There are never two for the same context,
// as they would take each other's events.
var devices = struct {
	mu sync.Mutex
	m  map[any]*device // by context of librdmacm, or by name. Guarded by mu
}{m: make(map[any]*device)}

// useDevice returns the device of a context of librdmacm. The caller releases it.
func useDevice(ctx *ibv.Context, cfg Config) (*device, error) {
	d, err := use(ctx, func() (*ibv.Context, error) { return ctx, nil })
	if err == nil {
		d.probe(cfg)
	}
	return d, err
}

// openDevice opens a device by name, without librdmacm.
func openDevice(name string) (*device, error) {
	return use(name, func() (*ibv.Context, error) { return ibv.Open(name) })
}

// closingTime bounds the wait for a device that is being closed, within the time that a
// dial has. Healthy devices take a millisecond.
const closingTime = 200 * time.Millisecond

func use(key any, open func() (*ibv.Context, error)) (*device, error) {
	late := time.After(closingTime)
	devices.mu.Lock()
	for {
		d := devices.m[key]
		if d == nil {
			break
		}
		if d.users > 0 {
			d.users++
			devices.mu.Unlock()
			return d, nil
		}
		devices.mu.Unlock()
		select {
		case <-d.closed:
		case <-late:
			return nil, unavailable(session.ReasonResources, fmt.Errorf("verbs: %s is still being closed after %v: %w", d.ctx.Name, closingTime, syscall.EBUSY))
		}
		devices.mu.Lock()
	}
	defer devices.mu.Unlock()
	ctx, err := open()
	if err != nil {
		return nil, err
	}
	d := &device{
		key: key, ctx: ctx, users: 1, stop: make(chan struct{}), closed: make(chan struct{}),
		endpoints: make(map[*Endpoint]struct{}),
	}
	if err := d.start(); err != nil {
		d.close()
		return nil, err
	}
	devices.m[key] = d
	return d, nil
}

func (d *device) start() (err error) {
	if d.caps, err = d.ctx.Caps(); err != nil {
		return err
	}
	d.most = d.sizes()
	d.avoidForbidden()
	if d.channel, err = d.ctx.CreateCompChannel(); err != nil {
		return err
	}
	if d.async, err = d.ctx.AsyncChannel(); err != nil {
		return err
	}
	d.waiters.Go(d.waitCompletions)
	d.waiters.Go(d.waitAsync)
	return nil
}

// release ends one use. The last one stops the waiters.
func (d *device) release() {
	devices.mu.Lock()
	d.users--
	last := d.users == 0
	devices.mu.Unlock()
	if !last {
		return
	}
	d.close()
	d.forget()
	close(d.closed)
}

// forget keeps the device for those who use it already; later uses get another.
func (d *device) forget() {
	devices.mu.Lock()
	defer devices.mu.Unlock()
	if devices.m[d.key] == d {
		delete(devices.m, d.key)
	}
}

func (d *device) close() {
	close(d.stop)
	d.refills.Wait()
	for _, e := range d.ready {
		e.dom.users++
		e.unmake()
	}
	if d.shared != nil {
		d.shared.close()
	}
	if d.filler != nil {
		d.filler.Close()
	}
	if d.channel != nil {
		d.channel.Close()
	}
	if d.async != nil {
		d.async.Close()
	}
	d.waiters.Wait()
	d.ctx.Close() // of librdmacm: stays open
}

// readDepth is the most RDMA reads of a queue pair at a time.
const readDepth = 16

// readsServed and readsIssued are how many RDMA reads a queue pair of the device serves
// and issues at a time.
func (d *device) readsServed() uint8 { return uint8(min(d.caps.MaxQPReadAtomic, readDepth)) }
func (d *device) readsIssued() uint8 { return uint8(min(d.caps.MaxQPInitiatorRead, readDepth)) }

func (d *device) iwarp() bool { return d.ctx.Transport == ibv.TransportIWARP }

func (d *device) add(e *Endpoint) {
	d.mu.Lock()
	d.endpoints[e] = struct{}{}
	d.mu.Unlock()
}

func (d *device) remove(e *Endpoint) {
	d.mu.Lock()
	delete(d.endpoints, e)
	d.mu.Unlock()
}

// waitCompletions is the one waiter of all completion queues of the device: it
// passes each wake-up on to the endpoint's session.
func (d *device) waitCompletions() {
	var cqs [64]*ibv.CQ
	for {
		n, err := d.channel.Events(cqs[:])
		if err != nil {
			d.eventsLost(err)
			return
		}
		for i, cq := range cqs[:n] {
			cq.Owner.(*Endpoint).q.notice()
			cqs[i] = nil
		}
	}
}

// waitAsync fails connections whose queue pair, queues or device have failed.
func (d *device) waitAsync() {
	for {
		ev, err := d.async.Event()
		if err != nil {
			d.eventsLost(err)
			return
		}
		d.event(ev)
	}
}

func (d *device) event(ev ibv.AsyncEvent) {
	switch ev.Type {
	case ibv.EventQPFatal, ibv.EventQPReqErr, ibv.EventQPAccessErr:
		if e := ownerOf(ev.QP); e != nil {
			e.q.fail(fmt.Errorf("verbs: queue pair %d: %v: %w", ev.QP.Num, ev.Type, syscall.ECONNRESET))
		}
	case ibv.EventCommEst:
		if e := ownerOf(ev.QP); e != nil && e.cm != nil && !d.iwarp() { // where calls may block
			e.cm.communicated()
		}
	case ibv.EventCQErr:
		if ev.CQ == nil {
			break
		}
		if e, ok := ev.CQ.Owner.(*Endpoint); ok {
			e.q.fail(fmt.Errorf("verbs: %v: %w", ev.Type, syscall.ECONNRESET))
		}
	case ibv.EventDeviceFatal:
		d.fail(fmt.Errorf("verbs: the device %s has gone: %w", d.ctx.Name, syscall.ECONNRESET))
	}
}

// eventsLost ends the connections of a device whose events can no longer be read, as
// nobody would be woken.
func (d *device) eventsLost(err error) {
	if !errors.Is(err, os.ErrClosed) {
		d.fail(deviceError(err))
	}
}

// ownerOf is the endpoint of a queue pair, nil if it has none (any more): the
// probe's have none.
func ownerOf(qp *ibv.QP) *Endpoint {
	if qp == nil {
		return nil
	}
	e, _ := qp.Owner.(*Endpoint)
	return e
}

// fail ends the device's connections, and what is ready for others. One that was opened by its
// name is opened anew for the next, as it may come back while a program keeps what has ended
// here; rdma_cm's have new contexts then.
func (d *device) fail(err error) {
	if _, named := d.key.(string); named {
		d.forget()
	}
	d.mu.Lock()
	list := slices.AppendSeq(slices.Clone(d.ready), maps.Keys(d.endpoints))
	d.mu.Unlock()
	for _, e := range list {
		e.q.fail(err)
	}
}

// sizes are the largest that a device takes, in bytes.
type sizes struct {
	registration int
	transfer     int // a message or an RDMA operation
}

// sizes queries them (rule C9). One that is not told, as 0, bounds nothing: drivers of virtual
// devices leave some of them out.
func (d *device) sizes() sizes {
	s := sizes{math.MaxInt, math.MaxInt}
	if n := d.caps.MaxMRSize; n != 0 && n < math.MaxInt {
		s.registration = int(n)
	}
	for num := 1; num <= d.caps.Ports; num++ { // of all, as a connection's is not known yet
		if port, err := d.ctx.Port(num); err == nil && port.MaxMessage != 0 && uint64(port.MaxMessage) < math.MaxInt {
			s.transfer = min(s.transfer, int(port.MaxMessage))
		}
	}
	return s
}

// within bounds what an endpoint's configuration takes by what the device has. It returns why
// the device cannot serve any.
func (d *device) within(cfg Config, sends int) (Config, error) {
	cfg.bufferSize = max(min(cfg.bufferSize, d.most.transfer), session.MaxControl)
	for max(cfg.sendBytes(), cfg.receiveBytes()) > d.most.registration {
		smaller, ok := cfg.smaller()
		if !ok {
			return cfg, tooSmall(d, "a registration", "bytes", d.most.registration, max(cfg.sendBytes(), cfg.receiveBytes()))
		}
		cfg = smaller
	}
	if n := max(sends, cfg.buffers); d.caps.MaxQPWR != 0 && d.caps.MaxQPWR < n {
		return cfg, tooSmall(d, "a queue", "entries", d.caps.MaxQPWR, n)
	}
	if n := sends + cfg.buffers; d.caps.MaxCQE != 0 && d.caps.MaxCQE < n {
		return cfg, tooSmall(d, "a completion queue", "entries", d.caps.MaxCQE, n)
	}
	return cfg, nil
}

func tooSmall(d *device, what, of string, has, needs int) error {
	return unavailable(session.ReasonNotServed, fmt.Errorf("verbs: %s of %s has %d %s at most, of %d that are needed", what, d.ctx.Name, has, of, needs))
}
