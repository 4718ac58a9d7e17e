//go:build linux && cgo

package ibv

import (
	"errors"
	"syscall"
	"testing"
)

func TestADeviceHasItsAttributes(t *testing.T) {
	s := onSite(t)
	devices := must(Devices())(t)
	for end, name := range s.devices {
		var found *Device
		for i := range devices {
			if devices[i].Name == name {
				found = &devices[i]
			}
		}
		if found == nil {
			t.Fatalf("%s is not among %v", name, devices)
		}
		if (found.Transport == TransportIWARP) != s.isIWARP || found.Sysfs == "" || found.GUID == 0 {
			t.Errorf("%+v", *found)
		}
		ctx := must(Open(name))(t)
		atEnd(t, "device", ctx)
		caps := must(ctx.Caps())(t)
		if caps.Ports != 1 || caps.MaxSGE < 1 || caps.MaxSGERead < 1 || caps.MaxQP < 1 || caps.MaxQPReadAtomic < 1 {
			t.Errorf("caps: %+v", caps)
		}
		if (caps.MaxMW > 0) != s.windows {
			t.Errorf("%d memory windows", caps.MaxMW)
		}
		p := must(ctx.Port(1))(t)
		if p.State != PortActive || p.LinkLayer != LinkEthernet || p.GIDs < 1 || p.ActiveMTU < 1 {
			t.Errorf("port: %+v", p)
		}
		gids := must(ctx.GIDs(1))(t)
		t.Logf("%s: %+v %+v %v", name, caps, p, gids)
		if s.isIWARP {
			continue
		}
		if _, ok := rocev2(gids, s, end); !ok {
			t.Errorf("no RoCE v2 GID of %v in %v", s.v4[end], gids)
		}
	}
	if _, err := Open("nosuch"); !errors.Is(err, syscall.ENODEV) {
		t.Errorf("Open of a device that is not there: %v", err)
	}
	ctx := must(Open(s.devices[0]))(t)
	atEnd(t, "device", ctx)
	if _, err := ctx.Port(7); err == nil {
		t.Error("there is a port 7")
	}
}

func rocev2(gids []GIDEntry, s site, end int) (GIDEntry, bool) {
	for _, g := range gids {
		if g.Type == GIDTypeRoCEv2 && g.GID.Addr() == s.v4[end] {
			return g, true
		}
	}
	return GIDEntry{}, false
}
