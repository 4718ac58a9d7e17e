package san

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
)

// request is one address to connect to.
type request struct {
	address string     // for NetDialer
	serving []provider // those that serve the address, in order
	network string     // tcp4 or tcp6
	remote  netip.AddrPort
	local   *net.TCPAddr // nil: the system's choice
	control func(ctx context.Context, network, address string, c syscall.RawConn) error
	settings
}

// plan returns the addresses to connect to, in net's order: those of LocalAddr's family,
// or all if there are none, to get net's own error.
func (d *Dialer) plan(ctx context.Context, network, address string, providers []provider, env environment) ([]request, error) {
	local, err := dialLocal(d.NetDialer.LocalAddr)
	if err != nil {
		return nil, dialError(network, d.NetDialer.LocalAddr, netip.AddrPort{}, err)
	}
	dsts, named, err := resolve(ctx, d.NetDialer.Resolver, network, address, local)
	if err != nil {
		return nil, dialError(network, nil, netip.AddrPort{}, err)
	}
	var requests []request
	for _, dst := range dsts {
		r := request{
			address:  address,
			network:  familyOf(dst.Addr()),
			remote:   dst,
			local:    local,
			control:  d.control(),
			settings: settle(d.Options, d.RDMA, d.Policy, env, 0),
		}
		r.settings.source = local.AddrPort().Addr().Unmap()
		if named {
			r.address = dst.String() // so that net does not look the name up again
		}
		for _, p := range providers {
			if sameFamily(local, dst.Addr()) && p.serves(dst.Addr(), r.settings) == nil {
				r.serving = append(r.serving, p)
			}
		}
		requests = append(requests, r)
	}
	possible := func(r request) bool { return sameFamily(local, r.remote.Addr()) }
	if slices.ContainsFunc(requests, possible) {
		requests = slices.DeleteFunc(requests, func(r request) bool { return !possible(r) })
	}
	return requests, nil
}

// served reports whether a provider serves the address.
func served(r request) bool { return len(r.serving) > 0 }

// severalFamilies reports whether there are addresses of both families, which net tries in
// parallel.
func severalFamilies(requests []request) bool {
	return slices.ContainsFunc(requests, func(r request) bool { return r.network != requests[0].network })
}

// notServed returns why none of the providers serves a destination.
func notServed(r request, providers []provider) *Unavailable {
	var reasons []string
	for _, p := range providers {
		if err := p.serves(r.remote.Addr(), r.settings); err != nil {
			reasons = append(reasons, err.Error())
		}
	}
	if reasons == nil {
		return &Unavailable{Reason: ReasonNotServed}
	}
	return &Unavailable{Reason: ReasonNotServed, Err: errors.New(strings.Join(reasons, "; "))}
}

// familyOf returns the TCP network of ip's family.
func familyOf(ip netip.Addr) string {
	if ip.Is4() {
		return "tcp4"
	}
	return "tcp6"
}

// sameFamily reports whether a connection from local to dst is possible.
func sameFamily(local *net.TCPAddr, dst netip.Addr) bool {
	return local == nil || len(local.IP) == 0 || local.IP.IsUnspecified() || (local.IP.To4() != nil) == dst.Is4()
}

// dialLocal returns a as a TCP address, or an error if it is not one.
func dialLocal(a net.Addr) (*net.TCPAddr, error) {
	if a == nil {
		return nil, nil
	}
	local, ok := a.(*net.TCPAddr)
	if !ok {
		return nil, fmt.Errorf("mismatched local address type %T", a)
	}
	return local, nil
}
