package verbs

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/sanconn/san/internal/testenv"
)

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
		device, err := ServedBy(netip.MustParseAddr(c.dst), c.cfg)
		if device != "" || err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %q, %v; want an error with %q", c.dst, device, err, c.want)
		}
		if Serves(netip.MustParseAddr(c.dst), c.cfg) {
			t.Errorf("%s is served all the same", c.dst)
		}
	}
}

func TestServedByWithoutDevices(t *testing.T) {
	testenv.NeedNoDevice(t)
	if device, err := ServedBy(netip.MustParseAddr("192.0.2.1"), Config{}); device != "" || err != errNoDevice {
		t.Errorf("%q, %v", device, err)
	}
}

func TestServedByNamesTheDeviceOfTheRoute(t *testing.T) {
	_, there := cable(t)
	device, err := ServedBy(there, Config{})
	if err != nil || !strings.HasPrefix(device, testenv.Device()) {
		t.Errorf("%v is served by %q, %v; want a device of %s", there, device, err, testenv.Device())
	}
}
