//go:build !linux

package verbs

import (
	"context"
	"net"
	"net/netip"
	"syscall"
)

// DeviceOf is the name of the RDMA device of a network interface: none here.
func DeviceOf(string) string { return "" }

func devicesByInterface() (map[string]string, error) { return nil, nil }

func interfaceByIndex(int) (*net.Interface, error)   { return nil, syscall.ENODEV }
func interfaceByName(string) (*net.Interface, error) { return nil, syscall.ENODEV }
func interfaceOf(netip.Addr) (string, error)         { return "", nil }
func hasAddr(int, netip.Addr) bool                   { return false }

func servedAddresses(netip.Addr, bool) ([]netip.Addr, error) { return nil, nil }

func watchAddresses(ctx context.Context) (<-chan struct{}, error) {
	changed := make(chan struct{})
	context.AfterFunc(ctx, func() { close(changed) })
	return changed, nil
}
