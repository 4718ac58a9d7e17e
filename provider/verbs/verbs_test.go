package verbs

import (
	"context"
	"errors"
	"net/netip"
	"syscall"
	"testing"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/session"
)

// Without a device every way in says why, at once.
func TestWithoutDevices(t *testing.T) {
	testenv.NeedNoDevice(t)
	at := netip.MustParseAddrPort("192.0.2.1:80")
	if Serves(at.Addr(), Config{}) {
		t.Error("a destination is served")
	}
	if _, err := Dial(context.Background(), netip.AddrPort{}, at, Config{}); reasonOf(err) == session.ReasonNone {
		t.Errorf("Dial: %v", err)
	}
	for _, a := range []string{"0.0.0.0:8123", "127.0.0.1:8123", "[::]:8123"} {
		if _, err := Listen(netip.MustParseAddrPort(a), Config{}); reasonOf(err) == session.ReasonNone {
			t.Errorf("Listen on %s: %v", a, err)
		}
		l, err := Listen(netip.MustParseAddrPort(a), Config{WithoutCM: true})
		if err == nil {
			l.Close()
		}
		if why := reasonOf(err); why != session.ReasonNotServed && why != session.ReasonNoProvider {
			t.Errorf("Listen on %s without rdma_cm: %v", a, err)
		}
	}
}

// Who comes first leaves something for those that come later. No device is needed
// for it.
func TestAllocLeavesRoom(t *testing.T) {
	left := func() int { return int(regcache.DefaultArena().Left()) }
	var e Endpoint
	var all [][]byte
	before := left()
	for size := 4 << 20; size > freely; size /= 2 {
		for b := e.mem.Alloc(size); b != nil; b = e.mem.Alloc(size) {
			all = append(all, b)
			if left() < (arenaShare-1)*size {
				t.Fatalf("%d bytes of %d are left after box %d, of %d", left(), before, len(all), size)
			}
		}
	}
	if want := before >> 22; len(all) < want {
		t.Errorf("%d boxes of %d bytes, want %d", len(all), before, want)
	}
	for _, b := range all {
		e.mem.Free(b)
	}
	if left() != before {
		t.Errorf("%d bytes left, %d before", left(), before)
	}
}

func TestHello(t *testing.T) {
	want := privateData{version: 7, refusal: refusedSubnet}
	// rdma_cm fills private data up with zeros.
	if got, ours := parsePrivateData(append(want.bytes(), make([]byte, 44)...)); !ours || got != want {
		t.Errorf("%+v, %v; want %+v", got, ours, want)
	}
	for _, b := range [][]byte{nil, make([]byte, 56), want.bytes()[:privateLen-1]} {
		if _, ours := parsePrivateData(b); ours {
			t.Errorf("%x is taken for ours", b)
		}
	}
}

// What the results of connecting mean: refused where TCP would be refused too,
// otherwise why there is no SAN.
func TestMeaningOfResults(t *testing.T) {
	private := func(r refusal, version uint16) ibv.ConnParam {
		return ibv.ConnParam{PrivateData: privateData{version, r}.bytes()}
	}
	refused := -int(syscall.ECONNREFUSED)
	reset := -int(syscall.ECONNRESET)
	for _, tt := range []struct {
		name string
		ev   ibv.Event
		want session.Reason // ReasonNone: ECONNREFUSED
	}{
		{"our backlog, RoCE", ibv.Event{Type: ibv.Rejected, Status: 28, Param: private(refusedBacklog, protocolVersion)}, session.ReasonNone},
		{"our backlog, iWARP", ibv.Event{Type: ibv.Rejected, Status: reset, Param: private(refusedBacklog, protocolVersion)}, session.ReasonNone},
		{"other version", ibv.Event{Type: ibv.Rejected, Status: 28, Param: private(refusedVersion, protocolVersion+1)}, session.ReasonVersion},
		{"no resources", ibv.Event{Type: ibv.Rejected, Status: 28, Param: private(refusedResources, protocolVersion)}, session.ReasonResources},
		{"not from here", ibv.Event{Type: ibv.Rejected, Status: 28, Param: private(refusedSubnet, protocolVersion)}, session.ReasonPermission},
		{"a foreign program", ibv.Event{Type: ibv.Rejected, Status: 28}, session.ReasonProtocol},
		{"a foreign program, iWARP", ibv.Event{Type: ibv.Rejected, Status: reset}, session.ReasonProtocol},
		{"nobody, RoCE", ibv.Event{Type: ibv.Rejected, Status: ibNoListener}, session.ReasonNoListener},
		{"nobody, iWARP", ibv.Event{Type: ibv.Rejected, Status: refused}, session.ReasonNoListener},
		{"silence", ibv.Event{Type: ibv.Unreachable, Status: -int(syscall.ETIMEDOUT)}, session.ReasonTimeout},
		{"no neighbour", ibv.Event{Type: ibv.AddrError, Status: -int(syscall.EHOSTUNREACH)}, session.ReasonUnreachable},
		{"no path", ibv.Event{Type: ibv.RouteError, Status: -int(syscall.ETIMEDOUT)}, session.ReasonUnreachable},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := eventError(tt.ev)
			if got := reasonOf(err); got != tt.want {
				t.Errorf("%v (%v), want %v", got, err, tt.want)
			}
			if tt.want == session.ReasonNone && !errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("%v, want ECONNREFUSED", err)
			}
		})
	}
	// The call's own ECONNREFUSED (siw) says nothing about TCP's port.
	if err := callError(&ibv.Error{Verb: "rdma_connect", Errno: syscall.ECONNREFUSED}); reasonOf(err) != session.ReasonNoListener || errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("%v", err)
	}
}

// Every port that a program may listen on has a port of its own on iWARP.
func TestIWARPPorts(t *testing.T) {
	cfg := Config{}.withDefaults()
	seen := make(map[uint16]uint16)
	for p := 1024; p < 1<<16; p++ {
		q := cfg.iwarpPort(uint16(p))
		if q < 1024 || q == uint16(p) {
			t.Fatalf("port %d has %d", p, q)
		}
		if other, taken := seen[q]; taken {
			t.Fatalf("ports %d and %d both have %d", p, other, q)
		}
		seen[q] = uint16(p)
	}
	if q := cfg.iwarpPort(80); q != 10080 {
		t.Errorf("port 80 has %d", q)
	}
	if q := (Config{IWARPOffset: -1}).withDefaults().iwarpPort(80); q != 0 {
		t.Errorf("switched off, port 80 has %d", q)
	}
}

func TestFIFO(t *testing.T) {
	q := newFIFO[int](3)
	next := 0
	for i := range 100 {
		q.push(i)
		if q.n == 3 || i%2 == 0 {
			if got := q.pop(); got != next {
				t.Fatalf("%d, want %d", got, next)
			}
			next++
		}
	}
}

// A connect request that is taken while its channel's last id goes is not adopted: the
// channel is about to be destroyed, and there may be another.
func TestRequestOfAnEndingChannel(t *testing.T) {
	ending, fresh := new(ibv.EventChannel), new(ibv.EventChannel)
	for _, h := range []*cmHub{{}, {users: 1, channel: fresh}} {
		users := h.users
		if l := h.adopt(new(ibv.ID), ending); l != nil || h.users != users {
			t.Errorf("adopted, with %d users", users)
		}
	}
	if h := (&cmHub{users: 1, channel: fresh}); h.adopt(new(ibv.ID), fresh) == nil || h.users != 2 {
		t.Error("not adopted")
	}
}

// What a connection of a group brings along fills what the arena gives for it.
func TestShareFillsItsMemory(t *testing.T) {
	c := Config{}.withDefaults()
	const size = 1 << 20
	arena := regcache.NewArena(size, size)
	n := 0
	for ; n <= size; n++ {
		if _, err := arena.Get(srqShare * c.BufferSize); err != nil {
			break
		}
	}
	if want := size / (srqShare * c.BufferSize); n != want || want == 0 {
		t.Errorf("%d shares of %d bytes in %d bytes, want %d", n, srqShare*c.BufferSize, size, want)
	}
}
