package verbs

import (
	"net/netip"
	"slices"
)

// Ready endpoints. To make a queue pair takes a NIC a millisecond, and ten at times, for which a
// Dial with Require waits at both ends. So a device has a few endpoints made ahead, which lack the
// id and the peer. Nobody waits for one: where there is none, a connection makes its own.

// readyEndpoints is how many there are at most: enough for the connections that come within the few
// milliseconds in which as many are made. Each has 64 KiB registered. A burst makes its own, all at
// once and so faster than they would come. It is a variable for tests.
var readyEndpoints = 4

// readyFrom is how many bytes the arena has to have left for others: a sixteenth of what it has.
const readyFrom = controlBytes / 16

// takeReady returns an endpoint that was made ahead, now the peer's; nil: there is none that suits.
func (d *device) takeReady(peer netip.Addr, cfg Config) *Endpoint {
	d.mu.Lock()
	defer d.mu.Unlock()
	i := slices.IndexFunc(d.ready, func(e *Endpoint) bool {
		c := e.cfg
		return c.sizes() == cfg.sizes() && c.control == cfg.control && c.Disable == cfg.Disable && e.dom.shared == (cfg.SharedDomain || d.trustsWindows(cfg)) && !e.q.over()
	})
	if i < 0 {
		return nil
	}
	e, to := d.ready[i], share{cfg.control, peer}
	n := int64(len(e.messages.mem))
	if to.take(n) != nil {
		return nil
	}
	e.messages.share.giveBack(n)
	d.ready = slices.Delete(d.ready, i, i+1)
	e.cfg, e.peer, e.messages.share = cfg, peer, to
	e.dom.users++
	return e
}

// refill has endpoints like that of the connection which was just made got ready in the background,
// one after the other: where locked memory is not limited, where it is settled which domain such
// endpoints have, and where the device is not about to be closed with the connection, whose use the
// caller has.
func (d *device) refill(cfg Config) {
	devices.mu.Lock()
	stays := d.users > 1
	devices.mu.Unlock()
	settled := d.windows.Load() || !d.mayHaveWindows(cfg)
	if stays && settled && memlock() == 0 && d.refilling.CompareAndSwap(false, true) {
		cfg.Admit = nil // the listener's, which may go
		d.refills.Go(func() {
			for d.makeReady(cfg) {
			}
		})
	}
}

// makeReady makes one, and reports whether to go on.
func (d *device) makeReady(cfg Config) bool {
	d.mu.Lock()
	enough := len(d.ready) >= readyEndpoints || cfg.control.Left() < readyFrom
	d.mu.Unlock()
	select {
	case <-d.stop:
		enough = true
	default:
	}
	if enough {
		d.refilling.Store(false)
		return false
	}
	e, err := makeEndpoint(d, netip.Addr{}, cfg)
	if err != nil || e.cfg.sizes() != cfg.sizes() { // the last, as what the device has too little of is for connections
		e.unmake()
		return false
	}
	if e.dom.shared {
		e.dom.release() // what is ready keeps nothing cached (rule R5)
	}
	d.mu.Lock()
	d.ready = append(d.ready, e)
	d.mu.Unlock()
	return true
}

// sizes are those of the control buffers.
func (c Config) sizes() [3]int { return [...]int{c.buffers, c.bufferSize, c.sendBuffer} }

// unmake frees an endpoint that has had no connection.
func (e *Endpoint) unmake() {
	e.q.close(errClosed)
	e.freeObjects()
	e.Retire()
}
