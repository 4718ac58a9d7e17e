package san

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
)

// resolve returns the addresses that the dialer would connect to from local, in net's
// order, and whether it had to look up a name.
func resolve(ctx context.Context, r *net.Resolver, network, address string, local *net.TCPAddr) (dsts []netip.AddrPort, named bool, err error) {
	if r == nil {
		r = net.DefaultResolver
	}
	if address == "" {
		return nil, false, errors.New("missing address") // net's error
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
// net's resolver does: LookupNetIP loses zones, LookupIPAddr looks up both families.
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
