package ibv

import "strconv"

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

// LinkLayer is the kind of network that a port is connected to.
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

// Bytes returns the MTU in bytes.
func (m MTU) Bytes() int { return 128 << m }

// Port describes a port of a device (struct ibv_port_attr).
type Port struct {
	Num        int // ports count from 1
	State      PortState
	ActiveMTU  MTU
	GIDs       int    // entries of its GID table
	MaxMessage uint32 // of a message or an RDMA operation, in bytes
	LID        uint16 // InfiniBand only
	LinkLayer  LinkLayer
	Flags      PortFlags // 0 from older libraries
}

// PortFlags is the set of IBV_QPF_*.
type PortFlags uint8

// PortGRHRequired: packets need a global route header even within the subnet, as on virtual functions
// that share a LID.
const PortGRHRequired PortFlags = 1 << 0

// Port queries the device (ibv_query_port). Ports count from 1.
func (c *Context) Port(num int) (Port, error) {
	p, errno := sysQueryPort(c.h, num)
	p.Num = num
	return p, verbError("ibv_query_port", c.Name+"/"+strconv.Itoa(num), errno)
}
