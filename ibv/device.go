package ibv

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
)

// Available returns nil if the libraries are loaded and can be used, and
// otherwise an error that wraps [ErrNotAvailable] and says why. It says nothing
// about devices: see [Devices]. The answer is determined once and does not change.
func Available() error { return available() }

var available = sync.OnceValue(func() error {
	if why := sysLoad(); why != "" {
		return fmt.Errorf("%w: %s", ErrNotAvailable, why)
	}
	return nil
})

// Transport is what a device speaks. The values are those of enum ibv_transport_type.
type Transport int32

const (
	TransportIB    Transport = 0 // InfiniBand and RoCE
	TransportIWARP Transport = 1
)

func (t Transport) String() string {
	switch t {
	case TransportIB:
		return "InfiniBand/RoCE"
	case TransportIWARP:
		return "iWARP"
	}
	return "transport " + strconv.Itoa(int(t))
}

// Device describes an RDMA device of this host.
type Device struct {
	Name      string // "rxe0", "mlx5_0"
	Sysfs     string // its folder in sysfs: /sys/class/infiniband/NAME
	GUID      uint64
	Transport Transport
	Index     int // the kernel's index of it, -1 if this rdma-core does not tell
}

// deviceListMax bounds the list that Devices takes; a host with all its virtual
// functions stays well below.
const deviceListMax = 1024

// Devices lists the devices. That a device is listed does not mean that it can
// be opened: in containers sysfs shows more than is there.
func Devices() ([]Device, error) {
	if err := Available(); err != nil {
		return nil, err
	}
	list, errno := sysDevices(deviceListMax)
	return list, verbError("ibv_get_device_list", "", errno)
}

// Context is an open device.
type Context struct {
	Device
	CompVectors int // completion vectors to spread queues over, at least 1

	h       handle
	asyncFD int
	ofCM    bool // librdmacm's, not ours to close
}

// Open opens the named device. ENODEV: there is none of that name.
func Open(name string) (*Context, error) {
	if err := Available(); err != nil {
		return nil, err
	}
	h, errno := sysOpen(name)
	if errno != 0 {
		return nil, verbError("ibv_open_device", name, errno)
	}
	return newContext(h), nil
}

func newContext(h handle) *Context {
	c := &Context{h: h}
	c.Device, c.asyncFD, c.CompVectors = sysContext(h)
	return c
}

// cmContexts are the contexts that librdmacm opened, one per device. It keeps them
// open; but when it has found that a device was replaced, it closes the old one's with
// the last [ID] on it.
var cmContexts struct {
	mu sync.Mutex
	m  map[handle]*Context // guarded by mu
}

func cmContext(h handle) *Context {
	if h == 0 {
		return nil
	}
	fresh := newContext(h)
	fresh.ofCM = true
	cmContexts.mu.Lock()
	defer cmContexts.mu.Unlock()
	// A device that went and came back may have the address of the old one.
	if c := cmContexts.m[h]; c != nil && c.Device == fresh.Device && c.asyncFD == fresh.asyncFD {
		return c
	}
	if cmContexts.m == nil {
		cmContexts.m = make(map[handle]*Context)
	}
	cmContexts.m[h] = fresh
	return fresh
}

// Close closes the device. Everything made from it must be closed before. A
// context of [ID.Context] belongs to librdmacm and stays open.
func (c *Context) Close() error {
	if c.ofCM || c.h == 0 {
		return nil
	}
	errno := sysClose(c.h)
	if errno == 0 {
		c.h = 0
	}
	return verbError("ibv_close_device", c.Name, errno)
}

// Caps are the limits that a device reports (struct ibv_device_attr). Some
// devices promise more than they keep.
type Caps struct {
	Firmware           string
	MaxMRSize          uint64 // bytes
	VendorID           uint32
	Flags              CapFlags
	MaxQP              int
	MaxQPWR            int // work requests in a send or receive queue
	MaxSGE             int
	MaxSGERead         int // scatter elements of an RDMA read; 1 on iWARP
	MaxCQE             int
	MaxMR              int
	MaxQPReadAtomic    int // RDMA reads and atomics that a QP serves at a time
	MaxQPInitiatorRead int // those that it issues at a time
	MaxMW              int // 0: no memory windows
	MaxSRQ             int // 0: no shared receive queues
	MaxSRQWR           int
	Ports              int
}

// CapFlags is enum ibv_device_cap_flags.
type CapFlags uint32

const (
	CapMemWindow   CapFlags = 1 << 17
	CapMemWindow2A CapFlags = 1 << 23
	CapMemWindow2B CapFlags = 1 << 24
)

// Caps asks the device (ibv_query_device).
func (c *Context) Caps() (Caps, error) {
	caps, errno := sysQueryDevice(c.h)
	return caps, verbError("ibv_query_device", c.Name, errno)
}

// PortState is enum ibv_port_state.
type PortState int32

const (
	PortDown   PortState = 1
	PortInit   PortState = 2
	PortArmed  PortState = 3
	PortActive PortState = 4
)

func (s PortState) String() string {
	return name(s, map[PortState]string{PortDown: "down", PortInit: "init", PortArmed: "armed", PortActive: "active"}, "port state")
}

// LinkLayer is what a port is plugged into.
type LinkLayer uint8

const (
	LinkUnspecified LinkLayer = 0
	LinkInfiniBand  LinkLayer = 1
	LinkEthernet    LinkLayer = 2
)

func (l LinkLayer) String() string {
	return name(l, map[LinkLayer]string{LinkUnspecified: "unspecified", LinkInfiniBand: "InfiniBand", LinkEthernet: "Ethernet"}, "link layer")
}

// MTU is enum ibv_mtu: 1 is 256 bytes, 5 is 4096.
type MTU uint32

// Bytes is the MTU in bytes.
func (m MTU) Bytes() int { return 128 << m }

// Port describes a port of a device (struct ibv_port_attr).
type Port struct {
	Num       int // ports count from 1
	State     PortState
	ActiveMTU MTU
	GIDs      int    // entries of its GID table
	LID       uint16 // InfiniBand only
	LinkLayer LinkLayer
}

// Port asks the device (ibv_query_port). Ports count from 1.
func (c *Context) Port(num int) (Port, error) {
	p, errno := sysQueryPort(c.h, num)
	p.Num = num
	return p, verbError("ibv_query_port", c.Name+"/"+strconv.Itoa(num), errno)
}

// GIDType says how packets from a GID travel. The values are those of enum ibv_gid_type.
type GIDType uint32

const (
	GIDTypeIB      GIDType = 0 // InfiniBand; also what iWARP devices report
	GIDTypeRoCEv1  GIDType = 1 // Ethernet frames, not routable
	GIDTypeRoCEv2  GIDType = 2 // UDP, port 4791
	GIDTypeUnknown GIDType = ^GIDType(0)
)

func (t GIDType) String() string {
	return name(t, map[GIDType]string{GIDTypeIB: "IB", GIDTypeRoCEv1: "RoCE v1", GIDTypeRoCEv2: "RoCE v2", GIDTypeUnknown: "unknown"}, "GID type")
}

// GID is a port's 128-bit address. On RoCE it is an IPv6 address, that of an
// IPv4 address in its mapped form.
type GID [16]byte

// Addr is the GID as an IP address, IPv4 where it is mapped.
func (g GID) Addr() netip.Addr { return netip.AddrFrom16(g).Unmap() }

func (g GID) String() string { return netip.AddrFrom16(g).String() }

// GIDEntry is a valid entry of a port's GID table.
type GIDEntry struct {
	GID    GID
	Index  int
	Type   GIDType
	Netdev int // index of the network interface that it belongs to, 0 if there is none
}

// GIDs lists the valid entries of a port's GID table in order of their index.
func (c *Context) GIDs(port int) ([]GIDEntry, error) {
	p, err := c.Port(port)
	if err != nil {
		return nil, err
	}
	caps, err := c.Caps()
	if err != nil {
		return nil, err
	}
	// The library counts the entries of all ports.
	entries, errno := sysQueryGIDs(c.h, port, p.GIDs*max(caps.Ports, 1))
	for i := range entries {
		if entries[i].Type == GIDTypeUnknown {
			entries[i].Type = c.sysfsGIDType(port, entries[i].Index)
		}
	}
	return entries, verbError("ibv_query_gid_table", c.Name+"/"+strconv.Itoa(port), errno)
}

// sysfsGIDType serves libraries that are too old to tell. The kernel's file is
// Documentation/ABI/stable/sysfs-class-infiniband, gid_attrs/types.
func (c *Context) sysfsGIDType(port, index int) GIDType {
	b, err := os.ReadFile(filepath.Join(c.Sysfs, "ports", strconv.Itoa(port), "gid_attrs", "types", strconv.Itoa(index)))
	switch text := strings.TrimSpace(string(b)); {
	case err != nil:
		return GIDTypeUnknown
	case text == "RoCE v2":
		return GIDTypeRoCEv2
	default:
		if p, err := c.Port(port); err == nil && p.LinkLayer == LinkEthernet {
			return GIDTypeRoCEv1
		}
		return GIDTypeIB
	}
}

// name is the name of a value, or a kind and the number.
func name[T ~int32 | ~uint32 | ~uint8](v T, names map[T]string, kind string) string {
	if s, ok := names[v]; ok {
		return s
	}
	return kind + " " + strconv.FormatInt(int64(v), 10)
}
