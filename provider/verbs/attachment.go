package verbs

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/session"
)

// attachment is a port of a device, and how the port is addressed.
type attachment struct {
	dev       *device
	port      ibv.Port
	gids      []ibv.GIDEntry // to be tried in turn; all with the same GID, except for the probe
	here      bool           // the first of gids belongs to an interface of this network namespace
	pkeyIndex uint16         // on InfiniBand: of the interface's partition
}

// attach finds the device that has a local address: the device of the interface with that address, or
// another one that has the address, because interfaces in containers may have equal names.
func attach(local netip.Addr, cfg Config) (a attachment, err error) {
	local = local.Unmap()
	netdev, err := interfaceOf(local)
	if err != nil {
		return a, callError(err)
	}
	if name := DeviceOf(netdev); name != "" {
		a, err = attachAny(name, netdev, local)
	} else if name = bareDevice(); name != "" {
		a, err = barePort(name)
	} else {
		err = cmp.Or(cannotLook(), unavailable(session.ReasonNotServed, fmt.Errorf("verbs: %v (%q) belongs to no RDMA device, and there is no InfiniBand without IPoIB", local, netdev)))
	}
	if err == nil {
		a.dev.probe(cfg)
	}
	return a, err
}

// attachAny tries the device with this name, and then the host's others. Some of them may not open.
func attachAny(name, netdev string, local netip.Addr) (best attachment, err error) {
	devices, _ := ibv.Devices()
	for i, d := range append([]ibv.Device{{Name: name}}, devices...) {
		if i > 0 && d.Name == name {
			continue
		}
		a, aerr := attachTo(d.Name, netdev, local)
		switch {
		case aerr != nil:
			err = cmp.Or(err, aerr)
		case best.dev == nil:
			best = a
		case a.here:
			best.dev.release()
			best = a
		default:
			a.dev.release()
		}
		if best.here {
			break
		}
	}
	if best.dev != nil {
		err = nil
	}
	return best, err
}

// attachTo finds a local address among those of a device. Of a RoCE port's GIDs with this address, the
// one of version 2 is routed. A link-local GID serves only the link-local address.
func attachTo(name, netdev string, local netip.Addr) (attachment, error) {
	infiniband := portGID(hardwareAddr(netdev))
	a, err := portOf(name, func(p ibv.Port, g ibv.GIDEntry) bool {
		return p.LinkLayer == ibv.LinkInfiniBand && g.GID == infiniband || g.Type == ibv.GIDTypeRoCEv2 && g.GID.Addr() == local.WithZone("")
	}, fmt.Sprintf("with %v as a RoCE v2 address, or with the GID of %s", local, netdev))
	if err == nil && a.port.LinkLayer == ibv.LinkInfiniBand {
		if a.pkeyIndex, err = partition(sysfsClass, netdev, name, a.port.Num); err != nil {
			a.dev.release()
		}
	}
	return a, err
}

// portOf opens a device that connects without rdma_cm, and finds a port of it with GIDs that suit.
func portOf(name string, suits func(ibv.Port, ibv.GIDEntry) bool, that string) (attachment, error) {
	dev, err := exchangeDevice(name)
	if err != nil {
		return attachment{}, err
	}
	a, err := dev.at(suits)
	if a.gids == nil && err == nil {
		err = unavailable(session.ReasonUnreachable, fmt.Errorf("verbs: %s has no active port %s", name, that))
	}
	if err != nil {
		dev.release()
	}
	return a, callError(err)
}

// hardwareAddr returns the hardware address of a network interface, or nil if there is no such
// interface. Tests replace it.
var hardwareAddr = func(netdev string) net.HardwareAddr {
	ifi, err := interfaceByName(netdev)
	if err != nil {
		return nil
	}
	return ifi.HardwareAddr
}

// sysfsClass is where the kernel shows interfaces and devices. Tests use a directory of their own.
var sysfsClass = "/sys/class"

// partition returns the index, in the port's table, of the partition key of an IPoIB interface
// (Documentation/ABI/stable/sysfs-class-infiniband, ports/N/pkeys). The top bit distinguishes full
// members from limited ones, which do not reach each other.
func partition(sysfs, netdev, device string, port int) (index uint16, err error) {
	const partitionOf = 0x7fff
	key, err := readHex(filepath.Join(sysfs, "net", netdev, "pkey"))
	if err != nil {
		return 0, nil // not an IPoIB interface: use the port's first partition
	}
	files, _ := filepath.Glob(filepath.Join(sysfs, "infiniband", device, "ports", strconv.Itoa(port), "pkeys", "*"))
	var best uint64
	for _, file := range files {
		n, err := strconv.ParseUint(filepath.Base(file), 10, 16)
		if err != nil {
			continue
		}
		if k, err := readHex(file); err == nil && k&partitionOf == key&partitionOf && k > best {
			index, best = uint16(n), k
		}
	}
	if best == 0 {
		return 0, unavailable(session.ReasonUnreachable, fmt.Errorf("verbs: partition %#x of %s is not among those of port %d of %s", key, netdev, port, device))
	}
	return index, nil
}

// readHex reads a file that holds a 16-bit number, such as 0x8001.
func readHex(file string) (uint64, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	return strconv.ParseUint(strings.TrimSpace(string(b)), 0, 16)
}

// mtu returns the port's MTU, or the interface's if that is smaller, as a VLAN's may be.
func (a attachment) mtu() ibv.MTU {
	if a.port.LinkLayer == ibv.LinkEthernet {
		if ifi, err := interfaceByIndex(a.gids[0].Netdev); err == nil {
			return min(a.port.ActiveMTU, roceMTU(ifi.MTU))
		}
	}
	return a.port.ActiveMTU
}

// roceMTU returns the largest MTU of RoCE whose packets fit an interface's MTU, by the kernel's
// calculation (iboe_get_mtu in include/rdma/ib_addr.h).
func roceMTU(bytes int) ibv.MTU {
	const headers = 40 + 8 + 12 + 4 + 28 + 4 // IPv6, UDP, BTH, XRC, atomics, CRC
	m := ibv.MTU(5)
	for m > 1 && m.Bytes() > bytes-headers {
		m--
	}
	return m
}

// isOnSubnet reports whether packets to a GID need no global route header. Between subnets that
// InfiniBand routers join, only the subnet manager knows a router's address: such peers need rdma_cm.
func (a attachment) isOnSubnet(peer ibv.GID) bool {
	const prefix = 8 // bytes, of the subnet
	return a.port.LinkLayer == ibv.LinkInfiniBand && a.port.Flags&ibv.PortGRHRequired == 0 &&
		[prefix]byte(peer[:prefix]) == [prefix]byte(a.gids[0].GID[:prefix])
}

// at returns an active port of the device with those of its GIDs that suit, if any. An error means that
// this cannot be determined. In a container the GID table also has GIDs of other containers, perhaps
// with equal addresses: GIDs of interfaces in this network namespace come first.
func (d *device) at(suits func(ibv.Port, ibv.GIDEntry) bool) (attachment, error) {
	a := attachment{dev: d}
	var unknown error
	for num := 1; num <= d.caps.Ports; num++ {
		port, err := d.ctx.Port(num)
		if err == nil && port.State != ibv.PortActive {
			continue
		}
		var gids []ibv.GIDEntry
		if err == nil {
			gids, err = d.ctx.GIDs(num)
		}
		unknown = cmp.Or(unknown, err)
		var here, others []ibv.GIDEntry
		for _, g := range gids {
			if !suits(port, g) {
				continue
			}
			if port.LinkLayer == ibv.LinkInfiniBand || hasAddr(g.Netdev, g.GID.Addr()) {
				here = append(here, g)
			} else {
				others = append(others, g)
			}
		}
		if here != nil || a.gids == nil {
			a.port, a.gids, a.here = port, append(here, others...), here != nil
		}
		if here != nil {
			break
		}
	}
	if a.gids != nil {
		unknown = nil
	}
	return a, unknown
}

// inTurn calls try with each GID until one serves. EINVAL means that a GID belongs to another
// container.
func (a attachment) inTurn(try func(ibv.GIDEntry) error) error {
	var tried []error
	for _, g := range a.gids {
		err := try(g)
		if !errors.Is(err, syscall.EINVAL) {
			return callError(err)
		}
		netdev := fmt.Sprint("interface ", g.Netdev)
		if ifi, err := interfaceByIndex(g.Netdev); err == nil {
			netdev = ifi.Name
		}
		tried = append(tried, fmt.Errorf("GID %v (index %d) of %s: %w", g.GID, g.Index, netdev, err))
	}
	return unavailable(session.ReasonUnreachable, fmt.Errorf("verbs: %s gives this process no address: %w", a.dev.ctx.Name, errors.Join(tried...)))
}

// portGID returns the GID of the InfiniBand port below a network interface: the interface's hardware
// address without its first four bytes (RFC 4391, section 9.1.1). Zero: there is no such port.
func portGID(hardware net.HardwareAddr) (gid ibv.GID) {
	if len(hardware) == 4+len(gid) {
		copy(gid[:], hardware[4:])
	}
	return gid
}

// A cluster may have InfiniBand without IPoIB, and an Ethernet with all addresses. rdma_cm connects by
// addresses, and has none there. The exchange over TCP needs none on InfiniBand: so a device without an
// interface serves the addresses of interfaces without a device.

// bare remembers such a device. Finding it takes opening devices.
var bare struct {
	mu   sync.Mutex
	at   time.Time // guarded by mu
	name string    // "": none. Guarded by mu
}

// bareAge is how long the result is remembered.
const bareAge = 10 * time.Second

// bareDevice returns the first InfiniBand device with an active port and without an interface, or "".
// Whether a peer is on the same fabric turns out when it is connected.
func bareDevice() string {
	bare.mu.Lock()
	name, at := bare.name, bare.at
	bare.mu.Unlock()
	if time.Since(at) <= bareAge {
		return name
	}
	err := searched(func() error { name = findBare(); return nil }) // without mu, as opening a device may block: another goroutine may search as well
	if name == "" && err != nil {
		return ""
	}
	bare.mu.Lock()
	defer bare.mu.Unlock()
	bare.name, bare.at = name, time.Now()
	return name
}

func findBare() string {
	if nodesRefused() != nil {
		return ""
	}
	of, err := devicesByInterface()
	if err != nil {
		return ""
	}
	ifis, err := net.Interfaces()
	if err != nil {
		return ""
	}
	taken := make(map[string]bool)
	for _, ifi := range ifis { // of this network namespace
		taken[of[ifi.Name]] = true
	}
	devices, _ := ibv.Devices() // on an error there are none
	for _, d := range devices {
		if taken[d.Name] {
			continue
		}
		if a, err := barePort(d.Name); err == nil {
			a.dev.release()
			return d.Name
		}
	}
	return ""
}

// barePort finds an active InfiniBand port, and uses it in its first partition.
func barePort(name string) (attachment, error) {
	return portOf(name, func(p ibv.Port, g ibv.GIDEntry) bool { return p.LinkLayer == ibv.LinkInfiniBand && g.Index == 0 }, "of InfiniBand")
}
