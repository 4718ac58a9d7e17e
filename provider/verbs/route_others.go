//go:build !linux

package verbs

import (
	"context"
	"errors"
	"net/netip"
)

// DeviceOf is the name of the RDMA device of a network interface: none here.
func DeviceOf(string) string { return "" }

// ServedBy is the RDMA device that serves a destination, or why there is none:
// there are none on this system.
func ServedBy(netip.Addr, Route, Config) (device string, err error) {
	return "", errors.New("verbs: there is no RDMA on this system")
}

// HaveDevices reports whether this host has an RDMA device: none here.
func HaveDevices() bool { return false }

func servedAddresses(netip.Addr, bool) []netip.Addr { return nil }

func watchAddresses(ctx context.Context) (<-chan struct{}, error) {
	changed := make(chan struct{})
	context.AfterFunc(ctx, func() { close(changed) })
	return changed, nil
}
