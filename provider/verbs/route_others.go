//go:build !linux

package verbs

import (
	"context"
	"net/netip"
)

// DeviceOf returns "": there are no RDMA devices on this system.
func DeviceOf(string) string { return "" }

func devicesByInterface() (map[string]string, error) { return nil, nil }

func servedAddresses(netip.Addr, bool) ([]netip.Addr, error) { return nil, nil }

func watchAddresses(ctx context.Context) (<-chan struct{}, error) {
	changed := make(chan struct{})
	context.AfterFunc(ctx, func() { close(changed) })
	return changed, nil
}
