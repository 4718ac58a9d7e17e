//go:build linux && cgo

package verbs

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
)

// While a listener is made, connected to and closed, each call of the libraries fails in turn, alone or
// with all calls after it. The result is an error or a connection, and nothing is left behind.
func testEachCallFails(t *testing.T) {
	f := useFake(t)
	f.set(fakeVendor, mlxVendor) // a vendor whose queues count as locked memory
	port, hits, want := 20_000, 0, 0
	for _, cfg := range fakeConfigs {
		for _, errno := range []syscall.Errno{syscall.ENOMEM, syscall.EIO} {
			want += 2 * 20
			hits += f.eachFault(errno, func() error { port++; return connectOnce(fakeAddr(port), cfg) })
		}
	}
	if hits < want {
		t.Errorf("%d calls failed, want %d at least", hits, want)
	}
}

// The same without rdma_cm. A lack of resources at either end is reported as that, and other failures
// are not.
func testEachCallFailsWithoutCM(t *testing.T) {
	f := useFake(t)
	f.set(fakeGIDs, 1)
	f.set(fakeForeign, 0)
	serveLoopback(t)
	cfg := Config{WithoutCM: true}
	for _, errno := range []syscall.Errno{syscall.ENOMEM, syscall.EIO} {
		hits := f.eachFault(errno, func() error {
			err := connectOnce(fakeAddr(int(freePort())), cfg)
			if f.get(fakeHits) > 0 && err != nil && (reasonOf(err) == session.ReasonResources) != (errno == syscall.ENOMEM) {
				t.Errorf("%v of %s: %v", errno, f.failed(), err)
			}
			return err
		})
		if hits < 2*20 {
			t.Errorf("%d calls failed", hits)
		}
	}
}

// eachFault repeats connect, so that each of its calls of the libraries fails once with errno: alone,
// and with all calls after it. It returns the number of calls.
func (f *fake) eachFault(errno syscall.Errno, connect func() error) (hits int) {
	f.t.Helper()
	for _, all := range []int64{0, 1} {
		for n := int64(0); ; n++ {
			f.set(fakeErrno, int64(errno))
			f.set(fakeAll, all)
			f.set(fakeHits, 0)
			f.set(fakeCountdown, n)
			err := connect()
			hit := f.get(fakeHits) > 0
			f.set(fakeCountdown, -1)
			f.set(fakeHits, 0)
			f.empty(fmt.Sprintf("%v of call %d (%s), all after it: %v; %v:", errno, n, f.failed(), all == 1, err))
			if !hit {
				if err != nil {
					f.t.Errorf("with no fault: %v", err)
				}
				break
			}
			if f.failed() == "post_recv" && err == nil {
				f.t.Errorf("%v of call %d: connected without buffers to receive into", errno, n)
			}
			hits++
		}
	}
	return hits
}

// Listeners open and close under dials that have less time than a dial takes, while events are slow. One
// dial has as much time as it needs, and succeeds: so it is time that the others lack.
func testDialsWithoutTime(t *testing.T) {
	const enough = 20 * time.Second
	dial := func(at netip.AddrPort, cfg Config, limit time.Duration) (time.Duration, error) {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		began := time.Now()
		e, err := Dial(ctx, netip.Addr{}, at, cfg)
		took := time.Since(began)
		if err == nil {
			e.discard()
		}
		return took, err
	}
	for _, cfg := range fakeConfigs {
		f := useFake(t)
		f.set(fakeSlow, 1)
		at := fakeAddr(30_000)
		l, err := listenAt(at, cfg)
		if err != nil {
			t.Fatal(err)
		}
		whole, err := dial(at, cfg, enough)
		l.Close()
		if err != nil {
			t.Fatalf("with nobody beside it: %v", err)
		}
		var all sync.WaitGroup
		for g := range 4 {
			all.Go(func() {
				for i := range 60 {
					at := fakeAddr(30_001 + 1000*g + i)
					l, err := listenAt(at, cfg)
					if err != nil {
						t.Error(err)
						return
					}
					var dials sync.WaitGroup
					for _, limit := range []time.Duration{whole / 20, whole / 2, whole} {
						dials.Go(func() { dial(at, cfg, limit) })
					}
					if i%2 == 0 {
						dials.Go(func() {
							if _, err := dial(at, cfg, enough); err != nil {
								t.Errorf("with all the time it wants: %v", err)
							}
						})
						dials.Wait()
					}
					l.Close()
					dials.Wait()
				}
			})
		}
		all.Wait()
	}
}

// A device is removed and comes back while there are connections. All of them end, the listener listens
// on the device again, and the context is not closed before the last object that was made with it.
func testDeviceRemoval(t *testing.T) {
	const rounds = 15
	f := useFake(t)
	at := fakeAddr(40_000)
	l, err := listenAt(at, Config{})
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	all.Go(func() { expectEnds(t, l, &all) })
	var over atomic.Bool
	var connected atomic.Int64
	for g := range 4 {
		all.Go(func() {
			limit := 100 * time.Millisecond // some dials get no answer, because the device goes
			for i := 0; !over.Load(); i++ {
				ctx, cancel := context.WithTimeout(context.Background(), limit)
				e, err := Dial(ctx, netip.Addr{}, at, Config{})
				if ctx.Err() != nil { // or the machine is slow
					limit = min(2*limit, patience/4)
				}
				cancel()
				if err != nil {
					runtime.Gosched()
					continue
				}
				connected.Add(1)
				for range (i + g) % 20 {
					runtime.Gosched()
				}
				e.discard()
			}
		})
	}
	for round := range rounds {
		before := connected.Load()
		testenv.Eventually(t, patience, func() error {
			if connected.Load() < before+3 {
				return fmt.Errorf("round %d: nobody connects", round)
			}
			return nil
		})
		f.order(fakeRemove)
		testenv.Eventually(t, patience, func() error {
			if addrs := l.addrs(); len(addrs) != 0 {
				return fmt.Errorf("round %d: it listens on %v of a device that has gone", round, addrs)
			}
			return nil
		})
		f.order(fakeReturn)
	}
	over.Store(true)
	l.Close()
	all.Wait()
}

// expectEnds accepts connections until l is closed, and waits in the background until each has ended.
func expectEnds(t *testing.T, l *listener, all *sync.WaitGroup) {
	for {
		e, err := l.Accept()
		if err != nil {
			return
		}
		all.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
			defer cancel()
			if err := e.q.await(ctx, func() bool { return false }); ctx.Err() != nil {
				t.Errorf("the connection does not end: %v", err)
			}
			e.discard()
		})
	}
}

// If events cannot be waited for, a dial returns an error instead of waiting.
func testWithoutEpoll(t *testing.T) {
	f := useFake(t)
	f.set(fakeNoEpoll, 1)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	began := time.Now()
	_, err := Dial(ctx, netip.Addr{}, fakeAddr(41_000), Config{})
	if err == nil || !strings.Contains(err.Error(), "max_user_watches") || time.Since(began) > 5*time.Second {
		t.Errorf("%v after %v", err, time.Since(began))
	}
}

// For one context there is only one device at a time, however soon the next connection begins after the
// last one's end.
func testDevicesDoNotOverlap(t *testing.T) {
	f := useFake(t)
	at := fakeAddr(42_000)
	var all sync.WaitGroup
	for range 2 {
		all.Go(func() {
			for range 500 { // nobody listens, so each dial uses the device and releases it
				ctx, cancel := context.WithTimeout(context.Background(), patience)
				if _, err := Dial(ctx, netip.Addr{}, at, Config{}); reasonOf(err) != session.ReasonNoListener {
					t.Error(err)
				}
				cancel()
			}
		})
	}
	all.Wait()
	if n := f.get(fakeOverlaps); n != 0 {
		t.Errorf("%d times there were two", n)
	}
}

// A listener that is being closed refuses with that reason: another process may have its port on TCP.
func testClosingListener(t *testing.T) {
	useFake(t)
	at := fakeAddr(43_000)
	l, err := listenAt(at, Config{})
	if err != nil {
		t.Fatal(err)
	}
	closing := func(is bool) {
		l.mu.Lock()
		l.closed = is
		l.mu.Unlock()
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	closing(true) // while the listener still listens
	_, err = Dial(ctx, netip.Addr{}, at, Config{})
	if reasonOf(err) != session.ReasonNoListener || !strings.Contains(err.Error(), "closing") {
		t.Errorf("%v (%v)", err, reasonOf(err))
	}
	closing(false)
	l.Close()
}

// After a reboot of this host, the peer may still have a connection with the same queue pair number.
// That fails one attempt, and not the connection.
func testStaleConnections(t *testing.T) {
	f := useFake(t)
	f.set(fakeStale, dialTries-1)
	if err := connectOnce(fakeAddr(46_000), Config{}); err != nil {
		t.Error(err)
	}
	f.set(fakeStale, dialTries)
	if err := connectOnce(fakeAddr(46_001), Config{}); err != errStale {
		t.Errorf("%d in turn: %v", dialTries, err)
	}
}

// Without rdma_cm, an end uses the GID of its address whose interface is in this namespace and has the
// address. If the device refuses it, because it is not this process's, the end tries another. If all are
// refused, both ends report that.
func testGIDsInTurn(t *testing.T) {
	f := useFake(t)
	f.set(fakeGIDs, 3)
	serveLoopback(t)
	cfg := Config{WithoutCM: true}
	for _, tt := range []struct{ foreign, used int64 }{{0, 1 << 2}, {1 << 2, 1 << 0}, {1<<2 | 1<<0, 1 << 1}, {1<<3 - 1, 0}} {
		f.set(fakeForeign, tt.foreign)
		f.set(fakeUsed, 0)
		err := connectOnce(fakeAddr(int(freePort())), cfg)
		if tt.used == 0 && reasonOf(err) != session.ReasonUnreachable || tt.used != 0 && err != nil {
			t.Errorf("%b are not ours: %v", tt.foreign, err)
		}
		if used := f.get(fakeUsed); used != tt.used {
			t.Errorf("%b are not ours: queue pairs have %b, want %b", tt.foreign, used, tt.used)
		}
	}

	a, err := attach(fakeAddr(0).Addr(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer a.dev.release()
	err = a.inTurn(func(ibv.GIDEntry) error { return syscall.EINVAL })
	if text := fmt.Sprint(err); reasonOf(err) != session.ReasonUnreachable || !strings.Contains(text, "GID ::ffff:127.0.0.1 ") || !strings.Contains(text, " of lo:") {
		t.Errorf("no GID is ours: %v", err)
	}
	if at, err := a.dev.loopback(); err != nil || len(at.gids) != 3 || at.gids[0].Index != 2 {
		t.Errorf("the probe's GIDs: %+v, %v", at.gids, err)
	}
}

// A request whose dialer never confirms is given up, whether the dialer sends nothing at all or stops
// after the answer. If as many requests are pending as may be, further ones are refused.
func testHalfOpenWithoutCM(t *testing.T) {
	f := useFake(t)
	f.set(fakeGIDs, 1)
	f.set(fakeForeign, 0)
	serveLoopback(t)
	cfg := Config{WithoutCM: true}
	at := fakeAddr(int(freePort()))
	l, err := listenAt(at, cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, silent := range []bool{true, false} {
		c, err := net.Dial("tcp", netip.AddrPortFrom(at.Addr(), l.cfg.iwarpPort(at.Port())).String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		mine := connParams{privateData: privateData{Version: protocolVersion}, MTU: 3, Served: 1}
		mine.Peer = ibv.QPPeer{QPNum: 17, GID: at.Addr().As16()}
		if !silent {
			if _, err := c.Write(mine.bytes()); err != nil {
				t.Fatal(err)
			}
			if _, err := readParams(c); err != nil {
				t.Fatal(err)
			}
		}
	}
	expectGivenUp(t, l, 2)
	fill(l)
	refusedForRoom(t, l, cfg)
}

// The settings for the network reach rdma_cm; those that are not set have their defaults.
func testNetworkSettings(t *testing.T) {
	f := useFake(t)
	vendors := map[int64]int64{0: retryCount, rxeVendor: retryCount - 1} // on rxe 7 means for ever
	for vendor, retries := range vendors {
		f.set(fakeVendor, vendor)
		for _, tt := range []struct {
			cfg             Config
			tos, ackTimeout int64
		}{
			{Config{}, 0, int64(defaultAckTimeout)},
			{Config{TrafficClass: 106, AckTimeout: 20}, 106, 20},
			{Config{AckTimeout: 99}, 0, maxAckTimeout},
		} {
			f.set(fakeTOS, 0)
			if err := connectOnce(fakeAddr(20_000), tt.cfg); err != nil {
				t.Fatal(err)
			}
			if got := f.get(fakeTOS); got != tt.tos {
				t.Errorf("%+v: a traffic class of %d, want %d", tt.cfg, got, tt.tos)
			}
			if got := f.get(fakeAckTimeout); got != tt.ackTimeout {
				t.Errorf("%+v: an acknowledgement timeout of %d, want %d", tt.cfg, got, tt.ackTimeout)
			}
			if got := f.get(fakeRetry); got != retries {
				t.Errorf("vendor %#x: %d retries, want %d", vendor, got, retries)
			}
			if got := f.get(fakeRNRRetry); got != int64(rnrRetry) {
				t.Errorf("%d retries for want of receives, want %d", got, rnrRetry)
			}
		}
	}
}

// A dial does not use RDMA if its socket's route leaves by another device than the one that rdma_cm
// finds.
func testAnotherDevice(t *testing.T) {
	useFake(t)
	err := connectOnce(fakeAddr(20_000), Config{Device: "rail2"})
	if reasonOf(err) != session.ReasonNotServed || !strings.Contains(err.Error(), "rail2") {
		t.Errorf("%v, want that it is not served, and the names of both", err)
	}
}
