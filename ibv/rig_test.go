//go:build linux && cgo

package ibv

import (
	"bytes"
	"fmt"
	"net/netip"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/test/hwsim"
)

// site is what the lane has set up: see test/guest/run -h.
type site struct {
	devices  [2]string
	netdevs  [2]string
	v4, v6   [2]netip.Addr
	isIWARP  bool
	windows  bool
	withImm  bool
	directQP bool // connects without rdma_cm
}

var sites = map[string]site{
	"rxe": {
		devices: [2]string{"rxe1", "rxe2"}, netdevs: [2]string{"ve1", "ve2"},
		v4:      [2]netip.Addr{netip.MustParseAddr("10.8.0.1"), netip.MustParseAddr("10.8.0.2")},
		v6:      [2]netip.Addr{netip.MustParseAddr("fd08::1"), netip.MustParseAddr("fd08::2")},
		windows: true, withImm: true, directQP: true,
	},
	"siw": {
		devices: [2]string{"siw1", "siw2"}, netdevs: [2]string{"wi1", "wi2"},
		v4:      [2]netip.Addr{netip.MustParseAddr("10.8.1.1"), netip.MustParseAddr("10.8.1.2")},
		v6:      [2]netip.Addr{netip.MustParseAddr("fd08:1::1"), netip.MustParseAddr("fd08:1::2")},
		isIWARP: true,
	},
	hwsim.Lane: {
		devices: [2]string{hwsim.Device, hwsim.Device}, netdevs: [2]string{"lo", "lo"},
		v4:      [2]netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.0.0.1")},
		v6:      [2]netip.Addr{netip.IPv6Loopback(), netip.IPv6Loopback()},
		windows: true, withImm: true, directQP: true,
	},
}

const (
	patience = 30 * time.Second // for everything that should happen, on an emulated guest
	port     = 7777
	bufSize  = 1 << 20
)

// onSite is for tests that need a device. At the end of the test it also checks that neither the kernel
// nor this package has more objects than before.
func onSite(t *testing.T) site {
	t.Helper()
	device := testenv.NeedDevice(t)
	s, ok := sites[device]
	if !ok {
		t.Fatalf("SAN_TEST_RDMA=%s: no such device", testenv.Device())
	}
	if _, err := Devices(); err != nil {
		t.Fatal(err)
	}
	left := func() string { return fmt.Sprintf("%s; %d registered here", resources(t), registered()) }
	before := left()
	t.Cleanup(func() {
		if t.Failed() {
			return // what a failed test has left explains nothing
		}
		// The kernel frees ids of the connection manager in the background.
		testenv.Eventually(t, patience, func() error {
			if after := left(); after != before {
				return fmt.Errorf("leaked:\nbefore %s\nafter  %s", before, after)
			}
			return nil
		})
	})
	return s
}

// registered returns the number of objects that may have events.
func registered() int {
	objects.mu.RLock()
	defer objects.mu.RUnlock()
	return len(objects.m)
}

// resources returns the kernel's counts of this site's objects. Open devices are left out, because
// librdmacm keeps them, with a protection domain in each.
func resources(t *testing.T) string {
	t.Helper()
	if testenv.Device() == hwsim.Lane {
		return fmt.Sprint(hwsim.Objects(t))
	}
	out, err := exec.Command("rdma", "resource", "show").CombinedOutput()
	if err != nil {
		t.Fatalf("rdma resource show: %v\n%s", err, out)
	}
	counts := regexp.MustCompile(`\b(cq|qp|cm_id|mr) \d+`)
	var s strings.Builder
	for _, line := range strings.Split(string(out), "\n") {
		s.WriteString(strings.Join(counts.FindAllString(line, -1), " ") + "; ")
	}
	return s.String()
}

// atEnd closes c at the end of the test, in reverse order, which must succeed.
func atEnd(t *testing.T, what string, c interface{ Close() error }) {
	t.Helper()
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Errorf("close %s: %v", what, err)
		}
	})
}

func must[T any](v T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// end is one end of a connection with everything that it needs.
type end struct {
	id   *ID
	pd   *PD
	ch   *CompChannel
	cq   *CQ
	qp   *QP
	mr   *MR
	buf  []byte
	left []WC // completions not yet returned by completion
}

type options struct {
	access     Access // of the registered buffers, in addition to LocalWrite
	inline     uint32
	private    []byte // of the request
	reply      []byte // of Accept
	v6         bool
	ackTimeout uint8
}

// equip makes the queues and memory of an end on ctx, and with id its queue pair.
func equip(t *testing.T, ctx *Context, id *ID, o options) *end {
	t.Helper()
	e := &end{id: id}
	e.pd = must(ctx.AllocPD())(t)
	atEnd(t, "PD", e.pd)
	e.ch = must(ctx.CreateCompChannel())(t)
	atEnd(t, "completion channel", e.ch)
	e.cq = must(ctx.CreateCQ(512, e.ch, 0))(t)
	atEnd(t, "CQ", e.cq)
	buf, err := syscall.Mmap(-1, 0, bufSize, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	check(t, err)
	e.buf = buf
	t.Cleanup(func() { syscall.Munmap(buf) })
	e.mr = must(e.pd.RegMR(addrOf(buf), len(buf), LocalWrite|o.access))(t)
	atEnd(t, "MR", e.mr)
	cfg := QPConfig{PD: e.pd, SendCQ: e.cq, RecvCQ: e.cq, Cap: QPCap{SendWR: 128, RecvWR: 128, InlineData: o.inline}}
	e.qp = must(CreateQP(cfg))(t)
	atEnd(t, "QP", e.qp)
	if id != nil {
		check(t, id.UseQP(e.qp))
	}
	return e
}

func addrOf(b []byte) uintptr { return uintptr(unsafe.Pointer(&b[0])) }

// sge returns n bytes of the end's buffer at an offset.
func (e *end) sge(off, n int) SGE {
	return SGE{Addr: uint64(addrOf(e.buf)) + uint64(off), Length: uint32(n), LKey: e.mr.LKey}
}

func (e *end) remote(off int) uint64 { return uint64(addrOf(e.buf)) + uint64(off) }

func (e *end) postRecv(t *testing.T, id uint64, off, n int) {
	t.Helper()
	wrs := []RecvWR{{ID: id, SGE: e.sge(off, n)}}
	if n, err := e.qp.PostRecv(wrs); n != 1 || err != nil {
		t.Fatalf("PostRecv: %d, %v", n, err)
	}
}

func (e *end) postSend(t *testing.T, wrs ...SendWR) {
	t.Helper()
	if n, err := e.qp.PostSend(wrs); n != len(wrs) || err != nil {
		t.Fatalf("PostSend of %d: %d, %v", len(wrs), n, err)
	}
}

// completion returns the completion with the given id; others are kept for later.
func (e *end) completion(t *testing.T, id uint64) (found WC) {
	t.Helper()
	testenv.Eventually(t, patience, func() error {
		var wcs [16]WC
		n, err := e.cq.Poll(wcs[:])
		check(t, err)
		e.left = append(e.left, wcs[:n]...)
		i := slices.IndexFunc(e.left, func(wc WC) bool { return wc.ID == id })
		if i < 0 {
			return fmt.Errorf("no completion %d; there are %v", id, e.left)
		}
		found = e.left[i]
		e.left = slices.Delete(e.left, i, i+1)
		return nil
	})
	return found
}

// succeed waits for the completion with that id, which must be successful.
func (e *end) succeed(t *testing.T, id uint64) WC {
	t.Helper()
	wc := e.completion(t, id)
	if wc.Status != Success {
		t.Fatalf("work request %d: %v (vendor %#x)", id, wc.Status, wc.VendorErr)
	}
	return wc
}

func (e *end) state(t *testing.T) QPState {
	t.Helper()
	return must(e.qp.Query(MaskState))(t).State
}

func newChannel(t *testing.T) *EventChannel {
	t.Helper()
	ch := must(NewEventChannel())(t)
	atEnd(t, "event channel", ch)
	return ch
}

// event returns the channel's next event, which must be of the type.
func event(t *testing.T, ch *EventChannel, want EventType) Event {
	t.Helper()
	check(t, ch.SetDeadline(time.Now().Add(patience)))
	ev, err := ch.Event()
	if err != nil {
		t.Fatalf("waiting for %q: %v", want, err)
	}
	if ev.Type != want {
		t.Fatalf("event %q with status %d, want %q", ev.Type, ev.Status, want)
	}
	return ev
}

// asyncEvent returns the next event of the type. Others, from earlier or of other tests, are skipped.
func asyncEvent(t *testing.T, ch *AsyncChannel, want AsyncEventType) AsyncEvent {
	t.Helper()
	check(t, ch.poller.setDeadline(time.Now().Add(patience)))
	for {
		ev, err := ch.Event()
		if err != nil {
			t.Fatalf("waiting for %q: %v", want, err)
		}
		if ev.Type == want {
			return ev
		}
	}
}

func listen(t *testing.T, ch *EventChannel, addr netip.Addr) *ID {
	t.Helper()
	l := must(ch.NewID())(t)
	atEnd(t, "listener", l)
	check(t, l.Bind(netip.AddrPortFrom(addr, port)))
	check(t, l.Listen(16))
	return l
}

// resolve makes an id, and resolves address and route so that it can connect.
func resolve(t *testing.T, ch *EventChannel, to netip.Addr) *ID {
	t.Helper()
	id := must(ch.NewID())(t)
	atEnd(t, "dialer's id", id)
	check(t, id.ResolveAddr(netip.AddrPort{}, netip.AddrPortFrom(to, port), time.Second))
	event(t, ch, AddrResolved)
	check(t, id.ResolveRoute(time.Second))
	event(t, ch, RouteResolved)
	return id
}

var depths = ConnParam{ResponderResources: 4, InitiatorDepth: 4, RetryCount: 6}

// connect makes a connection from the site's first end to its second.
func connect(t *testing.T, s site, o options) (active, passive *end) {
	t.Helper()
	addrs := s.v4
	if o.v6 {
		addrs = s.v6
	}
	there, here := newChannel(t), newChannel(t)
	listen(t, there, addrs[1])
	id := resolve(t, here, addrs[1])
	active = equip(t, id.Context(), id, o)
	if o.ackTimeout != 0 {
		check(t, id.SetAckTimeout(o.ackTimeout))
	}

	request := depths
	request.PrivateData = o.private
	check(t, id.Connect(request))
	ev := event(t, there, ConnectRequest)
	atEnd(t, "accepted id", ev.ID)
	if got := ev.Param.PrivateData; !bytes.HasPrefix(got, o.private) {
		t.Errorf("the request's private data arrived as %q", got)
	}
	passive = equip(t, ev.ID.Context(), ev.ID, o)
	answer := depths
	answer.PrivateData = o.reply
	check(t, ev.ID.Accept(answer))
	// The dialer takes its event first: its library completes the connection then.
	ev = event(t, here, Established)
	if got := ev.Param.PrivateData; !bytes.HasPrefix(got, o.reply) {
		t.Errorf("the answer's private data arrived as %q", got)
	}
	event(t, there, Established)
	return active, passive
}

func fill(b []byte, seed byte) {
	for i := range b {
		b[i] = seed + byte(i*7)
	}
}

func sh(t *testing.T, format string, args ...any) {
	t.Helper()
	cmd := fmt.Sprintf(format, args...)
	if out, err := exec.Command("sh", "-c", cmd).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", cmd, err, out)
	}
}
