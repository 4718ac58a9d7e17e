package san

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/sanconn/san/internal/moving"
	"github.com/sanconn/san/internal/reason"
	"github.com/sanconn/san/internal/undernet"
)

// An Outcome is the result of trying one provider, or TCP, for a destination.
type Outcome struct {
	Address  netip.AddrPort
	Provider string // "shm", "verbs" or "tcp"

	// Err is nil if a connection was made and has moved. Otherwise it is the reason: an *Unavailable
	// with its Reason, or for TCP the error that net would return.
	Err error

	// Local is the connection's local address, or nil if there is an Err.
	Local net.Addr

	// Took is the time until TCP had connected, or from then until the connection had moved, or until
	// the error.
	Took time.Duration

	// Chosen marks the Outcome that a connection would get. At most one Outcome has it, and none if a
	// dial would fail.
	Chosen bool
}

// Explain returns what would carry a connection to the address once it has been used, to find out why
// it is not on the expected provider. It dials by TCP, and then again for each provider, to which it
// moves that connection at once. A provider that may not be used has an Outcome with the reason.
//
// Explain closes each connection at once: the listener there accepts connections that end without a
// byte. Each move may take as long as in Dial; TCP is bounded only by ctx and by NetDialer.
//
// Explain fails only for networks other than TCP's, and for settings with which every dial fails.
func (d *Dialer) Explain(ctx context.Context, network, address string) ([]Outcome, error) {
	if !isTCP(network) {
		return nil, dialError(network, nil, nil, notTCP(network))
	}
	all := *d
	if d.Policy == Never {
		all.Policy = Prefer
	}
	p, err := all.plan(network)
	if err != nil {
		return nil, dialError(network, nil, nil, err)
	}
	tcp := d.explain(ctx, network, address, nil)
	var outcomes []Outcome
	names := moving.Names()
	for _, by := range p.Providers {
		names = slices.DeleteFunc(names, func(n string) bool { return n == by.Name() })
		o := Outcome{Address: tcp.Address, Provider: by.Name(), Err: &Unavailable{Reason: ReasonPolicy}}
		if tcp.Err != nil {
			o.Err = reason.Of(tcp.Err)
		} else if d.Policy != Never {
			alone := *p
			alone.Providers = []moving.Provider{by}
			o = d.explain(ctx, network, address, &alone)
		}
		outcomes = append(outcomes, o)
	}
	for _, name := range names {
		why := ReasonNoProvider
		if slices.ContainsFunc(moving.Registry, func(p moving.Provider) bool { return p.Name() == name }) {
			why = ReasonDisabled
		}
		outcomes = append(outcomes, Outcome{Address: tcp.Address, Provider: name, Err: &Unavailable{Reason: why}})
	}
	outcomes = append(outcomes, tcp)
	i := slices.IndexFunc(outcomes, func(o Outcome) bool { return o.Err == nil })
	if i >= 0 && (d.Policy != Require || outcomes[i].Provider != providerTCP) {
		outcomes[i].Chosen = true
	}
	return outcomes, nil
}

// explain connects by TCP and, if there is a plan, moves the connection to the plan's one provider.
func (d *Dialer) explain(ctx context.Context, network, address string, p *moving.Plan) (o Outcome) {
	o.Provider = providerTCP
	if p != nil {
		o.Provider = p.Providers[0].Name()
	}
	start := time.Now()
	defer func() { o.Took = time.Since(start) }()
	c, err := d.NetDialer.DialContext(undernet.Plain(ctx), network, address)
	if err != nil {
		if e := (*net.OpError)(nil); errors.As(err, &e) && e.Addr != nil {
			o.Address = addrPort(e.Addr)
		}
		o.Err = err
		if p != nil {
			o.Err = reason.Of(err)
		}
		return o
	}
	defer func() { c.Close() }()
	o.Address = addrPort(c.RemoteAddr())
	if p != nil {
		conn := p.Begin(c.(*net.TCPConn), start)
		c, start = conn, time.Now()
		ctx, cancel := context.WithTimeout(ctx, p.Settings.Attempt)
		defer cancel()
		if why := p.MoveNow(ctx, conn); why != nil {
			o.Err = why
			return o
		}
	}
	o.Local = c.LocalAddr()
	return o
}

func addrPort(a net.Addr) netip.AddrPort {
	if t, ok := a.(*net.TCPAddr); ok {
		ap := t.AddrPort()
		return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
	}
	return netip.AddrPort{}
}
