package verbs

import (
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
)

// The errno of an error that ended a connection is ECONNRESET, whatever the device reported.
func TestLostIsAReset(t *testing.T) {
	err := deviceError(fmt.Errorf("ibv_post_send: %w", syscall.ENOTCONN))
	var errno syscall.Errno
	if !errors.As(err, &errno) || errno != syscall.ECONNRESET {
		t.Errorf("%v: %v", err, errno)
	}
}

// cables counts the cables of ownCable.
var cables int

// ownCable makes a cable with devices that the test may break. It returns their names, and the address
// to listen on.
func ownCable(t testing.TB) (netdev, rdma string, listen netip.Addr) {
	t.Helper()
	cable(t)
	cables++
	n := 30 + cables
	replace := strings.NewReplacer("NET", fmt.Sprintf("10.8.%d", n), "TABLE", fmt.Sprint(100+n),
		"LOW", fmt.Sprint(10+cables), "MID", fmt.Sprint(30+cables), "KIND", testenv.Device(), "N", fmt.Sprint(n))
	run(t, "bash", "-c", replace.Replace(`set -e
	ip link add bN1 mtu 9000 type veth peer name bN2 mtu 9000
	for i in 1 2; do
		peer=$((3 - i))
		sysctl -qw net.ipv4.conf.bN$i.rp_filter=0 net.ipv4.conf.bN$i.accept_local=1
		ip addr add NET.$i/32 dev bN$i
		ip link set bN$i up
		ip route add NET.$peer dev bN$i src NET.$i table TABLE
		ip rule add pref MID oif bN$i to NET.$peer lookup TABLE
	done
	ip rule add pref LOW iif lo to NET.0/30 lookup TABLE
	rdma link add brN1 type KIND netdev bN1
	rdma link add brN2 type KIND netdev bN2`))
	return fmt.Sprintf("b%d1", n), fmt.Sprintf("br%d1", n), netip.MustParseAddr(fmt.Sprintf("10.8.%d.2", n))
}

// flow is a transfer in both directions that goes on until the connection breaks.
type flow struct {
	wg      sync.WaitGroup
	once    sync.Once
	flowing chan struct{} // closed when some bytes have moved
	ends    chan error    // gets the errors of each end's Writes and Reads
}

func newFlow(a, b *session.Session) *flow {
	f := &flow{flowing: make(chan struct{}), ends: make(chan error, 4)}
	for _, s := range []*session.Session{a, b} {
		f.wg.Go(func() { f.ends <- f.write(s) })
		f.wg.Go(func() { f.ends <- f.read(s) })
	}
	return f
}

func (f *flow) write(s *session.Session) error {
	buf := make([]byte, 1<<20)
	for {
		if _, err := s.Write(buf); err != nil {
			return err
		}
	}
}

func (f *flow) read(s *session.Session) error {
	buf := make([]byte, 1<<20)
	for total := 0; ; {
		n, err := s.Read(buf)
		if err != nil {
			return err
		}
		if total += n; total > 8<<20 {
			f.once.Do(func() { close(f.flowing) })
		}
	}
}

// expectBreaks waits until all Writes and Reads have found that the connection is broken.
func (f *flow) expectBreaks(t *testing.T) {
	t.Helper()
	began := time.Now()
	for range cap(f.ends) {
		select {
		case err := <-f.ends:
			t.Logf("after %v: %v", time.Since(began), err)
			if !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.ETIMEDOUT) && !errors.Is(err, syscall.EPIPE) {
				t.Errorf("the end is %v", err)
			}
		case <-time.After(patience):
			stacks := make([]byte, 1<<20)
			t.Fatalf("no error\n%s", stacks[:runtime.Stack(stacks, true)])
		}
	}
	f.wg.Wait()
}

// If a cable is pulled or a device removed, both ends of a transfer find an error within the bounds of
// keepalive, Close does not hang, and nothing is left. This also holds while the callers' own memory is
// exposed and read.
func TestBreaks(t *testing.T) {
	cable(t)
	for _, tt := range []struct {
		name    string
		deleted bool // true: the device is removed; false: the link goes down
		own     bool // Writes go from their own memory, by RDMA read
	}{
		{name: "link down"},
		{name: "link down, own memory", own: true},
		{name: "device deleted", deleted: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			netdev, rdma, at := ownCable(t)
			l, err := listenAt(netip.AddrPortFrom(at, freePort()), Config{})
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			first, second, err := connect(l, Config{}) // for what a device's first use leaves behind
			if err != nil {
				t.Fatal(err)
			}
			first.discard()
			second.discard()
			nothingLeft(t)
			cfg := session.Config{KeepAlive: 500 * time.Millisecond, CancelTimeout: time.Second}
			if tt.own {
				cfg.Threshold, cfg.Disable = 4<<10, session.FeatureRDMAWrite
			}
			a, b := sessions(t, l, cfg)
			f := newFlow(a, b)
			<-f.flowing
			if tt.own && a.Stats().OffersSent+b.Stats().OffersSent == 0 {
				t.Error("no Write's own memory was offered")
			}
			if tt.deleted {
				del := exec.Command("rdma", "link", "delete", rdma)
				if err := del.Start(); err != nil {
					t.Fatal(err)
				}
			} else {
				run(t, "ip", "link", "set", netdev, "down")
			}
			f.expectBreaks(t)
			closeInTime(t, a, b)
		})
	}
}

func closeInTime(t *testing.T, both ...*session.Session) {
	t.Helper()
	for _, s := range both {
		s.Close()
		select {
		case <-s.Closed():
		case <-time.After(patience):
			t.Fatal("Close hangs")
		}
	}
}

// What connections have held is released, in whichever way they end. With the listener, so is the domain
// that they share once the probe has ended, which here may be at any time.
func TestNothingIsLeft(t *testing.T) {
	nothingLeft(t)
	l := listen(t, Config{})
	round := func(how int) {
		a, b, err := connect(l, Config{})
		if err != nil {
			t.Fatal(err)
		}
		begin(a)
		begin(b)
		if _, err := b.mem.Expose(make([]byte, 1<<16), session.RemoteRead); err != nil {
			t.Fatal(err)
		}
		a.mem.Alloc(1 << 16)
		switch how % 3 {
		case 0:
			a.Close()
			b.Close()
		case 1:
			a.Abort()
			b.Abort()
		case 2:
			b.Close()
			a.Abort()
		}
		a.Retire()
		b.Retire()
	}
	round(0)
	goroutines := runtime.NumGoroutine()
	for i := range 12 {
		round(i)
	}
	goroutinesGone(t, goroutines, patience)
	devices.mu.Lock()
	defer devices.mu.Unlock()
	for _, d := range devices.m { // those that the listener keeps in use
		d.mu.Lock()
		if n := len(d.endpoints); n > 0 {
			t.Errorf("%s has %d connections", d.ctx.Name, n)
		}
		d.mu.Unlock()
	}
}

// goroutinesGone waits until there are no more goroutines than before.
func goroutinesGone(t testing.TB, before int, limit time.Duration) {
	t.Helper()
	testenv.Eventually(t, limit, func() error {
		if n := runtime.NumGoroutine(); n > before {
			stacks := make([]byte, 1<<20)
			return fmt.Errorf("%d goroutines, %d before:\n%s", n, before, stacks[:runtime.Stack(stacks, true)])
		}
		return nil
	})
}

// nothingLeft checks at the end of the test, after its other cleanups, that the kernel has no more
// objects of each kind than now, and that no more buffers are in use. (Windows are not counted, but
// their protection domain would not go without them.) It keeps an id bound, because a device's first use
// leaves librdmacm's own objects behind. It keeps no listener, as that would keep what connections have
// registered.
func nothingLeft(t testing.TB) {
	t.Helper()
	_, at := cable(t)
	// After a test that breaks a cable, binding to the address of another cable sometimes fails with
	// ENODEV for a moment, and once did for more than a minute (rxe; seen three times, not explained,
	// therefore the log). A listener tries again as well (retryTime).
	testenv.Eventually(t, patience, func() error {
		c, err := newID()
		if err != nil {
			return err
		}
		if err := c.id.Bind(netip.AddrPortFrom(at, 0)); err != nil {
			devices, derr := ibv.Devices()
			kernel, _ := exec.Command("bash", "-c", `timeout 1 rping -s -a $0 -p 9; echo "another process, 124 if it can bind: $?"
				rdma link; ip -br addr; grep -H -v 0000:0000:0000:0000:0000:0000:0000:0000 /sys/class/infiniband/*/ports/1/gids/*`, at.String()).CombinedOutput()
			t.Logf("%v: %v; libibverbs has %v, %v\n%s", time.Now(), err, devices, derr, kernel)
			c.close()
			return err
		}
		t.Cleanup(c.close)
		return nil
	})
	before := objects(t)
	_, used := controlArena().Bytes()
	t.Cleanup(func() {
		if t.Failed() {
			return // a failed test leaves things behind, which is no further fault
		}
		testenv.Eventually(t, patience, func() (err error) {
			for what, n := range objects(t) {
				if n > before[what] {
					err = errors.Join(err, fmt.Errorf("%d %s, before %d", n, what, before[what]))
				}
			}
			if _, u := controlArena().Bytes(); u > used {
				err = errors.Join(err, fmt.Errorf("%d bytes of the arena are in use, before %d", u, used))
			}
			return err
		})
	})
}

// When Close or Abort returns, nothing is exposed any more. This also holds if no thread is free for
// librdmacm's calls, which on iWARP go on in the background: then the queue pair is in the error state
// already.
func TestExposedIsTakenBackAtOnce(t *testing.T) {
	nothingLeft(t)
	l := listen(t, Config{})
	for name, end := range map[string]func(*Endpoint){
		"Close": func(e *Endpoint) { e.Close() },
		"Abort": (*Endpoint).Abort,
	} {
		a, b, err := connect(l, Config{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.mem.Expose(make([]byte, 64<<10), session.RemoteWrite); err != nil {
			t.Fatal(err)
		}
		for range maxBlocked {
			blocking <- struct{}{}
		}
		end(b)
		b.mem.exposures.mu.Lock()
		left := b.mem.exposures.m
		b.mem.exposures.mu.Unlock()
		// Cached registrations are local, and of no use to a peer.
		if st := b.dom.cache.Stats(); left != nil || int(st.PinnedEntries) != int(st.Entries) {
			t.Errorf("behind %s: %d exposures, %+v", name, len(left), st)
		}
		if b.dev.iwarp() {
			if a, err := b.q.qp.Query(ibv.MaskState); err != nil || a.State != ibv.QPError {
				t.Errorf("behind %s the queue pair is %v, %v", name, a.State, err)
			}
		}
		for range maxBlocked {
			<-blocking
		}
		b.Retire()
		a.discard()
	}
}
