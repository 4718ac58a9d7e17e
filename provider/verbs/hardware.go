package verbs

import (
	"fmt"
	"math"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/session"
)

// hardware is what is known about a device from its opening on: its limits and properties.
type hardware struct {
	ctx  *ibv.Context
	caps ibv.Caps
	most sizes
}

func (h *hardware) iwarp() bool { return h.ctx.Transport == ibv.TransportIWARP }

// readDepth is the most RDMA reads of a queue pair at a time.
const readDepth = 16

// readsServed and readsIssued are how many RDMA reads a queue pair of the device serves
// and issues at a time.
func (h *hardware) readsServed() uint8 { return uint8(min(h.caps.MaxQPReadAtomic, readDepth)) }
func (h *hardware) readsIssued() uint8 { return uint8(min(h.caps.MaxQPInitiatorRead, readDepth)) }

// mayHaveWindows reports whether an endpoint may use memory windows, now or later. If RLIMIT_MEMLOCK is
// too low to expose anything, it has no room for the probe's page either.
func (h *hardware) mayHaveWindows(cfg Config) bool {
	return h.caps.MaxMW > 0 && exposeLimit(memlock()) > 0 && cfg.Disable&session.FeatureWindows == 0 &&
		!h.iwarp() // the probe's queue pairs would connect by TCP there
}

// sizes are the largest sizes in bytes that a device supports.
type sizes struct {
	registration int
	transfer     int // of a message or an RDMA operation
}

// sizes queries the device's largest sizes (rule C9). A size of 0 is not reported, and bounds nothing:
// drivers of virtual devices leave some of them out.
func (h *hardware) sizes() sizes {
	s := sizes{math.MaxInt, math.MaxInt}
	if n := h.caps.MaxMRSize; n != 0 && n < math.MaxInt {
		s.registration = int(n)
	}
	for num := 1; num <= h.caps.Ports; num++ { // all ports, as a connection's is not known yet
		if port, err := h.ctx.Port(num); err == nil && port.MaxMessage != 0 && uint64(port.MaxMessage) < math.MaxInt {
			s.transfer = min(s.transfer, int(port.MaxMessage))
		}
	}
	return s
}

// within reduces an endpoint's configuration to what the device supports. The error is why the device
// cannot serve any endpoint.
func (h *hardware) within(cfg Config, sends int) (Config, error) {
	cfg.bufferSize = max(min(cfg.bufferSize, h.most.transfer), session.MaxControl)
	for max(cfg.sendBytes(), cfg.receiveBytes()) > h.most.registration {
		smaller, ok := cfg.smaller()
		if !ok {
			return cfg, h.tooSmall("a registration", "bytes", h.most.registration, max(cfg.sendBytes(), cfg.receiveBytes()))
		}
		cfg = smaller
	}
	if n := max(sends, cfg.buffers); h.caps.MaxQPWR != 0 && h.caps.MaxQPWR < n {
		return cfg, h.tooSmall("a queue", "entries", h.caps.MaxQPWR, n)
	}
	if n := sends + cfg.buffers; h.caps.MaxCQE != 0 && h.caps.MaxCQE < n {
		return cfg, h.tooSmall("a completion queue", "entries", h.caps.MaxCQE, n)
	}
	return cfg, nil
}

func (h *hardware) tooSmall(what, of string, has, needs int) error {
	return unavailable(session.ReasonNotServed, fmt.Errorf("verbs: %s of %s has %d %s at most, of %d that are needed", what, h.ctx.Name, has, of, needs))
}
