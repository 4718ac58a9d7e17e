//go:build linux && cgo

package verbs

import (
	"net"
	"net/netip"
	"testing"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/internal/rdmalink"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
	"github.com/sanconn/san/test/hwsim"
)

// The partition of an interface is looked up in the port's table of keys. Full membership is preferred
// to limited.
func TestPartition(t *testing.T) {
	sysfs := t.TempDir()
	writeFiles(t, sysfs, map[string]string{
		"net/ib0/pkey":                       "0xffff",
		"net/ib0.8002/pkey":                  "0x8002",
		"net/ib0.8007/pkey":                  "0x8007",
		"infiniband/mlx5_0/ports/2/pkeys/0":  "0xffff",
		"infiniband/mlx5_0/ports/2/pkeys/1":  "0x0002",
		"infiniband/mlx5_0/ports/2/pkeys/12": "0x8002",
		"infiniband/mlx5_0/ports/2/pkeys/13": "0x0000",
	})
	for netdev, want := range map[string]uint16{"ib0": 0, "ib0.8002": 12, "eth0": 0} {
		if got, err := partition(sysfs, netdev, "mlx5_0", 2); got != want || err != nil {
			t.Errorf("%s: index %d, %v; want %d", netdev, got, err, want)
		}
	}
	if _, err := partition(sysfs, "ib0.8007", "mlx5_0", 2); reasonOf(err) != session.ReasonUnreachable {
		t.Errorf("a partition that the port is not in: %v", err)
	}
}

// An interface, such as a VLAN's, may have a smaller MTU than the port.
func TestMTUOfTheInterface(t *testing.T) {
	inOwnNetwork(t, func() error {
		return script("ip link add rail mtu 9000 type veth peer vlan mtu 1400")
	}, func() {
		for netdev, want := range map[string]int{"rail": 4096, "vlan": 1024} {
			ifi, err := net.InterfaceByName(netdev)
			if err != nil {
				t.Error(err)
				continue
			}
			a := attachment{port: ibv.Port{LinkLayer: ibv.LinkEthernet, ActiveMTU: 5}, gids: []ibv.GIDEntry{{Netdev: ifi.Index}}}
			if got := a.mtu().Bytes(); got != want {
				t.Errorf("%s, MTU %d: %d, want %d", netdev, ifi.MTU, got, want)
			}
		}
	})
}

// Without rdma_cm, a connection on InfiniBand is in the partition of its interface. Its packets have a
// global route header if the port requires one.
func TestInfiniBandWithoutCM(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // only where hwsimRuns sets the simulated device to InfiniBand
	}
	cable(t)
	const index = 3
	sysfsClass = t.TempDir()
	writeFiles(t, sysfsClass, map[string]string{
		"net/lo/pkey": "0x8005",
		"infiniband/" + hwsim.Device + "/ports/1/pkeys/0": "0xffff",
		"infiniband/" + hwsim.Device + "/ports/1/pkeys/3": "0x8005",
	})
	port := ibv.GID{0: 0xfe, 1: 0x80, 15: 1} // the GID of the simulated device
	hardwareAddr = func(string) net.HardwareAddr { return append(make([]byte, 4), port[:]...) }
	cfg := Config{WithoutCM: true}
	a, b, err := connect(listen(t, cfg), cfg)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range []*Endpoint{a, b} {
		attr, err := e.q.qp.Query(ibv.MaskAV | ibv.MaskPKeyIndex)
		if err != nil || attr.Global != 1 || attr.DGID != port || attr.PKeyIndex != index {
			t.Errorf("%+v, %v", attr, err)
		}
	}
	begin(a)
	begin(b)
	a.CommitControl(len(a.ReserveControl(16)))
	if ev := event(t, b); ev.Kind != session.Message {
		t.Errorf("event of kind %d", ev.Kind)
	}
	a.discard()
	b.discard()
}

// An InfiniBand device without an interface serves the addresses of interfaces that have no device. Its
// connections are made only by the exchange over TCP, without rdma_cm.
func TestInfiniBandWithoutIPoIB(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // only where hwsimRuns sets the simulated device to InfiniBand
	}
	_, at := cable(t)
	rdmalink.Simulated = map[string]string{"": hwsim.Device} // the device of no interface
	hardwareAddr = func(string) net.HardwareAddr { panic("there is no IPoIB interface to be looked at") }
	cfg := Config{WithoutCM: true}
	far := netip.MustParseAddr("fe80::1%eth0") // the zone tells the interface, so no route is looked up
	if name, err := ServedBy(far, Route{}, cfg); name != hwsim.Device || err != nil {
		t.Errorf("served by %q, %v", name, err)
	}
	if name, err := ServedBy(far, Route{}, Config{}); err == nil {
		t.Errorf("with rdma_cm, served by %q", name)
	}
	l, err := listenAt(netip.AddrPortFrom(at, freePort()), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	a, b := pair(t, l, cfg)
	say(t, a, b)
	say(t, b, a)
	for _, e := range []*Endpoint{a, b} {
		if attr, err := e.q.qp.Query(ibv.MaskAV | ibv.MaskPKeyIndex); err != nil || attr.DLID == 0 || attr.PKeyIndex != 0 {
			t.Errorf("%+v, %v", attr, err)
		}
	}
}

// If two ends have different subnet prefixes, packets between them need a global route header.
func TestGlobalRouteHeader(t *testing.T) {
	near, far := ibv.GID{0: 0xfe, 1: 0x80, 15: 1}, ibv.GID{0: 0xfe, 1: 0x80, 7: 9, 15: 2}
	for _, tt := range []struct {
		port ibv.Port
		peer ibv.GID
		want bool
	}{
		{ibv.Port{LinkLayer: ibv.LinkInfiniBand}, ibv.GID{0: 0xfe, 1: 0x80, 15: 2}, true},
		{ibv.Port{LinkLayer: ibv.LinkInfiniBand}, far, false},
		{ibv.Port{LinkLayer: ibv.LinkInfiniBand, Flags: ibv.PortGRHRequired}, near, false},
		{ibv.Port{LinkLayer: ibv.LinkEthernet}, near, false},
	} {
		a := attachment{port: tt.port, gids: []ibv.GIDEntry{{GID: near}}}
		if got := a.isOnSubnet(tt.peer); got != tt.want {
			t.Errorf("%+v to %v: %v", tt.port, tt.peer, got)
		}
	}
}

// Interfaces in several containers may have the same name. The device is the one that has the address,
// and that can be opened.
func TestDeviceOfAnAddress(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // needs a device that has the host's own addresses
	}
	serveOn(map[string]string{"lo": "notours"})
	a, err := attach(netip.MustParseAddr("127.0.0.1"), Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer a.dev.release()
	if a.dev.ctx.Name != hwsim.Device || !a.here {
		t.Errorf("%s, here: %v", a.dev.ctx.Name, a.here)
	}
}
