package verbs

import (
	"net/netip"
	"time"
)

// serveOn makes addresses of interfaces belong to devices that sysfs does not know.
func serveOn(devices map[string]string) {
	r := &rdmaDevices
	r.mu.Lock()
	defer r.mu.Unlock()
	r.names, r.at = devices, time.Now().Add(time.Hour)
}

// whyNotServed returns why no device serves a destination, or nil if one does.
func whyNotServed(dst netip.Addr) error {
	_, err := ServedBy(dst, Route{}, Config{})
	return err
}
