package verbs

import (
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
)

// Package net lists all interfaces to find one, and all addresses of each interface to find the
// interface with an address. That is too slow for each connection on nodes of containers, which have
// hundreds. The kernel returns a single interface, and all addresses in one list.

func interfaceByIndex(index int) (*net.Interface, error) {
	return interfaceFrom(netlink.LinkByIndex(index))
}

func interfaceByName(name string) (*net.Interface, error) {
	return interfaceFrom(netlink.LinkByName(name))
}

func interfaceFrom(link netlink.Link, err error) (*net.Interface, error) {
	if err != nil {
		return nil, err
	}
	a := link.Attrs()
	return &net.Interface{Index: a.Index, MTU: a.MTU, Name: a.Name, HardwareAddr: a.HardwareAddr, Flags: a.Flags}, nil
}

// indexesOf returns the indexes of the interfaces that have an address.
func indexesOf(a netip.Addr) (indexes []int, err error) {
	list, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	for _, x := range list {
		if x.IP.Equal(a.AsSlice()) {
			indexes = append(indexes, x.LinkIndex)
		}
	}
	return indexes, err
}

// interfaceOf returns the name of the network interface that has an address, or "".
func interfaceOf(a netip.Addr) (string, error) {
	if a.Zone() != "" {
		return a.Zone(), nil
	}
	indexes, err := indexesOf(a)
	if len(indexes) == 0 {
		return "", err
	}
	ifi, err := interfaceByIndex(indexes[0])
	if err != nil {
		return "", err
	}
	return ifi.Name, nil
}

// hasAddr reports whether an interface of this network namespace has an address.
func hasAddr(index int, a netip.Addr) bool {
	indexes, _ := indexesOf(a)
	return slices.Contains(indexes, index)
}
