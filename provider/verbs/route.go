package verbs

import "net/netip"

// Route is what decides, besides the destination, by which interface a socket's packets
// leave. Hosts with several rails set this up by source rules, marks and VRFs.
type Route struct {
	Source    netip.Addr // the local address; zero: not bound
	Interface string     // SO_BINDTODEVICE, which may be a VRF's; "": not bound
	Mark      uint32     // SO_MARK
}
