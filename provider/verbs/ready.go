package verbs

import (
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
)

// readyPool has a device's ready endpoints. To make a queue pair takes a NIC a millisecond, and ten
// at times, for which a Dial with Require waits at both ends. So a device has a few endpoints made
// ahead, which lack the id and the peer. Nobody waits for one: where there is none, a connection
// makes its own.
type readyPool struct {
	filling sync.Mutex  // held while some are made, or all unmade
	full    atomic.Bool // the device has no more, until a connection of it has ended
	mu      sync.Mutex
	list    []*Endpoint // guarded by mu
}

// readyEndpoints is how many there are at most: enough for the connections that come within the few
// milliseconds in which as many are made. Each has 64 KiB registered. A burst makes its own, all at
// once and so faster than they would come. It is a variable for tests.
var readyEndpoints = 4

// readyFrom is how many bytes the arena has to have left for others: a sixteenth of what it has.
const readyFrom = controlBytes / 16

// all returns a list of all.
func (r *readyPool) all() []*Endpoint {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.list)
}

// pick takes one that suits out of the list; nil: there is none.
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

// get returns an endpoint that was made ahead, now the peer's; nil: there is none that suits.
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

// refill has endpoints like that of the connection which was just made got ready in the background,
// one after the other: where locked memory is not limited, and where the device is not about to be
// closed with the connection, whose use the caller has.
func (r *readyPool) refill(d *device, cfg Config) {
	devices.mu.Lock()
	stays := d.users > 1
	devices.mu.Unlock()
	if stays && memlock() == 0 && !r.full.Load() && r.filling.TryLock() {
		cfg.Admit = nil // the listener's, which may go
		d.waiters.Go(func() { r.fill(d, cfg) })
	}
}

// fill makes as many as there may be, and unlocks filling. Those that have failed go first, and whose
// domain connections do not get any more, as windows have come to be trusted.
func (r *readyPool) fill(d *device, cfg Config) {
	for {
		if e := r.pick(func(e *Endpoint) bool { return e.q.over() || e.dom.shared != d.sharesDomain(e.cfg) }); e != nil {
			e.unmake()
			continue
		}
		r.mu.Lock()
		if r.full.Load() || len(r.list) >= readyEndpoints || cfg.control.Left() < readyFrom {
			r.filling.Unlock() // with mu held: who takes one from here on has others made
			r.mu.Unlock()
			return
		}
		r.mu.Unlock()
		e, err := makeEndpoint(d, netip.Addr{}, cfg)
		if err != nil || e.cfg.sizes() != cfg.sizes() { // the last, as what the device has too little of is for connections
			r.full.Store(true)
			e.unmake()
			continue
		}
		r.mu.Lock()
		r.list = append(r.list, e)
		r.mu.Unlock()
	}
}

// giveWay unmakes all, also what is just being made, for a connection that could not be made or as the
// device ends. It reports whether there was any.
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

// sizes are those of the control buffers.
func (c Config) sizes() [3]int { return [...]int{c.buffers, c.bufferSize, c.sendBuffer} }

// unmake frees an endpoint that has had no connection.
func (e *Endpoint) unmake() {
	e.q.close(errClosed)
	e.destroyObjects()
	e.Retire()
}
