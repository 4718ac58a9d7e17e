//go:build !linux

package verbs

import (
	"net"
	"net/netip"
	"syscall"
)

func interfaceByIndex(int) (*net.Interface, error)   { return nil, syscall.ENODEV }
func interfaceByName(string) (*net.Interface, error) { return nil, syscall.ENODEV }
func interfaceOf(netip.Addr) (string, error)         { return "", nil }
func hasAddr(int, netip.Addr) bool                   { return false }
