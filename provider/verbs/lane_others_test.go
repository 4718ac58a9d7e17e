//go:build !linux

package verbs

import (
	"errors"
	"net/netip"
)

// serveOn does nothing, because there are no RDMA devices here.
func serveOn(map[string]string) {}

func whyNotServed(netip.Addr) error { return errors.ErrUnsupported }
