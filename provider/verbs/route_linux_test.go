package verbs

import (
	"fmt"
	"io/fs"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/rdmalink"
	"github.com/sanconn/san/internal/testenv"
)

// A device that the kernel does not know serves the interfaces that are set, loopback among them, and no
// file is opened for it.
func TestSimulatedDeviceServes(t *testing.T) {
	tried := tryNode
	tryNode = func(path string) error { return &fs.PathError{Op: "open", Path: path, Err: syscall.EACCES} }
	rdmalink.Simulated = map[string]string{"lo": "sim0"}
	t.Cleanup(func() { tryNode, rdmalink.Simulated = tried, nil })
	at := netip.MustParseAddr("127.0.0.1")
	if device, err := ServedBy(at, Route{}, Config{}); device != "sim0" || err != nil || !HaveDevices() {
		t.Errorf("%v is served by %q, %v", at, device, err)
	}
	if list, err := servedAddresses(netip.IPv4Unspecified(), false); !slices.Contains(list, at) || err != nil {
		t.Errorf("served are %v, %v", list, err)
	}
	if DeviceOf("eth0") != "" {
		t.Error("an interface that it was not said of has the device")
	}
	if err := nodesRefused(); err != nil {
		t.Error(err)
	}
}

func TestServedBySaysWhyNot(t *testing.T) {
	subnet := Config{Subnets: []netip.Prefix{netip.MustParsePrefix("10.8.0.0/16")}}
	for _, c := range []struct {
		dst  string
		cfg  Config
		want string
	}{
		{"127.0.0.1", Config{}, "loopback"},
		{"::1", Config{}, "loopback"},
		{"ff02::1", Config{}, "multicast"},
		{"192.0.2.1", subnet, "subnets"},
	} {
		device, err := ServedBy(netip.MustParseAddr(c.dst), Route{}, c.cfg)
		if device != "" || err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %q, %v; want an error with %q", c.dst, device, err, c.want)
		}
	}
}

func TestServedByWithoutDevices(t *testing.T) {
	testenv.NeedNoDevice(t)
	if device, err := ServedBy(netip.MustParseAddr("192.0.2.1"), Route{}, Config{}); device != "" || err != errNoDevice {
		t.Errorf("%q, %v", device, err)
	}
}

func TestServedByNamesTheDeviceOfTheRoute(t *testing.T) {
	_, there := cable(t)
	device, err := ServedBy(there, Route{}, Config{})
	if err != nil || !strings.HasPrefix(device, testenv.Device()) {
		t.Errorf("%v is served by %q, %v; want a device of %s", there, device, err, testenv.Device())
	}
}

// Two interfaces lead to the same destination. Which of them a socket's packets use depends on its
// address, its mark and its device.
func TestRouteOfTheSocket(t *testing.T) {
	inOwnNetwork(t, func() error {
		return script(`
			ip link add rail1 type veth peer far1 && ip link set far1 up && ip addr add 10.77.1.1/24 dev rail1 && ip link set rail1 up
			ip link add rail2 type veth peer far2 && ip link set far2 up && ip addr add 10.77.2.1/24 dev rail2 && ip link set rail2 up
			ip route add 10.78.0.0/16 dev rail1
			ip route add 10.78.0.0/16 dev rail2 table 100
			ip rule add from 10.77.2.1 table 100
			ip rule add fwmark 7 table 100
			ip rule add oif rail2 table 100`)
	}, func() {
		for _, c := range []struct {
			from Route
			want string
		}{
			{Route{}, "rail1"},
			{Route{Source: netip.MustParseAddr("0.0.0.0")}, "rail1"},
			{Route{Source: netip.MustParseAddr("10.77.1.1")}, "rail1"},
			{Route{Source: netip.MustParseAddr("::ffff:10.77.2.1")}, "rail2"},
			{Route{Mark: 7}, "rail2"},
			{Route{Interface: "rail2"}, "rail2"},
		} {
			if got, err := c.from.leavesBy(netip.MustParseAddr("10.78.0.1")); got != c.want {
				t.Errorf("%+v: by %q, %v; want %s", c.from, got, err, c.want)
			}
		}
	})
}

// inOwnNetwork calls setUp, and then test, on a thread in a network namespace of its own, which ends
// with the thread.
func inOwnNetwork(t *testing.T, setUp func() error, test func()) {
	t.Helper()
	failed := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked, so the thread ends with the goroutine
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			err = setUp()
		}
		if err == nil {
			test()
		}
		failed <- err
	}()
	if err := <-failed; err != nil {
		testenv.Missing(t, fmt.Sprintf("a network namespace with interfaces of its own: %v", err))
	}
}

// script runs shell commands in the namespaces of this thread.
func script(commands string) error {
	if out, err := exec.Command("sh", "-ec", commands).CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// writeFiles makes a tree of files with one line each.
func writeFiles(t *testing.T, root string, lines map[string]string) {
	t.Helper()
	for file, line := range lines {
		file = filepath.Join(root, file)
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(line+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// If the first GID of each port names an interface, the host's interfaces are not listed.
func TestDevicesByGIDsAlone(t *testing.T) {
	sysfs := t.TempDir()
	writeFiles(t, sysfs, map[string]string{
		"roce0/ports/1/gid_attrs/ndevs/0": "eth0",
		"roce0/ports/1/gid_attrs/ndevs/5": "eth0.7",
		"roce1/ports/1/gid_attrs/ndevs/0": "eth1",
	})
	want := map[string]string{"eth0": "roce0", "eth0.7": "roce0", "eth1": "roce1"}
	if got, err := devicesOf(nil, sysfs); err != nil || !maps.Equal(got, want) {
		t.Errorf("%v, %v", got, err)
	}
}

// On InfiniBand, an interface belongs to the device one of whose ports has the GID that is part of the
// interface's hardware address, whatever the device's own GUID. On iWARP it belongs to the device whose
// port has that address as its GID.
func TestDeviceOfAPortsGID(t *testing.T) {
	sysfs := t.TempDir()
	writeFiles(t, sysfs, map[string]string{
		"ib0/node_guid":        "0002:c903:0011:2200",
		"ib0/ports/1/gids/0":   "fe80:0000:0000:0000:0002:c903:0011:2201",
		"ib1/node_guid":        "0002:c903:0033:4400",
		"ib1/ports/1/gids/0":   "fe80:0000:0000:0000:0002:c903:0033:4401",
		"ib1/ports/2/gids/0":   "fe80:0000:0000:0000:0002:c903:0033:4402",
		"ib1/ports/2/gids/1":   "0000:0000:0000:0000:0000:0000:0000:0000",
		"roce0/ports/1/gids/0": "0000:0000:0000:0000:0000:ffff:0a00:0001",
		"iw0/ports/1/gids/0":   "0007:4300:0001:0000:0000:0000:0000:0000",
		"iw0/ports/2/gids/0":   "0007:4300:0002:0000:0000:0000:0000:0000",
		"iw1/ports/1/gids/0":   "0007:4300:0004:0000:0000:0000:0000:0000",

		"iw1/ports/1/gid_attrs/ndevs/0":   "eth4",
		"roce0/ports/1/gid_attrs/ndevs/3": "eth5",
	})
	const own = "80:00:02:08:" // the beginning of an interface's address: its queue pair
	for hardware, want := range map[string]string{
		own + "fe:80:00:00:00:00:00:00:00:02:c9:03:00:11:22:01": "ib0",
		own + "fe:80:00:00:00:00:00:00:00:02:c9:03:00:33:44:02": "ib1",
		own + "fe:80:00:00:00:00:00:00:00:02:c9:03:00:33:44:03": "",
		own + "00:00:00:00:00:00:00:00:00:00:00:00:00:00:00:00": "",
		"00:07:43:00:00:02": "iw0",
		"00:07:43:00:00:03": "",
		"00:07:43:00:00:04": "", // the interface of a bridge over eth4
		"00:00:00:00:00:00": "",
	} {
		mac, err := net.ParseMAC(hardware)
		if err != nil {
			t.Fatal(err)
		}
		list := func() ([]net.Interface, error) {
			return []net.Interface{{Name: "nothere", HardwareAddr: mac}, {Name: "eth4"}}, nil
		}
		if got, err := devicesOf(list, sysfs); err != nil || got["nothere"] != want || got["eth4"] != "iw1" || got["eth5"] != "roce0" {
			t.Errorf("%s: %q, %v, want %q", hardware, got, err, want)
		}
	}
}
