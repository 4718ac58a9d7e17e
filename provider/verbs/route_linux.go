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

// rdmaDevices remembers which network interfaces have an RDMA device. Finding
// out reads some dozens of files in sysfs.
var rdmaDevices struct {
	mu    sync.Mutex
	at    time.Time         // guarded by mu
	names map[string]string // by interface; "": none. Guarded by mu
}

// deviceAge is how long rdmaDevices is valid.
const deviceAge = 2 * time.Second

// DeviceOf is the name of the RDMA device of a network interface, "" if it has
// none.
func DeviceOf(netdev string) string {
	if rdmalink.Simulated != nil {
		return rdmalink.Simulated[netdev]
	}
	r := &rdmaDevices
	r.mu.Lock()
	defer r.mu.Unlock()
	if now := time.Now(); r.names == nil || now.Sub(r.at) > deviceAge {
		r.names, r.at = make(map[string]string), now
	}
	name, known := r.names[netdev]
	if !known {
		var sure bool
		if name, sure = search(func() string { return findDeviceOf(netdev) }); sure {
			r.names[netdev] = name
		}
	}
	return name
}

func findDeviceOf(netdev string) string {
	ifi, err := net.InterfaceByName(netdev)
	if err != nil {
		return ""
	}
	return findDevice(ifi, rdmamap.RdmaClassDir)
}

// findDevice uses rdmamap, which goes by the interfaces of the GIDs on Ethernet and by the
// device's GUID on InfiniBand, and then the GIDs of the ports in sysfs: on InfiniBand
// ports may have GUIDs of their own, and of an iWARP device's one GID, which is the
// hardware address, kernels before 6.6 do not show the interface.
func findDevice(ifi *net.Interface, sysfs string) string {
	if name, _ := rdmamap.GetRdmaDeviceForNetdevice(ifi.Name); name != "" {
		return name
	}
	gid, index := portGID(ifi.HardwareAddr), "*"
	if len(ifi.HardwareAddr) == macLen {
		copy(gid[:], ifi.HardwareAddr)
		index = "0"
	}
	if gid == (ibv.GID{}) {
		return ""
	}
	files, _ := filepath.Glob(filepath.Join(sysfs, "*", "ports", "*", "gids", index))
	for _, file := range files {
		if index == "0" && interfaceKnown(file) {
			continue // rdmamap has looked: this interface lies above that one
		}
		b, _ := os.ReadFile(file) // an error: nothing is there
		if a, err := netip.ParseAddr(strings.TrimSpace(string(b))); err == nil && a.As16() == gid {
			name, _ := filepath.Rel(sysfs, file)
			name, _, _ = strings.Cut(name, "/")
			return name
		}
	}
	return ""
}

const macLen = 6 // of Ethernet

// interfaceKnown reports whether the kernel names the interface of a GID in sysfs.
func interfaceKnown(gid string) bool {
	port := filepath.Dir(filepath.Dir(gid))
	b, err := os.ReadFile(filepath.Join(port, "gid_attrs", "ndevs", filepath.Base(gid)))
	return err == nil && len(b) > 0
}

// Route is what decides, besides the destination, by which interface a socket's packets
// leave. Hosts with several rails set this up by source rules, marks and VRFs.
type Route struct {
	Source    netip.Addr // the local address; zero: not bound
	Interface string     // SO_BINDTODEVICE, which may be a VRF's; "": not bound
	Mark      uint32     // SO_MARK
}

// ServedBy is the RDMA device of the interface by which a socket's route to dst leaves
// (rule C3), or why there is none. The kernel's answer takes microseconds.
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

// leavesBy is the interface of the route to dst.
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
	ifi, err := net.InterfaceByIndex(routes[0].LinkIndex)
	if err != nil {
		return "", err
	}
	return ifi.Name, nil
}

var errNoDevice = errors.New("verbs: this host has no RDMA device")

// HaveDevices reports whether this host has an RDMA device, or that cannot be looked up, as
// without descriptors. It is the quick answer where there is none.
func HaveDevices() bool {
	devices, err := os.ReadDir(rdmamap.RdmaClassDir)
	return len(rdmalink.Simulated)+len(devices) > 0 || err != nil && !errors.Is(err, fs.ErrNotExist)
}

// servedAddresses are the addresses of this host that belong to an RDMA device,
// of the families that the unspecified address within stands for.
func servedAddresses(within netip.Addr, v6only bool) (list []netip.Addr, err error) {
	if !HaveDevices() {
		return nil, nil
	}
	if err := cannotLook(); err != nil { // and again at the end: see search
		return nil, err
	}
	ifis, err := net.Interfaces()
	if err != nil {
		return nil, err
	}
	for _, ifi := range ifis {
		if ifi.Flags&net.FlagUp == 0 || ifi.Flags&net.FlagLoopback != 0 && !rdmalink.Loopback() || DeviceOf(ifi.Name) == "" {
			continue
		}
		addrs, err := ifi.Addrs()
		if err != nil {
			return nil, err
		}
		for _, a := range addrs {
			prefix, ok := a.(*net.IPNet)
			if !ok {
				continue
			}
			ip, _ := netip.AddrFromSlice(prefix.IP)
			ip = ip.Unmap()
			if within.Is4() && !ip.Is4() || v6only && ip.Is4() {
				continue
			}
			if ip.IsLinkLocalUnicast() && ip.Is6() {
				ip = ip.WithZone(ifi.Name)
			}
			list = append(list, ip)
		}
	}
	return list, cannotLook()
}

// watchAddresses sends after addresses or interfaces have come or gone, until
// ctx ends.
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
			// Its content does not matter, nor that some of it was lost (ENOBUFS).
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
