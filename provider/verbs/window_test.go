//go:build linux

package verbs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/session"
	"github.com/sanconn/san/test/hwsim"
)

// allAttempts are all forbidden accesses that a peer may try with a window.
var allAttempts = slices.Concat(windowAttempts, []windowAttempt{
	{what: "reading before the begin", rights: ibv.RemoteRead, op: ibv.OpRead, off: -8, n: 16},
	{what: "reading what may be written", rights: ibv.RemoteWrite, op: ibv.OpRead, n: 16},
	{what: "writing", rights: ibv.RemoteWrite, op: ibv.OpWrite, succeed: true, n: attemptSize},
	{what: "writing past the end", rights: ibv.RemoteWrite, op: ibv.OpWrite, off: attemptSize - 8, n: 16},
	{what: "writing before the begin", rights: ibv.RemoteWrite, op: ibv.OpWrite, off: -8, n: 16},
	{what: "writing by another connection", rights: ibv.RemoteWrite, op: ibv.OpWrite, n: 16, foreign: true},
	{what: "writing after the invalidation", rights: ibv.RemoteWrite, op: ibv.OpWrite, n: 16, late: true},
	{what: "writing what may be read", rights: ibv.RemoteRead, op: ibv.OpWrite, n: 16},
})

// The probe finds what a device does not enforce.
func TestProbe(t *testing.T) {
	nothingLeft(t)
	l := listen(t, Config{})
	_, b := pair(t, l, Config{})
	if testenv.Device() == "siw" {
		if b.dev.caps.MaxMW != 0 {
			t.Errorf("siw has %d memory windows", b.dev.caps.MaxMW)
		}
		return
	}
	wrong, err := tryAttempts(b.dev, allAttempts, len(allAttempts))
	// rxe checks the registration beneath, not the window.
	if want := []string{"reading past the end", "reading before the begin", "writing past the end", "writing before the begin"}; err != nil || !slices.Equal(wrong, want) {
		t.Errorf("%q, %v; want %q", wrong, err, want)
	}
	b.dev.probeWindows()
	if b.dev.windows.Load() || b.mem.windows.on() || b.dom.shared {
		t.Error("the device's windows are trusted")
	}
	if !b.dev.mayHaveWindows(Config{}) || b.dev.mayHaveWindows(Config{Disable: session.FeatureWindows}) {
		t.Error("Disable does not do what it says")
	}
}

// Each rule that a device may fail to enforce is found by exactly one attempt. Without that attempt,
// connections would rely on windows that do not keep a peer out.
func TestWindowsAreNotEnforced(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // only where hwsimRuns sets the simulated device so
	}
	_, settings, _ := strings.Cut(os.Getenv("HWSIM"), ",")
	want := map[string]struct {
		found string
		trust bool // windows are trusted all the same, and only what goes wrong is not relied on
	}{
		"mw_past_end": {"reading past the end", false},
		"mw_any_qp":   {"reading by another connection", false},
		"mw_late":     {"reading after the invalidation", false},
		"mw_returned": {"reading after its own invalidation", true},
	}[settings]
	nothingLeft(t)
	_, b := pair(t, listen(t, Config{}), Config{})
	wrong, err := tryAttempts(b.dev, slices.Concat(windowAttempts, returnAttempts), len(allAttempts))
	if err != nil || !slices.Equal(wrong, []string{want.found}) {
		t.Errorf("%s: %q, %v; want %q", settings, wrong, err, want.found)
	}
	b.dev.probeWindows()
	if b.dev.windows.Load() != want.trust || b.dev.returns.Load() {
		t.Errorf("%s: windows trusted: %v, and returned by the peer: %v", settings, b.dev.windows.Load(), b.dev.returns.Load())
	}
}

// On a real device, the result is only logged. TestProbe checks that of rxe.
func TestWhatTheDeviceEnforces(t *testing.T) {
	if testenv.Device() != hardwareLane {
		return // test/hardware runs it
	}
	_, b := pair(t, listen(t, Config{}), Config{})
	t.Logf("%s: vendor %#x, iWARP: %v, memory windows: %d, inline %d bytes", b.dev.ctx.Name, b.dev.caps.VendorID, b.dev.iwarp(), b.dev.caps.MaxMW, b.send.inline)
	if b.dev.iwarp() || b.dev.caps.MaxMW == 0 {
		t.Log("does without windows")
		return
	}
	switch wrong, err := tryAttempts(b.dev, allAttempts, len(allAttempts)); {
	case errors.Is(err, syscall.EOPNOTSUPP):
		t.Log("its library has no windows")
	case err != nil:
		t.Errorf("the probe could not tell: %v", err)
	case len(wrong) > 0:
		t.Logf("its windows are not used: %q", wrong)
	default:
		t.Log("its windows are used: it enforces all of it")
	}
}

// What the process has learnt about a device is used at once by its next first connection.
func TestKnownAnswerIsUsedAtOnce(t *testing.T) {
	for _, trusted := range []bool{false, true} {
		d := &device{hardware: hardware{ctx: &ibv.Context{Device: ibv.Device{Name: "known"}}, caps: ibv.Caps{MaxMW: 8}}}
		probed.mu.Lock()
		probed.m[keyOf(d.ctx)] = probeAnswer{trusted: trusted}
		probed.mu.Unlock()
		measured.Store(keyOf(d.ctx), func() int { return 3 })
		d.probe(Config{})
		if got := d.sharesDomain(Config{}); got != trusted {
			t.Errorf("windows: %v, though it is known: %v", got, trusted)
		}
		d.waiters.Wait()
		if n := d.costs.copiesBefore(); n != 3 {
			t.Errorf("a registration costs %d copies, though 3 are known", n)
		}
		d.heed(probeAnswer{until: time.Now().Add(probeAgain)}) // another probe was inconclusive
		if got := d.sharesDomain(Config{}); got != trusted {
			t.Errorf("windows: %v, though it was known: %v", got, trusted)
		}
	}
}

// A device that is opened twice, by name and by rdma_cm, is probed once for both.
func TestAnswerIsForAllThatAreOpen(t *testing.T) {
	opened := func() *device {
		return &device{hardware: hardware{ctx: &ibv.Context{Device: ibv.Device{Name: "twice"}}, caps: ibv.Caps{MaxMW: 8}}}
	}
	d, other := opened(), opened()
	devices.mu.Lock()
	devices.m["by name"] = other
	devices.mu.Unlock()
	defer func() {
		devices.mu.Lock()
		delete(devices.m, "by name")
		devices.mu.Unlock()
	}()
	d.learn(probeAnswer{trusted: true})
	if !d.windows.Load() || !other.windows.Load() {
		t.Errorf("windows trusted: %v, by what has opened it otherwise: %v", d.windows.Load(), other.windows.Load())
	}
}

// A window is not free before the Revoke that waits for it has seen the completion of its invalidation.
// If another exposure took it earlier, that Revoke would wait for the other exposure's end, and its
// timeout would end the connection.
func TestWindowIsFreeBehindItsRevoke(t *testing.T) {
	q := &queuePair{closed: true} // so that no device is needed
	w := &window{bound: true}
	ws := &windows{q: q, all: []*window{w}}
	revoked := make(chan error, 1)
	go func() { // as unbind does after postInvalidate
		ctx, cancel := context.WithTimeout(context.Background(), revokeTime)
		defer cancel()
		revoked <- q.await(ctx, func() bool { return ws.freedLocked(w) })
	}()
	for q.watchers.arrived.Load() == nil {
		runtime.Gosched()
	}
	q.mu.Lock() // as another goroutine's Poll, which goes on to expose memory
	ws.unboundLocked(&ibv.WC{ID: kindUnbind, Status: ibv.Success})
	if len(ws.free) != 0 {
		t.Error("the window is free though its Revoke has not ended")
	}
	q.mu.Unlock()
	if err := <-revoked; err != nil {
		t.Error(err)
	}
	if len(ws.free) != 1 {
		t.Errorf("%d windows are free, want 1", len(ws.free))
	}
}

// The probe of a device that does not answer ends when nobody uses the device any more: a Close, or a
// dial that has failed, may be waiting for it.
func TestProbeEndsWithTheDevice(t *testing.T) {
	if testenv.Device() == "siw" {
		return // the device is never probed
	}
	_, b := pair(t, listen(t, Config{}), Config{})
	at, err := b.dev.loopback()
	if err != nil {
		t.Fatal(err)
	}
	if at.gids == nil {
		t.Fatal("no port with an address")
	}
	pd, err := b.dev.ctx.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	defer pd.Close()
	for _, stopped := range []bool{false, true} {
		stop := make(chan struct{})
		if stopped {
			close(stop)
		}
		at.dev = &device{hardware: b.dev.hardware, stop: stop}
		p := windowProbe{pd: pd, at: at}
		if err := p.open(); err != nil {
			t.Fatal(err)
		}
		// Makes this end not answer. The reader's retries take longer than probeUnused.
		if err := p.exposer[0].Modify(ibv.QPAttr{State: ibv.QPError}, ibv.MaskState); err != nil {
			t.Fatal(err)
		}
		wr := ibv.SendWR{ID: probeMove, Opcode: ibv.OpRead, Flags: ibv.Signaled, RemoteAddr: uint64(addressOf(p.memory.mem)),
			SGE: ibv.SGE{Addr: uint64(addressOf(p.memory.mem)), Length: 8, LKey: p.mr.LKey}}
		if _, err := p.do(p.reader[0], wr); (err == errProbeStopped) != stopped {
			t.Errorf("nobody uses the device: %v; %v", stopped, err)
		}
		p.close()
	}
	unused := &device{hardware: b.dev.hardware, stop: make(chan struct{})}
	close(unused.stop)
	if _, err := tryAttempts(unused, windowAttempts, 1); !errors.Is(err, errProbeStopped) {
		t.Errorf("the probe of a device that nobody uses goes on: %v", err)
	}
}

// With a window the registration stays in the cache, and an exposure is a hit (rules K4 and K5). Without
// windows each exposure is a registration.
func TestWindowsKeepTheRegistration(t *testing.T) {
	if testenv.Device() == "siw" {
		return
	}
	for _, tt := range []struct{ windows, shared bool }{{}, {windows: true}, {true, true}} {
		t.Run(fmt.Sprintf("windows %v, shared %v", tt.windows, tt.shared), func(t *testing.T) {
			const rounds = 20
			nothingLeft(t)
			cfg := Config{SharedDomain: tt.shared}
			l := listen(t, cfg)
			l.windows = tt.windows
			a, b := pair(t, l, cfg)
			mem, sink := bytes.Repeat([]byte{'m'}, 64<<10), make([]byte, 64<<10)
			before := b.dom.cache.Stats()
			for i := range rounds {
				mem[0] = byte(i)
				d := expose(t, a, b, mem, session.RemoteRead)
				if err := read(t, a, sink, d); err != nil || !bytes.Equal(sink, mem) {
					t.Fatalf("round %d: %v", i, err)
				}
				b.mem.Revoke(d)
			}
			after := b.dom.cache.Stats()
			n := after.Registrations - before.Registrations
			if tt.windows && (n > 4 || after.Exposed != 0) || !tt.windows && after.Exposed != rounds {
				t.Errorf("%d registrations, %d of them for a peer, in %d exposures", n, after.Exposed, rounds)
			}
			if want := map[bool]int{true: 1, false: 0}[tt.windows]; len(b.mem.windows.all) != want {
				t.Errorf("%d windows, want %d", len(b.mem.windows.all), want)
			}
		})
	}
}

// windowed makes a connection that uses windows.
func windowed(t *testing.T, shared bool) (a, b *Endpoint) {
	cfg := Config{SharedDomain: shared}
	l := listen(t, cfg)
	l.windows = true
	return pair(t, l, cfg)
}

// Several exposures at the same time have a window each, up to the limit.
func TestWindowsAtATime(t *testing.T) {
	if testenv.Device() == "siw" {
		return
	}
	for _, shared := range []bool{false, true} {
		t.Run(fmt.Sprintf("shared %v", shared), func(t *testing.T) {
			nothingLeft(t)
			a, b := windowed(t, shared)
			const n = maxWindows + 2
			var mem, sink [n][]byte
			var d [n]session.Descriptor
			for round := range 3 {
				for i := range n {
					mem[i], sink[i] = bytes.Repeat([]byte{byte(round*n + i)}, 8192), make([]byte, 8192)
					var err error
					d[i], err = b.mem.Expose(mem[i], session.RemoteRead)
					if beyond := i >= maxWindows && b.dom.shared; beyond != (err != nil) {
						t.Fatalf("exposure %d: %v", i, err)
					}
				}
				say(t, b, a)
				for i := range n {
					if d[i].Len == 0 {
						continue
					}
					if err := read(t, a, sink[i], d[i]); err != nil || !bytes.Equal(sink[i], mem[i]) {
						t.Errorf("read of %d: %v", i, err)
					}
					b.mem.Revoke(d[i])
					b.mem.Revoke(d[i]) // has no effect
				}
			}
			if err := errors.Join(a.Err(), b.Err()); err != nil {
				t.Error(err)
			}
		})
	}
}

// Memory that cannot be written cannot have a window: it is exposed by a registration of its own or, if
// that would give other connections' peers access, not at all.
func TestWindowsOnReadOnlyMemory(t *testing.T) {
	if testenv.Device() == "siw" {
		return
	}
	mem, err := unix.Mmap(-1, 0, 8192, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	stable, err := regcache.Declare(mem)
	if err != nil {
		t.Fatal(err)
	}
	defer stable.Withdraw()
	for _, shared := range []bool{false, true} {
		a, b := windowed(t, shared)
		if shared {
			if d, err := b.mem.Expose(mem, session.RemoteRead); err == nil {
				t.Errorf("exposed as %+v", d)
			}
		} else {
			d := expose(t, a, b, mem, session.RemoteRead)
			if err := read(t, a, make([]byte, len(mem)), d); err != nil {
				t.Error(err)
			}
			b.mem.Revoke(d)
		}
		b.discard()
	}
}

// A peer that no longer answers cannot block Revoke for ever, and gets no access.
func TestRevokeWhenThePeerIsGone(t *testing.T) {
	if testenv.Device() == "siw" {
		return
	}
	netdev, _, at := ownCable(t)
	nothingLeft(t)
	l, err := listenAt(netip.AddrPortFrom(at, freePort()), Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	l.windows = true
	a, b := pair(t, l, Config{})
	mem := make([]byte, 64<<10)
	d := expose(t, a, b, mem, session.RemoteRead|session.RemoteWrite)
	run(t, "ip", "link", "set", netdev, "down")
	// Sends messages that nobody acknowledges, until the invalidation has to wait after them, or finds
	// no room.
	for range maxSends {
		if room := b.Reserve(16, 16); room != nil {
			b.Commit(len(room))
		}
	}
	began := time.Now()
	b.mem.Revoke(d)
	if took := time.Since(began); took > 4*revokeTime { // the guest may be slow
		t.Errorf("Revoke took %v", took)
	}
	t.Logf("Revoke took %v; the connection: %v", time.Since(began), b.Err())
	if st := b.dom.cache.Stats(); st.DeregisterFailed != 0 {
		t.Errorf("%d registrations were not removed", st.DeregisterFailed)
	}
	b.discard()
	a.discard()
}

// A peer that invalidates a window loses its connection, and the window is not invalidated a second
// time.
func TestPeerInvalidates(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // rxe has another flag for it, and its kernel crashes the second time
	}
	nothingLeft(t)
	a, b := windowed(t, false)
	canReturn(t, b.dev, false)
	mem := make([]byte, 8192)
	d := expose(t, a, b, mem, session.RemoteRead)
	sendInvalidating(a, d.Key)
	if err := endOf(t, b); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%v, want ECONNRESET", err)
	}
	b.mem.Revoke(d)
	if st := b.dom.cache.Stats(); st.DeregisterFailed != 0 {
		t.Errorf("%d registrations were not removed", st.DeregisterFailed)
	}
}

// sendInvalidating makes e send a message that invalidates a key of its peer's.
func sendInvalidating(e *Endpoint, key uint64) {
	e.q.mu.Lock()
	defer e.q.mu.Unlock()
	wr := ibv.SendWR{Opcode: ibv.OpSendWithInv, InvKey: uint32(key),
		SGE: ibv.SGE{Addr: uint64(addressOf(e.send.mem)), Length: 16, LKey: e.send.mr.LKey}}
	e.send.wr[0] = wr
	e.send.postLocked(true)
}

// canReturn sets whether the probe has found that a peer's message can invalidate a window, until the
// end of the test.
func canReturn(t *testing.T, d *device, can bool) {
	before := d.returns.Swap(can)
	t.Cleanup(func() { d.returns.Store(before) })
}

// A peer may invalidate the window of an offer, once: then its access has ended, and Revoke posts
// nothing. With any other key it loses its connection.
func TestPeerReturns(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return
	}
	nothingLeft(t)
	l := listen(t, Config{})
	l.windows = true
	mem := make([]byte, 8192)
	for name, other := range map[string]func(a, b *Endpoint, d session.Descriptor) uint64{
		"nothing":            nil,
		"the same key again": func(_, _ *Endpoint, d session.Descriptor) uint64 { return d.Key },
		"the next key":       func(_, _ *Endpoint, d session.Descriptor) uint64 { return d.Key + 1 },
		"a key of messages":  func(_, b *Endpoint, _ session.Descriptor) uint64 { return uint64(b.recv.mr.RKey) },
		"the inbox's, beside an offer": func(a, b *Endpoint, _ session.Descriptor) uint64 {
			expose(t, a, b, mem, session.RemoteRead)
			return expose(t, a, b, mem, session.RemoteWrite).Key
		},
		"what is being revoked": func(a, b *Endpoint, _ session.Descriptor) uint64 {
			d := expose(t, a, b, mem, session.RemoteRead)
			b.q.mu.Lock()
			defer b.q.mu.Unlock()
			b.mem.windows.all[0].returnable = false // the state in which postInvalidate leaves it
			return d.Key
		},
	} {
		a, b := pair(t, l, Config{})
		canReturn(t, b.dev, true)
		d := expose(t, a, b, mem, session.RemoteRead)
		if !d.Returnable {
			t.Fatal("the memory of an offer is not returnable")
		}
		room := a.ReserveControl(16)
		a.mem.CommitReturn(len(room), d)
		if ev := event(t, b); ev.Kind != session.Message || len(ev.Msg) != len(room) {
			t.Fatalf("the message that invalidates is %+v", ev)
		}
		b.Drop()
		returned := !b.mem.windows.all[0].bound
		b.mem.Revoke(d)
		if !returned || len(b.mem.windows.free) != len(b.mem.windows.all) {
			t.Errorf("%s: the window is returned: %v; %d of %d free", name, returned, len(b.mem.windows.free), len(b.mem.windows.all))
		}
		if other == nil { // the same window again, which is now revoked here
			b.mem.Revoke(expose(t, a, b, mem, session.RemoteRead))
			if err := b.Err(); err != nil || b.mem.windows.all[0].returnable {
				t.Errorf("%s: %v; the peer may invalidate what was revoked: %v", name, err, b.mem.windows.all[0].returnable)
			}
			continue
		}
		sendInvalidating(a, other(a, b, d))
		if err := endOf(t, b); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%s: %v, want ECONNRESET", name, err)
		}
	}
}

// A peer sends immediate data, which consumes a receive buffer, and whose completion has a length that
// the peer chooses. It loses its connection, and no byte of other buffers is delivered, wherever in its
// region the buffer lies.
func TestPeerSendsImmediateData(t *testing.T) {
	if testenv.Device() == "siw" {
		return // iWARP has no immediate data
	}
	nothingLeft(t)
	l := listen(t, Config{})
	for _, op := range []ibv.Opcode{ibv.OpWriteWithImm, ibv.OpSendWithImm} {
		for _, last := range []bool{false, true} {
			a, b := pair(t, l, Config{})
			mem := make([]byte, 64<<10)
			d := expose(t, a, b, mem, session.RemoteWrite)
			if last {
				for range b.cfg.buffers - 1 {
					say(t, a, b)
				}
			}
			wr := ibv.SendWR{Opcode: op, RemoteAddr: d.Addr, RemoteKey: uint32(d.Key),
				SGE: ibv.SGE{Addr: uint64(addressOf(a.send.mem)), Length: 16, LKey: a.send.mr.LKey}}
			if op == ibv.OpWriteWithImm {
				wr.SGE.Length = uint32(len(a.send.mem)) // the whole region, many times the size of a buffer
			}
			a.q.mu.Lock()
			a.send.wr[0] = wr
			a.send.postLocked(true)
			a.q.mu.Unlock()
			if err := endOf(t, b); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("opcode %d, the last buffer %v: %v, want ECONNRESET", op, last, err)
			}
			b.mem.Revoke(d)
			a.discard()
			b.discard()
		}
	}
}

// BenchmarkExposure measures what an exposure costs, without moving a byte.
func BenchmarkExposure(b *testing.B) {
	for _, windows := range []bool{false, true} {
		if windows && testenv.Device() == "siw" {
			continue
		}
		l := listen(b, Config{})
		l.windows = windows
		_, y := pair(b, l, Config{})
		for _, size := range []int{4 << 10, 64 << 10, 1 << 20, 8 << 20} {
			mem := make([]byte, size)
			for i := 0; i < size; i += 4096 {
				mem[i] = 1
			}
			b.Run(fmt.Sprintf("windows %v/%d KiB", windows, size>>10), func(b *testing.B) {
				b.ReportAllocs()
				for range 3 {
					d, err := y.mem.Expose(mem, session.RemoteRead)
					if err != nil {
						b.Fatal(err)
					}
					y.mem.Revoke(d)
				}
				for b.Loop() {
					d, err := y.mem.Expose(mem, session.RemoteRead)
					if err != nil {
						b.Fatal(err)
					}
					y.mem.Revoke(d)
				}
			})
		}
	}
}
