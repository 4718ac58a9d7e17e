package san

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"time"
)

// An Outcome is the result of trying one provider, or TCP, at one address of a
// destination.
type Outcome struct {
	Address  netip.AddrPort
	Provider string // "shm", "verbs" or "tcp"

	// Err is nil if a connection was made. Otherwise it is the reason: an
	// *Unavailable with its Reason, or the error that net would return.
	Err error

	// Local is the connection's local address, nil if there was no connection.
	Local net.Addr

	// Took is the time until there was a connection or an error.
	Took time.Duration

	// Chosen marks the Outcome that a dial would return; at most one has it. If no
	// SAN serves any of the addresses, net may choose another of them.
	Chosen bool
}

// Explain returns what a dial to the address would do, to find out why it does not do
// what was expected. At each address it tries the providers and TCP in the order of a
// dial; a provider that may not be used has an Outcome with the reason.
//
// It makes every connection that can be made, one after the other, and closes it
// at once: the listener there accepts connections that end without a byte. An
// attempt over a SAN has the time that it has in a dial; one over TCP is bounded by
// ctx and by NetDialer's Timeout and Deadline alone. Failures are remembered as a
// dial's are; nothing is counted in Stats.
//
// Explain fails only if the destination cannot be looked up, or for settings with
// which every dial fails.
func (d *Dialer) Explain(ctx context.Context, network, address string) ([]Outcome, error) {
	if !isTCP(network) {
		return nil, dialError(network, nil, netip.AddrPort{}, notTCP(network))
	}
	env := processEnvironment()
	providers, _, err := choose(d.Providers, env, registry)
	if err != nil {
		return nil, dialError(network, nil, netip.AddrPort{}, err)
	}
	ctx, cancel := d.bound(ctx)
	defer cancel()
	requests, err := d.plan(ctx, network, address, providers, env)
	if err != nil {
		return nil, err
	}
	var all []Outcome
	connected := false
	for i, r := range requests {
		ctx, cancel := share(ctx, len(requests)-i)
		here := d.explainOne(ctx, providers, r)
		cancel()
		if !connected {
			connected = markChosen(here)
		}
		all = append(all, here...)
	}
	return all, nil
}

// explainOne tries each provider and TCP at one address.
func (d *Dialer) explainOne(ctx context.Context, providers []provider, r request) []Outcome {
	var outcomes []Outcome
	try := func(name string, attempt func() (net.Conn, error)) {
		start := time.Now()
		o := Outcome{Address: r.remote, Provider: name}
		c, err := attempt()
		o.Took, o.Err = time.Since(start), err
		if err == nil {
			o.Local = c.LocalAddr()
			c.Close()
		}
		outcomes = append(outcomes, o)
	}
	names := providerNames(registry)
	for _, p := range providers {
		names = slices.DeleteFunc(names, func(n string) bool { return n == p.name() })
		try(p.name(), func() (net.Conn, error) { return d.explainSAN(ctx, p, r) })
	}
	for _, name := range names {
		try(name, func() (net.Conn, error) { return nil, d.leftOut(name) })
	}
	try(providerTCP, func() (net.Conn, error) {
		if d.Policy == Require {
			return nil, &Unavailable{Reason: ReasonPolicy}
		}
		return d.netDialer(d.Policy != Never && served(r)).DialContext(ctx, r.network, r.address)
	})
	return outcomes
}

func (d *Dialer) explainSAN(ctx context.Context, p provider, r request) (net.Conn, error) {
	switch {
	case d.Policy == Never:
		return nil, &Unavailable{Reason: ReasonPolicy}
	case !slices.Contains(r.serving, p):
		return nil, notServed(r, []provider{p})
	}
	c, err := d.dialSAN(ctx, p, r)
	if err == nil {
		return c, nil
	}
	why, final := verdict(ctx, err)
	if final != nil {
		return nil, final
	}
	return nil, why
}

// leftOut returns why a provider is not among those that may be used.
func (d *Dialer) leftOut(name string) error {
	switch {
	case d.Policy == Never:
		return &Unavailable{Reason: ReasonPolicy}
	case !slices.ContainsFunc(registry, func(p provider) bool { return p.name() == name }):
		return &Unavailable{Reason: ReasonNoProvider}
	}
	return &Unavailable{Reason: ReasonDisabled}
}

// markChosen marks the outcome at one address that a dial would return, if any: the first
// connection, unless there was a final error before it.
func markChosen(outcomes []Outcome) bool {
	for i, o := range outcomes {
		switch _, unavailable := o.Err.(*Unavailable); {
		case o.Err == nil:
			outcomes[i].Chosen = true
			return true
		case !unavailable:
			return false
		}
	}
	return false
}
