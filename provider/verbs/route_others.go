//go:build !linux

package verbs

import (
	"context"
	"errors"
	"net/netip"
	"time"
)

// DeviceOf is the name of the RDMA device of a network interface: none here.
func DeviceOf(string) string { return "" }

// ServedBy is the RDMA device that serves a destination, or why there is none:
// there are none on this system.
func ServedBy(netip.Addr, Route, Config) (device string, err error) {
	return "", errors.New("verbs: there is no RDMA on this system")
}

// PathTime is how long the path to a destination may take to be found: nothing here.
func PathTime(netip.Addr, Route) time.Duration { return 0 }

func servedAddresses(netip.Addr, bool) []netip.Addr { return nil }

func watchAddresses(ctx context.Context) (<-chan struct{}, error) {
	changed := make(chan struct{})
	context.AfterFunc(ctx, func() { close(changed) })
	return changed, nil
}
