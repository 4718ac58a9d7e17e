package verbs

import (
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
)

// readyPool has a device's ready endpoints. Making a queue pair takes a NIC a millisecond, and
// sometimes ten, for which a Dial with Require waits at both ends. So a device has a few endpoints made
// ahead, which lack only the id and the peer. Nobody waits for a ready endpoint: if there is none, a
// connection makes its own.
type readyPool struct {
	filling sync.Mutex  // held while endpoints are made ahead, and while all are freed
	full    atomic.Bool // the device's resources are used up, until one of its connections has ended
	mu      sync.Mutex
	list    []*Endpoint // guarded by mu
}

// readyEndpoints is the most ready endpoints: enough for the connections that come within the few
// milliseconds in which as many are made. Each has 64 KiB registered. The connections of a burst make
// their own, all at once, which is faster. It is a variable for tests.
var readyEndpoints = 4

// readyFrom is how many bytes of the arena must be left for others: a sixteenth.
const readyFrom = controlBytes / 16

// all returns a copy of the list.
func (r *readyPool) all() []*Endpoint {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.list)
}

// pick removes an endpoint that suits from the list and returns it, or nil.
func (r *readyPool) pick(suits func(*Endpoint) bool) *Endpoint {
	r.mu.Lock()
	defer r.mu.Unlock()
	i := slices.IndexFunc(r.list, suits)
	if i < 0 {
		return nil
	}
	e := r.list[i]
	r.list = slices.Delete(r.list, i, i+1)
	return e
}

// get returns a ready endpoint that suits, which then counts in the peer's share, or nil.
func (r *readyPool) get(peer netip.Addr, cfg Config) *Endpoint {
	to := peerBudget{cfg.control, peer}
	e := r.pick(func(e *Endpoint) bool {
		c := e.cfg
		return c.sizes() == cfg.sizes() && c.control == cfg.control && c.Disable == cfg.Disable &&
			e.dom.shared == e.dev.sharesDomain(cfg) && !e.q.over() && to.add(int64(len(e.messages.mem))) == nil
	})
	if e != nil {
		e.messages.budget.giveBack(int64(len(e.messages.mem)))
		e.cfg, e.peer, e.messages.budget = cfg, peer, to
	}
	return e
}

// refill makes endpoints like that of the connection which was just made, in the background, one after
// the other. It makes none if locked memory is limited, or if the device is about to be closed with
// that connection, whose use of the device the caller has.
func (r *readyPool) refill(d *device, cfg Config) {
	devices.mu.Lock()
	stays := d.users > 1
	devices.mu.Unlock()
	if stays && memlock() == 0 && !r.full.Load() && r.filling.TryLock() {
		cfg.Admit = nil // it belongs to the listener, which may go
		d.waiters.Go(func() { r.fill(d, cfg) })
	}
}

// fill makes as many endpoints as there may be, and unlocks filling. First it frees those that have
// failed, and those in a domain that connections do not use any more, because windows have come to be
// trusted.
func (r *readyPool) fill(d *device, cfg Config) {
	for {
		if e := r.pick(func(e *Endpoint) bool { return e.q.over() || e.dom.shared != d.sharesDomain(e.cfg) }); e != nil {
			e.unmake()
			continue
		}
		r.mu.Lock()
		if r.full.Load() || len(r.list) >= readyEndpoints || cfg.control.Left() < readyFrom {
			r.filling.Unlock() // with mu held: whoever picks one from now on starts another fill
			r.mu.Unlock()
			return
		}
		r.mu.Unlock()
		e, err := makeEndpoint(d, netip.Addr{}, cfg)
		if err != nil || e.cfg.sizes() != cfg.sizes() { // no more, as connections need what the device has too little of
			r.full.Store(true)
			e.unmake()
			continue
		}
		r.mu.Lock()
		r.list = append(r.list, e)
		r.mu.Unlock()
	}
}

// giveWay frees all ready endpoints, including one that is being made, for a connection that could not
// be made, or because the device ends. It reports whether there were any.
func (r *readyPool) giveWay() (had bool) {
	r.full.Store(true)
	r.filling.Lock()
	defer r.filling.Unlock()
	all := func(*Endpoint) bool { return true }
	for e := r.pick(all); e != nil; e = r.pick(all) {
		e.unmake()
		had = true
	}
	return had
}

// sizes returns the sizes that determine the control buffers.
func (c Config) sizes() [3]int { return [...]int{c.buffers, c.bufferSize, c.sendBuffer} }

// unmake frees an endpoint that never had a connection.
func (e *Endpoint) unmake() {
	e.q.close(errClosed)
	e.destroyObjects()
	e.Retire()
}
