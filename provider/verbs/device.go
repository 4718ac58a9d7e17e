package verbs

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/session"
)

// device is an RDMA device in use: its limits, and the goroutines that wait for its events. It exists
// from the first use by a listener or an endpoint to the last.
type device struct {
	hardware
	key     any
	channel *ibv.CompChannel
	async   *ibv.AsyncChannel
	filler  *ibv.CQ       // see avoidForbidden; or nil
	users   int           // guarded by devices.mu
	stop    chan struct{} // closed after the last use
	closed  chan struct{} // closed when the device is closed after that
	waiters sync.WaitGroup

	mu        sync.Mutex // guards the fields below
	endpoints map[*Endpoint]struct{}
	shared    *domain // of its connections, see useDomain

	ready   readyPool
	costs   costs
	vectors atomic.Uint32 // completion vectors given out: completion queues use the device's interrupts in turn

	windows atomic.Bool // the probe has shown that they can be trusted: see heed
	returns atomic.Bool // … and that a peer's message can invalidate one
}

// devices has each device that is in use or being closed, except those that were opened by name and
// have failed: for these the next use opens a new one. There are never two for the same context,
// because they would take each other's events.
var devices = struct {
	mu sync.Mutex
	m  map[any]*device // by context of librdmacm, or by name; guarded by mu
}{m: make(map[any]*device)}

// useDevice returns the device of a context of librdmacm. The caller must release it.
func useDevice(ctx *ibv.Context, cfg Config) (*device, error) {
	d, err := use(ctx, func() (*ibv.Context, error) { return ctx, nil })
	if err == nil {
		d.probe(cfg)
	}
	return d, err
}

// openDevice opens a device by its name, without librdmacm. The caller must release it.
func openDevice(name string) (*device, error) {
	return use(name, func() (*ibv.Context, error) { return ibv.Open(name) })
}

// closingTime bounds how long a use waits for a device that is being closed, within a dial's time.
// Healthy devices take a millisecond.
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
		hardware: hardware{ctx: ctx}, key: key, users: 1,
		stop: make(chan struct{}), closed: make(chan struct{}), endpoints: make(map[*Endpoint]struct{}),
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
	d.filler = d.avoidForbidden()
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

// release ends one use. The last release stops the waiters.
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

// forget makes later uses open the device anew; present users keep it.
func (d *device) forget() {
	devices.mu.Lock()
	defer devices.mu.Unlock()
	if devices.m[d.key] == d {
		delete(devices.m, d.key)
	}
}

func (d *device) close() {
	close(d.stop)
	d.ready.giveWay()
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
	d.ctx.Close() // a context of librdmacm stays open
}

// add makes an endpoint that is to be connected fail with the device.
func (d *device) add(e *Endpoint) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.endpoints[e] = struct{}{}
}

// remove undoes add.
func (d *device) remove(e *Endpoint) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, added := d.endpoints[e]; added {
		delete(d.endpoints, e)
		d.ready.full.Store(false)
	}
}

// waitCompletions is the only waiter for all completion queues of the device: it passes each wake-up to
// the session of an endpoint.
func (d *device) waitCompletions() {
	var cqs [64]*ibv.CQ
	for {
		n, err := d.channel.Events(cqs[:])
		if err != nil {
			d.eventsLost(err)
			return
		}
		for i, cq := range cqs[:n] {
			cq.Owner.(*queuePair).notice()
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
	q := ownerOf(ev)
	switch {
	case ev.Type == ibv.EventDeviceFatal:
		d.fail(fmt.Errorf("verbs: the device %s has gone: %w", d.ctx.Name, syscall.ECONNRESET))
	case q == nil:
	case slices.Contains(failures, ev.Type):
		q.fail(fmt.Errorf("verbs: %v: %w", ev.Type, syscall.ECONNRESET))
	case ev.Type == ibv.EventCommEst && q.cm != nil && !d.iwarp(): // iWARP's calls may block
		q.cm.communicated()
	}
}

// failures are the events after which a connection cannot go on.
var failures = []ibv.AsyncEventType{ibv.EventQPFatal, ibv.EventQPReqErr, ibv.EventQPAccessErr, ibv.EventCQErr}

// ownerOf returns the queue pair that an event is about, or nil if it has no owner any more, or is the
// probe's.
func ownerOf(ev ibv.AsyncEvent) (q *queuePair) {
	switch {
	case ev.QP != nil:
		q, _ = ev.QP.Owner.(*queuePair)
	case ev.CQ != nil:
		q, _ = ev.CQ.Owner.(*queuePair)
	}
	return q
}

// eventsLost ends the connections of a device whose events can no longer be read, because nothing would
// wake their sessions.
func (d *device) eventsLost(err error) {
	if !errors.Is(err, os.ErrClosed) {
		d.fail(deviceError(err))
	}
}

// fail ends the device's connections and its ready endpoints. A device that was opened by name is
// opened anew for the next use, because it may come back while a program keeps ended connections here.
// rdma_cm has a new context then.
func (d *device) fail(err error) {
	if _, named := d.key.(string); named {
		d.forget()
	}
	d.mu.Lock()
	list := slices.AppendSeq(d.ready.all(), maps.Keys(d.endpoints))
	d.mu.Unlock()
	for _, e := range list {
		e.q.fail(err)
	}
}
