package main

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/Mellanox/rdmamap"

	"github.com/sanconn/san/ibv"
)

// An rdmaDevice is what the kernel and the libraries report of a device.
type rdmaDevice struct {
	Name      string     `json:"name"`
	Files     []string   `json:"files,omitempty"` // in /dev/infiniband
	Listed    bool       `json:"listed"`          // libibverbs lists it
	Error     string     `json:"error,omitempty"` // why it cannot be opened or read
	Transport string     `json:"transport,omitempty"`
	Caps      *rdmaCaps  `json:"caps,omitempty"`
	Ports     []rdmaPort `json:"ports,omitempty"`
	Netdevs   []netdev   `json:"netdevs,omitempty"`
}

// rdmaCaps are the limits of a device that decide what the provider does with it.
type rdmaCaps struct {
	Firmware     string   `json:"firmware,omitempty"`
	QueuePairs   int      `json:"queue_pairs"`
	Requests     int      `json:"requests_per_queue"`
	Elements     int      `json:"elements_per_request"`
	ReadElements int      `json:"elements_per_read"`
	Completions  int      `json:"completions_per_queue"`
	Vectors      int      `json:"completion_vectors"`
	ReadsOut     int      `json:"reads_out"` // RDMA reads that a queue pair issues at a time
	ReadsIn      int      `json:"reads_in"`  // RDMA reads that it serves at a time
	Regions      int      `json:"memory_regions"`
	RegionBytes  uint64   `json:"memory_region_bytes"`
	Windows      int      `json:"memory_windows"`
	WindowTypes  []string `json:"memory_window_types,omitempty"`
}

type rdmaPort struct {
	Num       int    `json:"num"`
	State     string `json:"state"`
	LinkLayer string `json:"link_layer"`
	MTU       int    `json:"mtu"` // bytes, of the packets in use
	GIDs      []gid  `json:"gids,omitempty"`
	Error     string `json:"error,omitempty"`

	// Losses are the port's counters of packets that were lost or repeated. On a network that should
	// lose none they should not grow. Not every device counts all of them.
	Losses map[string]uint64 `json:"losses,omitempty"`
}

type gid struct {
	Index  int    `json:"index"`
	GID    string `json:"gid"`
	Addr   string `json:"addr,omitempty"` // for RoCE: the GID as an IP address
	Type   string `json:"type"`
	Netdev string `json:"netdev,omitempty"`
}

type netdev struct {
	Name      string   `json:"name"`
	Up        bool     `json:"up"`
	MTU       int      `json:"mtu"`
	Addresses []string `json:"addresses"`
}

// usable reports whether connections can go through the device.
func (d *rdmaDevice) usable() bool {
	addressed := false
	for _, n := range d.Netdevs {
		addressed = addressed || n.Up && len(n.Addresses) > 0
	}
	return addressed && d.active("")
}

// bare reports whether connections can go through the device, but only without rdma_cm: InfiniBand
// without IPoIB.
func (d *rdmaDevice) bare() bool {
	return len(d.Netdevs) == 0 && d.active(ibv.LinkInfiniBand.String())
}

// active reports whether a port is active. If layer is not empty, only ports of that link layer count.
func (d *rdmaDevice) active(layer string) bool {
	return d.Error == "" && slices.ContainsFunc(d.Ports, func(p rdmaPort) bool {
		return p.State == ibv.PortActive.String() && (layer == "" || p.LinkLayer == layer)
	})
}

// rdmaDevices merges the kernel's devices with those that libibverbs lists: in containers,
// or if packages are missing, the lists differ.
func rdmaDevices() []rdmaDevice {
	all := kernelDevices()
	listed, _ := ibv.Devices() // an error shows in Libraries, or as an empty list
	for _, l := range listed {
		i := 0
		for i < len(all) && all[i].Name != l.Name {
			i++
		}
		if i == len(all) {
			all = append(all, rdmaDevice{Name: l.Name})
		}
		all[i].Listed = true
		all[i].Transport = l.Transport.String()
	}
	for i := range all {
		if all[i].Listed {
			all[i].Error = text(all[i].ask())
		} else {
			all[i].Error = "libibverbs does not list it"
		}
		all[i].Netdevs = netdevsOf(all[i].Name)
	}
	return all
}

// lossCounters are files of a port's hw_counters in sysfs, by the names that the drivers
// give them (drivers/infiniband: hw/mlx5/counters.c, hw/bnxt_re/hw_counters.c,
// hw/irdma/verbs.c, sw/rxe/rxe_hw_counters.c).
var lossCounters = [...]string{
	"local_ack_timeout_err", "out_of_sequence", "packet_seq_err", "rnr_nak_retry_err", // mlx5
	"to_retransmits", "seq_err_naks_rcvd", "rnr_naks_rcvd", "max_retry_exceeded", // bnxt_re
	"tcpRetransSegs",                                                                                  // irdma and cxgb4: iWARP
	"completer_retry_err", "out_of_seq_request", "rcvd_seq_err", "rcvd_rnr_err", "retry_exceeded_err", // rxe
}

// lossesOf reads these counters in a port's folder.
func lossesOf(port string) map[string]uint64 {
	losses := make(map[string]uint64)
	for _, name := range lossCounters {
		b, err := os.ReadFile(filepath.Join(port, "hw_counters", name))
		if err != nil {
			continue // the device does not have this counter
		}
		if n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64); err == nil {
			losses[name] = n
		}
	}
	return losses
}

// ask opens the device and fills in its attributes.
func (d *rdmaDevice) ask() error {
	c, err := ibv.Open(d.Name)
	if err != nil {
		return err
	}
	defer c.Close()
	caps, err := c.Caps()
	if err != nil {
		return err
	}
	d.Caps = &rdmaCaps{
		Firmware:   caps.Firmware,
		QueuePairs: caps.MaxQP, Requests: caps.MaxQPWR, Elements: caps.MaxSGE, ReadElements: caps.MaxSGERead,
		Completions: caps.MaxCQE, Vectors: c.CompVectors,
		ReadsOut: caps.MaxQPInitiatorRead, ReadsIn: caps.MaxQPReadAtomic,
		Regions: caps.MaxMR, RegionBytes: caps.MaxMRSize,
		Windows: caps.MaxMW, WindowTypes: windowTypes(caps.Flags),
	}
	for num := 1; num <= caps.Ports; num++ {
		p, err := c.Port(num)
		if err != nil {
			d.Ports = append(d.Ports, rdmaPort{Num: num, Error: text(err)})
			continue
		}
		gids, err := c.GIDs(num)
		port := rdmaPort{
			Num: num, State: p.State.String(), LinkLayer: p.LinkLayer.String(), MTU: p.ActiveMTU.Bytes(), Error: text(err),
			Losses: lossesOf(filepath.Join(rdmamap.RdmaClassDir, d.Name, "ports", strconv.Itoa(num))),
		}
		for _, g := range gids {
			line := gid{Index: g.Index, GID: g.GID.String(), Type: g.Type.String()}
			switch {
			case c.Transport == ibv.TransportIWARP:
				line.Type = c.Transport.String()
			case g.Type == ibv.GIDTypeRoCEv1, g.Type == ibv.GIDTypeRoCEv2:
				line.Addr = g.GID.Addr().String()
			}
			if ifi, err := net.InterfaceByIndex(g.Netdev); err == nil && g.Netdev != 0 {
				line.Netdev = ifi.Name
			}
			port.GIDs = append(port.GIDs, line)
		}
		d.Ports = append(d.Ports, port)
	}
	return nil
}

// netdevsOf returns the network interfaces of a device, with their addresses.
func netdevsOf(device string) (list []netdev) {
	ifis, _ := net.Interfaces()
	for _, ifi := range ifis {
		if deviceOf(ifi.Name) != device {
			continue
		}
		n := netdev{Name: ifi.Name, Up: ifi.Flags&net.FlagUp != 0, MTU: ifi.MTU}
		addrs, _ := ifi.Addrs()
		for _, a := range addrs {
			n.Addresses = append(n.Addresses, a.String())
		}
		list = append(list, n)
	}
	return list
}

// windowTypes returns the types of memory windows that a device claims to have.
func windowTypes(flags ibv.CapFlags) (types []string) {
	for _, t := range []struct {
		flag ibv.CapFlags
		name string
	}{{ibv.CapMemWindow, "1"}, {ibv.CapMemWindow2A, "2A"}, {ibv.CapMemWindow2B, "2B"}} {
		if flags&t.flag != 0 {
			types = append(types, t.name)
		}
	}
	return types
}
