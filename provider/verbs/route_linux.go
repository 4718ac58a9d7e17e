package verbs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/Mellanox/rdmamap"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/internal/rdmalink"
)

// rdmaDevices remembers which network interfaces have an RDMA device. To find that out takes reading
// some hundreds of files in sysfs for each device, however many interfaces there are.
var rdmaDevices struct {
	mu    sync.Mutex
	at    time.Time         // guarded by mu
	names map[string]string // by interface; guarded by mu
}

// deviceAge is how long rdmaDevices is valid.
const deviceAge = 2 * time.Second

// DeviceOf returns the name of the RDMA device of a network interface, or "" if it has none.
func DeviceOf(netdev string) string {
	devices, _ := devicesByInterface()
	return devices[netdev]
}

// devicesByInterface returns what DeviceOf returns for all interfaces. If there is an error, interfaces
// that are not in the map may have a device. The map must not be changed.
func devicesByInterface() (names map[string]string, err error) {
	if rdmalink.Simulated != nil {
		return rdmalink.Simulated, nil
	}
	r := &rdmaDevices
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.names != nil && time.Since(r.at) <= deviceAge {
		return r.names, nil
	}
	err = searched(func() (err error) {
		names, err = devicesOf(net.Interfaces, rdmamap.RdmaClassDir)
		return err
	})
	if err == nil {
		r.names, r.at = names, time.Now() // the search may have taken longer than deviceAge
	}
	return names, err
}

// devicesOf decides on Ethernet by the interfaces of the GIDs; on InfiniBand by rdmamap, which knows
// the device's GUID, and by the ports' GIDs, because ports may have GUIDs of their own. An iWARP device
// has one GID, its hardware address; kernels before 6.6 do not show its interface. rdmamap would read
// all GIDs for each interface, of which nodes of containers have hundreds. So it is not used if the
// first GID of each port has an interface.
func devicesOf(list func() ([]net.Interface, error), sysfs string) (names map[string]string, err error) {
	names = make(map[string]string)
	gids, all := make(map[ibv.GID]string), true
	for _, port := range glob(sysfs, "*", "ports", "*") {
		device := filepath.Base(filepath.Dir(filepath.Dir(port)))
		named := false // the first GID's interface was found
		for _, file := range glob(port, "gid_attrs", "ndevs", "*") {
			if netdev := contents(file); netdev != "" { // unused GIDs have none
				names[netdev] = cmp.Or(names[netdev], device)
				named = named || filepath.Base(file) == "0"
			}
		}
		if named {
			continue
		}
		all = false
		for _, file := range glob(port, "gids", "*") {
			if a, err := netip.ParseAddr(contents(file)); err == nil && !a.IsUnspecified() {
				gids[a.As16()] = device
			}
		}
	}
	if all {
		return names, nil
	}
	ifis, err := list()
	for _, ifi := range ifis {
		if names[ifi.Name] != "" {
			continue
		}
		gid, name := portGID(ifi.HardwareAddr), ""
		if len(ifi.HardwareAddr) == macLen {
			copy(gid[:], ifi.HardwareAddr)
		} else if gid != (ibv.GID{}) {
			name, _ = rdmamap.GetRdmaDeviceForNetdevice(ifi.Name)
		}
		if name = cmp.Or(name, gids[gid]); name != "" {
			names[ifi.Name] = name
		}
	}
	return names, err
}

const macLen = 6 // length of a hardware address on Ethernet

func glob(path ...string) []string {
	files, _ := filepath.Glob(filepath.Join(path...))
	return files
}

// contents returns the contents of a file in sysfs, or "" if it cannot be read.
func contents(file string) string {
	b, _ := os.ReadFile(file)
	return strings.TrimSpace(string(b))
}

// Route is what decides, besides the destination, by which interface a socket's packets leave. Hosts
// with several rails set this up by source rules, marks and VRFs.
type Route struct {
	Source    netip.Addr // the local address; zero: not bound
	Interface string     // SO_BINDTODEVICE, perhaps a VRF; "": not bound
	Mark      uint32     // SO_MARK
}

// ServedBy returns the RDMA device of the interface by which a socket's route to dst leaves (rule C3),
// or why there is none. The kernel's answer takes microseconds.
func ServedBy(dst netip.Addr, from Route, cfg Config) (device string, err error) {
	cfg = cfg.withDefaults()
	dst = dst.Unmap()
	switch {
	case !cfg.allows(dst):
		return "", fmt.Errorf("verbs: %v is not among the subnets allowed", dst)
	case dst.IsLoopback() && !rdmalink.Loopback(), dst.IsMulticast():
		return "", fmt.Errorf("verbs: %v is a loopback or multicast address", dst)
	case !HaveDevices():
		return "", errNoDevice
	}
	name, err := from.leavesBy(dst)
	if err != nil {
		return "", err
	}
	if device = DeviceOf(name); device == "" && cfg.WithoutCM {
		device = bareDevice()
	}
	if device == "" {
		return "", cmp.Or(cannotLook(), fmt.Errorf("verbs: the route to %v leaves by %s, which has no RDMA device", dst, name))
	}
	return device, nil
}

// leavesBy returns the interface of the route to dst.
func (r Route) leavesBy(dst netip.Addr) (string, error) {
	if zone := dst.Zone(); zone != "" {
		return zone, nil
	}
	how := &netlink.RouteGetOptions{Mark: r.Mark, Oif: r.Interface}
	if r.Source.IsValid() && !r.Source.IsUnspecified() {
		how.SrcAddr = net.IP(r.Source.Unmap().AsSlice())
	}
	routes, err := netlink.RouteGetWithOptions(net.IP(dst.AsSlice()), how)
	if err != nil {
		return "", fmt.Errorf("verbs: no route to %v: %w", dst, err)
	}
	if len(routes) == 0 {
		return "", fmt.Errorf("verbs: no route to %v", dst)
	}
	ifi, err := interfaceByIndex(routes[0].LinkIndex)
	if err != nil {
		return "", err
	}
	return ifi.Name, nil
}

var errNoDevice = errors.New("verbs: this host has no RDMA device")

// HaveDevices reports whether this host has an RDMA device, or that cannot be determined, as without
// descriptors. It is fast if there is none.
func HaveDevices() bool {
	devices, err := os.ReadDir(rdmamap.RdmaClassDir)
	return len(rdmalink.Simulated)+len(devices) > 0 || err != nil && !errors.Is(err, fs.ErrNotExist)
}

// servedAddresses returns this host's addresses that belong to an RDMA device, of the families that the
// unspecified address within stands for.
func servedAddresses(within netip.Addr, v6only bool) (list []netip.Addr, err error) {
	if !HaveDevices() {
		return nil, nil
	}
	devices, err := devicesByInterface()
	if err != nil {
		return nil, err
	}
	up := make(map[int]string) // the interfaces of these addresses, by index
	for name := range devices {
		switch ifi, err := interfaceByName(name); {
		case errors.As(err, new(netlink.LinkNotFoundError)): // the interface has gone
		case err != nil:
			return nil, err
		case ifi.Flags&net.FlagUp != 0 && (ifi.Flags&net.FlagLoopback == 0 || rdmalink.Loopback()):
			up[ifi.Index] = name
		}
	}
	addrs, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) { // a change has interrupted the list; watchAddresses reports it
		return nil, err
	}
	for _, a := range addrs {
		ip, _ := netip.AddrFromSlice(a.IP)
		ip = ip.Unmap()
		if up[a.LinkIndex] == "" || within.Is4() && !ip.Is4() || v6only && ip.Is4() {
			continue
		}
		if ip.IsLinkLocalUnicast() && ip.Is6() {
			ip = ip.WithZone(up[a.LinkIndex])
		}
		list = append(list, ip)
	}
	return list, cannotLook()
}

// watchAddresses sends after addresses or interfaces have come or gone, until ctx ends.
func watchAddresses(ctx context.Context) (<-chan struct{}, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	const groups = unix.RTMGRP_IPV4_IFADDR | unix.RTMGRP_IPV6_IFADDR | unix.RTMGRP_LINK
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: groups}); err != nil {
		unix.Close(fd)
		return nil, os.NewSyscallError("bind", err)
	}
	socket := os.NewFile(uintptr(fd), "netlink")
	context.AfterFunc(ctx, func() { socket.Close() })
	changed := make(chan struct{}, 1)
	go func() { // ends with ctx
		defer close(changed)
		buf := make([]byte, 16<<10)
		for {
			// The content does not matter, nor does it that some messages were lost (ENOBUFS).
			if _, err := socket.Read(buf); err != nil && !errors.Is(err, unix.ENOBUFS) {
				return
			}
			rdmaDevices.mu.Lock()
			rdmaDevices.names = nil
			rdmaDevices.mu.Unlock()
			select {
			case changed <- struct{}{}:
			default:
			}
		}
	}()
	return changed, nil
}
