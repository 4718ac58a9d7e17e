package san

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/sanconn/san/internal/undernet"
)

// An Outcome is the result of trying one provider, or TCP, for a destination.
type Outcome struct {
	Address  netip.AddrPort
	Provider string // "shm", "verbs" or "tcp"

	// Err is nil if a connection was made, and moved. Otherwise it is the reason: an
	// *Unavailable with its Reason, or for TCP the error that net would return.
	Err error

	// Local is the connection's local address, nil if there was no connection.
	Local net.Addr

	// Took is the time until the connection was made by TCP, or until it had moved behind
	// that, or the error.
	Took time.Duration

	// Chosen marks the Outcome that a connection would get; at most one has it.
	Chosen bool
}

// Explain returns what would carry a connection to the address once it has been used, to find
// out why it is not what was expected. It dials by TCP, and then once more for each provider,
// to which it moves that connection at once; a provider that may not be used has an Outcome
// with the reason.
//
// It closes each connection at once: the listener there accepts connections that end without
// a byte. A move has the time that it has in Dial, TCP is bounded by ctx and by NetDialer
// alone.
//
// Explain fails only for settings with which every dial fails.
func (d *Dialer) Explain(ctx context.Context, network, address string) ([]Outcome, error) {
	if !isTCP(network) {
		return nil, dialError(network, nil, nil, notTCP(network))
	}
	all := *d
	if d.Policy == Never {
		all.Policy = Prefer
	}
	p, why, err := all.plan(network)
	if err != nil {
		return nil, dialError(network, nil, nil, err)
	}
	tcp := d.explainTCP(ctx, network, address)
	var outcomes []Outcome
	names := providerNames(registry)
	if why == nil {
		for _, provider := range p.providers {
			names = slices.DeleteFunc(names, func(n string) bool { return n == provider.name() })
			o := Outcome{Address: tcp.Address, Provider: provider.name(), Err: &Unavailable{Reason: ReasonPolicy}}
			if d.Policy != Never && tcp.Err == nil {
				o = d.explainMove(ctx, network, address, p, provider)
			} else if tcp.Err != nil {
				o.Err = unavailableOf(tcp.Err)
			}
			outcomes = append(outcomes, o)
		}
	}
	for _, name := range names {
		outcomes = append(outcomes, Outcome{Address: tcp.Address, Provider: name, Err: leftOut(name)})
	}
	outcomes = append(outcomes, tcp)
	for i, o := range outcomes {
		if o.Err == nil {
			outcomes[i].Chosen = true
			break
		}
	}
	return outcomes, nil
}

// explainTCP connects by TCP.
func (d *Dialer) explainTCP(ctx context.Context, network, address string) Outcome {
	start := time.Now()
	c, err := d.NetDialer.DialContext(undernet.Plain(ctx), network, address)
	o := Outcome{Provider: providerTCP, Took: time.Since(start), Err: err}
	if err == nil {
		o.Local = c.LocalAddr()
		o.Address = addrPort(c.RemoteAddr())
		c.Close()
	} else if e := (*net.OpError)(nil); errors.As(err, &e) && e.Addr != nil {
		o.Address = addrPort(e.Addr)
	}
	return o
}

// explainMove connects by TCP, and moves to one provider.
func (d *Dialer) explainMove(ctx context.Context, network, address string, p *plan, by provider) Outcome {
	o := Outcome{Provider: by.name()}
	c, err := d.NetDialer.DialContext(undernet.Plain(ctx), network, address)
	if err != nil {
		o.Err = err
		return o
	}
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		c.Close()
		o.Err = notTCP(network)
		return o
	}
	o.Address = addrPort(tcp.RemoteAddr())
	alone := *p
	alone.providers = []provider{by}
	conn, h, l := alone.begin(tcp)
	defer conn.Close()
	start := time.Now()
	ctx, cancel := context.WithTimeout(ctx, p.settings.attempt)
	defer cancel()
	if why := alone.moveNow(ctx, h, l); why != nil {
		o.Err = why
	} else {
		o.Local = conn.LocalAddr()
	}
	o.Took = time.Since(start)
	return o
}

func addrPort(a net.Addr) netip.AddrPort {
	if t, ok := a.(*net.TCPAddr); ok {
		ap := t.AddrPort()
		return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
	}
	return netip.AddrPort{}
}

// leftOut returns why a provider is not among those that may be used.
func leftOut(name string) error {
	if !slices.ContainsFunc(registry, func(p provider) bool { return p.name() == name }) {
		return &Unavailable{Reason: ReasonNoProvider}
	}
	return &Unavailable{Reason: ReasonDisabled}
}
