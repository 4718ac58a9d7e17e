package san

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"
)

// resolve returns the addresses that the dialer would connect to from local, in net's
// order, and whether it had to look up a name.
func resolve(ctx context.Context, r *net.Resolver, network, address string, local *net.TCPAddr) (dsts []netip.AddrPort, named bool, err error) {
	if r == nil {
		r = net.DefaultResolver
	}
	if address == "" {
		return nil, false, errors.New("missing address") // as net says
	}
	host, service, err := net.SplitHostPort(address)
	if err != nil {
		return nil, false, err
	}
	port, err := r.LookupPort(ctx, network, service)
	if err != nil {
		return nil, false, err
	}
	if host == "" { // this host, as in net
		host = "0.0.0.0"
		if network == "tcp6" {
			host = "::"
		}
	}
	_, err = netip.ParseAddr(host)
	named = err != nil
	ips, err := lookup(ctx, r, network, host)
	if err != nil {
		return nil, named, err
	}
	dsts = make([]netip.AddrPort, len(ips))
	for i, ip := range ips {
		dsts[i] = netip.AddrPortFrom(reached(ip, local), uint16(port))
	}
	return dsts, named, nil
}

// lookup returns a host's addresses as net's own dialer gets them. No single method of
// net's resolver does: LookupNetIP loses zones, LookupIPAddr asks for both families.
func lookup(ctx context.Context, r *net.Resolver, network, host string) (ips []netip.Addr, err error) {
	if network != "tcp" {
		ips, err = r.LookupNetIP(ctx, "ip"+network[len("tcp"):], host)
		if !slices.ContainsFunc(ips, func(ip netip.Addr) bool { return ip.Is6() && ip.IsLinkLocalUnicast() }) {
			return ips, err
		}
		ips = nil
	}
	all, err := r.LookupIPAddr(ctx, host)
	if len(all) == 1 && all[0].IP.Equal(net.IPv6unspecified) && network == "tcp" {
		all = append(all, net.IPAddr{IP: net.IPv4zero}) // for hosts without IPv6
	}
	for _, a := range all {
		ip, _ := netip.AddrFromSlice(a.IP)
		if ip = ip.Unmap(); network == "tcp" || !ip.Is4() {
			ips = append(ips, ip.WithZone(a.Zone))
		}
	}
	return ips, err
}

// reached returns the address at which a connect from local to ip arrives: the kernel takes
// the unspecified address for loopback or, with IPv4, for local if that is set.
func reached(ip netip.Addr, local *net.TCPAddr) netip.Addr {
	switch ip = ip.Unmap(); {
	case ip == netip.IPv4Unspecified():
		if local != nil && local.IP.To4() != nil && !local.IP.IsUnspecified() {
			return netip.AddrFrom4([4]byte(local.IP.To4()))
		}
		return netip.AddrFrom4([4]byte{127, 0, 0, 1})
	case ip == netip.IPv6Unspecified():
		return netip.IPv6Loopback()
	case ip.IsLoopback():
		return ip.WithZone("") // the kernel does not keep it either
	}
	return ip
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

// minShare is the least time for one of several addresses, as in net.
const minShare = 2 * time.Second

// share bounds the attempt at one address by net's own rule: left addresses, including this
// one, share the time that remains until ctx's deadline.
func share(ctx context.Context, left int) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok || left == 1 {
		return context.WithCancel(ctx)
	}
	remaining := time.Until(deadline)
	return context.WithTimeout(ctx, min(remaining, max(remaining/time.Duration(left), minShare)))
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
