package verbs

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"syscall"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/session"
)

// attachment is a port of a device and how it is addressed.
type attachment struct {
	dev  *device
	port ibv.Port
	gids []ibv.GIDEntry // to be tried in turn; one and the same GID, except for the probe
}

// attach finds the device that has a local address. Of the GIDs that a RoCE port
// has for it, version 2 is the one that is routed; a link-local one serves only
// where the address is that itself.
func attach(local netip.Addr) (attachment, error) {
	local = local.Unmap()
	netdev := interfaceOf(local)
	name := DeviceOf(netdev)
	if name == "" {
		return attachment{}, unavailable(session.ReasonNotServed, fmt.Errorf("verbs: %v (%q) belongs to no RDMA device", local, netdev))
	}
	dev, err := exchangeDevice(name)
	if err != nil {
		return attachment{}, err
	}
	var infiniband ibv.GID
	if ifi, err := net.InterfaceByName(netdev); err == nil {
		infiniband = portGID(ifi.HardwareAddr)
	}
	a, err := dev.at(func(p ibv.Port, g ibv.GIDEntry) bool {
		return p.LinkLayer == ibv.LinkInfiniBand && g.GID == infiniband || g.Type == ibv.GIDTypeRoCEv2 && g.GID.Addr() == local.WithZone("")
	})
	if a.gids == nil && err == nil {
		err = unavailable(session.ReasonUnreachable, fmt.Errorf("verbs: %s has no active port with %v as a RoCE v2 address, or with the GID of %s", name, local, netdev))
	}
	if err != nil {
		dev.release()
		return attachment{}, callError(err)
	}
	return a, nil
}

// at returns an active port of the device with those of its GIDs that suit, if there are
// any, and an error if that cannot be determined. In a container the table also has
// other containers' GIDs, perhaps with equal addresses: those of interfaces here come
// first.
func (d *device) at(suits func(ibv.Port, ibv.GIDEntry) bool) (attachment, error) {
	a := attachment{dev: d}
	var unknown error
	for num := 1; num <= d.caps.Ports; num++ {
		port, err := d.ctx.Port(num)
		if err == nil && port.State != ibv.PortActive {
			continue
		}
		var gids []ibv.GIDEntry
		if err == nil {
			gids, err = d.ctx.GIDs(num)
		}
		if err != nil && unknown == nil {
			unknown = err
		}
		var here, others []ibv.GIDEntry
		for _, g := range gids {
			if !suits(port, g) {
				continue
			}
			if ifi, err := net.InterfaceByIndex(g.Netdev); err == nil && hasAddr(ifi, g.GID.Addr()) {
				here = append(here, g)
			} else {
				others = append(others, g)
			}
		}
		if here != nil || a.gids == nil {
			a.port, a.gids = port, append(here, others...)
		}
		if here != nil {
			break
		}
	}
	if a.gids != nil {
		unknown = nil
	}
	return a, unknown
}

// inTurn tries the GIDs for a queue pair. EINVAL means that one is another container's.
func (a attachment) inTurn(try func(ibv.GIDEntry) error) error {
	var tried []error
	for _, g := range a.gids {
		err := try(g)
		if !errors.Is(err, syscall.EINVAL) {
			return callError(err)
		}
		netdev := fmt.Sprint("interface ", g.Netdev)
		if ifi, err := net.InterfaceByIndex(g.Netdev); err == nil {
			netdev = ifi.Name
		}
		tried = append(tried, fmt.Errorf("GID %v (index %d) of %s: %w", g.GID, g.Index, netdev, err))
	}
	return unavailable(session.ReasonUnreachable, fmt.Errorf("verbs: %s gives this process no address: %w", a.dev.ctx.Name, errors.Join(tried...)))
}

// portGID is the GID of the InfiniBand port below a network interface, which is in the
// interface's hardware address after the first four bytes (RFC 4391, section 9.1.1).
// Zero: there is no such port.
func portGID(hardware net.HardwareAddr) (gid ibv.GID) {
	if len(hardware) == 4+len(gid) {
		copy(gid[:], hardware[4:])
	}
	return gid
}

// interfaceOf is the name of the network interface that has an address.
func interfaceOf(a netip.Addr) string {
	if a.Zone() != "" {
		return a.Zone()
	}
	ifis, _ := net.Interfaces()
	for _, ifi := range ifis {
		if hasAddr(&ifi, a) {
			return ifi.Name
		}
	}
	return ""
}

func hasAddr(ifi *net.Interface, a netip.Addr) bool {
	addrs, _ := ifi.Addrs()
	return slices.ContainsFunc(addrs, func(x net.Addr) bool {
		n, ok := x.(*net.IPNet)
		return ok && n.IP.Equal(a.AsSlice())
	})
}
