package ibv

import (
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// GIDType is how packets from a GID travel. The values are those of enum ibv_gid_type.
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

// GID is a port's 128-bit address. On RoCE it is an IPv6 address, or an IPv4 address in its IPv6-mapped
// form.
type GID [16]byte

// Addr returns the GID as an IP address, as IPv4 if it is mapped.
func (g GID) Addr() netip.Addr { return netip.AddrFrom16(g).Unmap() }

func (g GID) String() string { return netip.AddrFrom16(g).String() }

// GIDEntry is a valid entry of a port's GID table.
type GIDEntry struct {
	GID    GID
	Index  int
	Type   GIDType
	Netdev int // index of its network interface, or 0
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
	// The library counts the entries of all ports together.
	entries, errno := sysQueryGIDs(c.h, port, p.GIDs*max(caps.Ports, 1))
	for i := range entries {
		if entries[i].Type == GIDTypeUnknown {
			entries[i].Type = c.sysfsGIDType(port, entries[i].Index)
		}
	}
	return entries, verbError("ibv_query_gid_table", c.Name+"/"+strconv.Itoa(port), errno)
}

// sysfsGIDType reads the type of a GID for libraries that are too old to report it. The kernel's file
// is described in Documentation/ABI/stable/sysfs-class-infiniband, gid_attrs/types.
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
