package verbs

import (
	"fmt"
	"math"

	"github.com/sanconn/san/session"
)

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
