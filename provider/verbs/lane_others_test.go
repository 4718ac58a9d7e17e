//go:build !linux

package verbs

import (
	"errors"
	"net/netip"
)

// serveOn is of no use where there are no RDMA devices.
func serveOn(map[string]string) {}

func whyNotServed(netip.Addr) error { return errors.ErrUnsupported }
