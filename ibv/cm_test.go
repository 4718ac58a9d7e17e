//go:build linux && cgo

package ibv

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/testenv"
)

func TestAConnectionHasItsAddressesAndDevices(t *testing.T) {
	s := onSite(t)
	for _, c := range []struct {
		name  string
		v6    bool
		addrs [2]netip.Addr
	}{{"IPv4", false, s.v4}, {"IPv6", true, s.v6}} {
		t.Run(c.name, func(t *testing.T) {
			a, b := connect(t, s, options{v6: c.v6, private: []byte("request"), reply: []byte("answer")})
			if l, r := a.id.LocalAddr(), a.id.RemoteAddr(); l.Addr() != c.addrs[0] || r != netip.AddrPortFrom(c.addrs[1], port) {
				t.Errorf("the dialer is at %v, its peer at %v", l, r)
			}
			if a.id.LocalAddr() != b.id.RemoteAddr() || b.id.LocalAddr().Addr() != c.addrs[1] {
				t.Errorf("the acceptor is at %v, its peer at %v", b.id.LocalAddr(), b.id.RemoteAddr())
			}
			for i, e := range []*end{a, b} {
				if ctx := e.id.Context(); ctx != e.pd.Context || ctx.Name != s.devices[i] {
					t.Errorf("end %d is on %v", i, ctx.Device)
				}
				if st := e.state(t); st != QPRTS {
					t.Errorf("end %d is in %v", i, st)
				}
			}
		})
	}
}

// rdma_cm leaves two times to the caller: that to an acknowledgement, which is set before connecting,
// and how long a peer waits for a receive, which is set afterwards.
func TestTimersAreSetBeforeAndAfterConnecting(t *testing.T) {
	s := onSite(t)
	a, b := connect(t, s, options{ackTimeout: 15})
	if s.isIWARP {
		return // TCP has its own times; only the setting of the options is tested
	}
	for _, e := range []*end{a, b} {
		check(t, e.qp.Modify(QPAttr{MinRNRTimer: 12}, MaskMinRNRTimer))
	}
	attr := must(a.qp.Query(MaskTimeout | MaskMinRNRTimer | MaskRNRRetry | MaskRetryCount))(t)
	if attr.Timeout != 15 || attr.MinRNRTimer != 12 || attr.RNRRetry != 0 || attr.RetryCount != 6 {
		t.Errorf("%+v", attr)
	}
}

func TestDisconnectFlushesBothEnds(t *testing.T) {
	s := onSite(t)
	a, b := connect(t, s, options{})
	b.postRecv(t, 1, 0, 64)
	check(t, a.id.Disconnect())
	event(t, b.id.channel, Disconnected)
	check(t, b.id.Disconnect())
	if wc := b.completion(t, 1); wc.Status != WRFlushErr {
		t.Errorf("the posted receive ended with %v", wc.Status)
	}
	event(t, a.id.channel, Disconnected)
	for i, e := range []*end{a, b} {
		// siw leaves the side that has disconnected in SQD until the peer has answered.
		if st := e.state(t); st != QPError && !(s.isIWARP && st == QPSQD) {
			t.Errorf("end %d is in %v", i, st)
		}
	}
}

func TestARejectionArrivesWithItsReason(t *testing.T) {
	s := onSite(t)
	there, here := newChannel(t), newChannel(t)
	l := listen(t, there, s.v4[1])
	l.Owner = "listener"
	id := resolve(t, here, s.v4[1])
	equip(t, id.Context(), id, options{})
	check(t, id.Connect(depths))
	ev := event(t, there, ConnectRequest)
	if ev.ID == l || ev.ID.Owner != "listener" {
		t.Errorf("the request is of %p with the owner %v, the listener is %p", ev.ID, ev.ID.Owner, l)
	}
	reason := bytes.Repeat([]byte("no "), 148/3)
	check(t, ev.ID.Reject(reason))
	check(t, ev.ID.Close())
	got := event(t, here, Rejected)
	if !bytes.HasPrefix(got.Param.PrivateData, reason) {
		t.Errorf("the reason arrived as %q", got.Param.PrivateData)
	}
	if want := 28; s.isIWARP != (got.Status < 0) || !s.isIWARP && got.Status != want {
		t.Errorf("status %d", got.Status)
	}
	if s.isIWARP && !errors.Is(got.Errno(), syscall.ECONNRESET) {
		t.Errorf("errno %v", got.Errno())
	}
}

// A request that can not be accepted any more is refused, not leaked.
func TestARequestToAClosedListenerIsRefused(t *testing.T) {
	s := onSite(t)
	there, here := newChannel(t), newChannel(t)
	l := must(there.NewID())(t)
	check(t, l.Bind(netip.AddrPortFrom(s.v4[1], port)))
	check(t, l.Listen(16))
	id := resolve(t, here, s.v4[1])
	equip(t, id.Context(), id, options{})
	check(t, id.Connect(depths))
	check(t, l.Close())
	check(t, there.SetDeadline(time.Now().Add(200*time.Millisecond)))
	if ev, err := there.Event(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("event %+v, %v", ev, err)
	}
	check(t, here.SetDeadline(time.Now().Add(patience)))
	if ev, err := here.Event(); err != nil || ev.Type == Established {
		t.Errorf("the dialer got %q, %v", ev.Type, err)
	}
}

func TestConnectingWithoutAListenerIsRefused(t *testing.T) {
	s := onSite(t)
	here := newChannel(t)
	id := resolve(t, here, s.v4[1])
	equip(t, id.Context(), id, options{})
	err := id.Connect(depths)
	if s.isIWARP {
		if !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("Connect: %v, want ECONNREFUSED", err)
		}
		return
	}
	check(t, err)
	if ev := event(t, here, Rejected); ev.Status != 8 {
		t.Errorf("status %d, want 8", ev.Status)
	}
}

func TestAnIDClosedWhileConnectingHasNoEvents(t *testing.T) {
	s := onSite(t)
	there, here := newChannel(t), newChannel(t)
	listen(t, there, s.v4[1])
	id := resolve(t, here, s.v4[1])
	equip(t, id.Context(), id, options{})
	check(t, id.Connect(depths))
	check(t, id.Close())
	// A closed id has no event.
	check(t, here.SetDeadline(time.Now().Add(50*time.Millisecond)))
	if ev, err := here.Event(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("event %+v, %v", ev, err)
	}
	// The request may have arrived nevertheless.
	check(t, there.SetDeadline(time.Now().Add(50*time.Millisecond)))
	if ev, err := there.Event(); err == nil && ev.Type == ConnectRequest {
		check(t, ev.ID.Close())
	}
}

// A signal to the thread that connects must not make the kernel connect twice.
func TestSignalsDoNotDisturbConnect(t *testing.T) {
	onSite(t)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			threads, _ := os.ReadDir("/proc/self/task")
			for _, thread := range threads {
				tid, _ := strconv.Atoi(thread.Name())
				syscall.RawSyscall(syscall.SYS_TGKILL, uintptr(os.Getpid()), uintptr(tid), uintptr(syscall.SIGURG))
			}
			select {
			case <-stop:
				return
			case <-time.After(100 * time.Microsecond):
			}
		}
	}()
	defer func() { close(stop); <-stopped }()
	times := 60 // one in ten failed on siw
	if testenv.Device() == "rxe" {
		times = 15 // none failed, and each takes the guest a second
	}
	for range times {
		if !t.Run("", func(t *testing.T) { connect(t, onSite(t), options{}) }) {
			break
		}
	}
}

// An id may be closed while the library reads its event, and the next id, which then has the same number
// in the kernel, may be made.
func TestIDsMayBeClosedWhileTheirEventsCome(t *testing.T) {
	s := onSite(t)
	ch := must(NewEventChannel())(t)
	var events int
	taken := make(chan error)
	go func() {
		for {
			if _, err := ch.Event(); err != nil {
				taken <- err
				return
			}
			events++
		}
	}()
	const ids, atOnce = 1000, 4
	var all sync.WaitGroup
	for seed := range uint64(atOnce) {
		all.Go(func() {
			random := rand.New(rand.NewPCG(seed, 1))
			for range ids {
				id, err := ch.NewID()
				if err != nil {
					t.Error(err)
					return
				}
				if err := id.ResolveAddr(netip.AddrPort{}, netip.AddrPortFrom(s.v4[1], port), time.Second); err != nil {
					t.Error(err)
				}
				wait := time.Duration(random.Int64N(int64(2 * time.Millisecond)))
				for began := time.Now(); time.Since(began) < wait; {
					runtime.Gosched()
				}
				if err := id.Close(); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	check(t, ch.Close())
	if err := <-taken; !errors.Is(err, os.ErrClosed) {
		t.Error(err)
	}
	if events == 0 {
		t.Error("no event came in time")
	}
	t.Logf("%d of %d ids had an event", events, ids*atOnce)
}

func TestBindTakesLocalAddressesOnly(t *testing.T) {
	s := onSite(t)
	here := newChannel(t)
	id := must(here.NewID())(t)
	atEnd(t, "id", id)
	check(t, id.Bind(netip.AddrPortFrom(s.v4[0], 0)))
	if a := id.LocalAddr(); a.Addr() != s.v4[0] || a.Port() == 0 {
		t.Errorf("bound to %v", a)
	}
	v6 := must(here.NewID())(t)
	atEnd(t, "id", v6)
	check(t, v6.Bind(netip.AddrPortFrom(s.v6[0], 0)))
	if err := v6.Bind(netip.MustParseAddrPort("[2001:db8::1]:80")); err == nil || !strings.Contains(err.Error(), "2001:db8::1") {
		t.Errorf("bind to a foreign address: %v", err)
	}
}

// Private data of this length would be truncated on its way through C.
func TestPrivateDataOf300BytesIsRefused(t *testing.T) {
	onSite(t)
	id := must(newChannel(t).NewID())(t)
	atEnd(t, "id", id)
	if err := id.Connect(ConnParam{PrivateData: make([]byte, 300)}); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("300 bytes of private data: %v", err)
	}
}

func TestAnAddressWithoutRouteIsNotResolved(t *testing.T) {
	onSite(t)
	here := newChannel(t)
	id := must(here.NewID())(t)
	atEnd(t, "id", id)
	err := id.ResolveAddr(netip.AddrPort{}, netip.MustParseAddrPort("192.0.2.1:80"), 50*time.Millisecond)
	if err == nil {
		ev := event(t, here, AddrError)
		err = ev.Errno()
	}
	if !errors.Is(err, syscall.ENETUNREACH) {
		t.Errorf("192.0.2.1: %v", err)
	}
}
