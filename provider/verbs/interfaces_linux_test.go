package verbs

import (
	"net"
	"net/netip"
	"testing"

	"github.com/sanconn/san/internal/rdmalink"
)

// The interface of an address, and the properties of an interface, are the same as package net's.
func TestInterfacesAsNetHasThem(t *testing.T) {
	ifis, err := net.Interfaces()
	if err != nil || len(ifis) == 0 {
		t.Fatal(ifis, err)
	}
	having := 0
	for _, want := range ifis {
		got, err := interfaceByIndex(want.Index)
		if err != nil || got.Name != want.Name || got.MTU != want.MTU || got.HardwareAddr.String() != want.HardwareAddr.String() {
			t.Errorf("%d: %+v, %v; want %+v", want.Index, got, err, want)
		}
		if got, err := interfaceByName(want.Name); err != nil || got.Index != want.Index {
			t.Errorf("%s: %+v, %v; want %+v", want.Name, got, err, want)
		}
		addrs, err := want.Addrs()
		if err != nil {
			t.Fatal(err)
		}
		for _, addr := range addrs {
			a, _ := netip.AddrFromSlice(addr.(*net.IPNet).IP)
			a = a.Unmap()
			name, err := interfaceOf(a)
			if ifi, ierr := interfaceByName(name); err != nil || ierr != nil || !hasAddr(ifi.Index, a) || !hasAddr(want.Index, a) {
				t.Errorf("%v of %s: of %q, %v, %v", a, want.Name, name, err, ierr)
			}
			if hasAddr(want.Index+1000, a) {
				t.Errorf("%v: of an interface that is not there", a)
			}
			having++
		}
	}
	if having == 0 {
		t.Error("no interface has an address")
	}
	for _, a := range []string{"192.0.2.1", "2001:db8::1"} { // addresses for documentation
		if name, err := interfaceOf(netip.MustParseAddr(a)); name != "" || err != nil {
			t.Errorf("%s: %q, %v", a, name, err)
		}
	}
	if name, err := interfaceOf(netip.MustParseAddr("fe80::1%eth7")); name != "eth7" || err != nil {
		t.Errorf("%q, %v", name, err)
	}
	if ifi, err := interfaceByName("nothere"); err == nil {
		t.Errorf("%+v", ifi)
	}
}

// BenchmarkInterfaces measures the search for a connection's device, in a network namespace that has as
// many interfaces as should be measured (docs/notes/rdma.md).
func BenchmarkInterfaces(b *testing.B) {
	addrs, err := net.InterfaceAddrs()
	if err != nil || len(addrs) == 0 {
		b.Fatal(addrs, err)
	}
	var last netip.Addr // of IPv4, as a link-local address of IPv6 has a route only with its zone
	for _, addr := range addrs {
		if a, _ := netip.AddrFromSlice(addr.(*net.IPNet).IP); a.Unmap().Is4() {
			last = a.Unmap()
		}
	}
	rdmalink.Simulated = map[string]string{"lo": "sim0"}
	b.Cleanup(func() { rdmalink.Simulated = nil })
	for _, bench := range []struct {
		name string
		call func() error
	}{
		{"route", func() error { _, err := Route{}.leavesBy(last); return err }},
		{"address", func() error { _, err := interfaceOf(last); return err }},
		{"served", func() error { _, err := servedAddresses(netip.IPv4Unspecified(), false); return err }},
	} {
		b.Run(bench.name, func(b *testing.B) {
			for b.Loop() {
				if err := bench.call(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
