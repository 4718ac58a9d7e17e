package verbs

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/session"
)

// When the budget for buffers is used up, at either end, the dialer gets the reason, which package san
// counts. When connections have been closed there is room again.
func TestBudgetUsedUp(t *testing.T) {
	for _, tt := range []struct {
		name string
		room int64
	}{
		{"nothing", 16 << 10},
		{"half a connection", restBytes / 2},
		{"one and a half", restBytes + restBytes/2},
	} {
		for _, which := range []string{"dialer", "listener", "dialer without rdma_cm", "listener without rdma_cm"} {
			which, withoutCM := strings.CutSuffix(which, " without rdma_cm")
			if withoutCM && testenv.Device() == "siw" {
				continue // iWARP cannot do without rdma_cm
			}
			t.Run(fmt.Sprintf("%s, %s, without rdma_cm %v", tt.name, which, withoutCM), func(t *testing.T) {
				nothingLeft(t)
				ofDialer, ofListener := Config{WithoutCM: withoutCM}, Config{WithoutCM: withoutCM}
				arena := regcache.NewArena(16<<10, tt.room)
				if which == "dialer" {
					ofDialer.control = arena
				} else {
					ofListener.control = arena
				}
				l := listen(t, ofListener)
				refused := func() {
					t.Helper()
					e, err := Dial(patient(t), netip.Addr{}, l.addrs()[0], ofDialer)
					if reasonOf(err) != session.ReasonResources {
						t.Errorf("%v, want %v", err, session.ReasonResources)
					}
					if err == nil {
						e.discard()
					}
				}
				for range 2 {
					if tt.room > restBytes {
						a, b, err := connect(l, ofDialer)
						if err != nil {
							t.Fatal(err)
						}
						refused()
						a.discard()
						b.discard()
					} else {
						refused()
					}
				}
				l.Close() // waits until the refusals have ended
				if _, used := arena.Bytes(); used != 0 {
					t.Errorf("%d bytes are in use", used)
				}
			})
		}
	}
}

// One peer's connections leave room for others', however many it makes: at first a quarter, and a part
// of the rest for each peer that comes later.
func TestNoPeerHasItAll(t *testing.T) {
	const n, most = 4 << 10, 256
	arena := regcache.NewArena(64<<10, most*n)
	peer := func(i byte) peerBudget { return peerBudget{arena, netip.AddrFrom4([4]byte{192, 0, 2, i})} }
	var all []messageMemory
	fill := func(s peerBudget) (got int) {
		for {
			r, err := newMessageMemory(s, n)
			if err != nil {
				if !errors.Is(err, syscall.ENOBUFS) {
					t.Error(err)
				}
				return got
			}
			all = append(all, r)
			got++
		}
	}
	free := most
	for i := range byte(4) {
		got := fill(peer(i))
		if want := free * peerShare / (peerShare + 1); got != want {
			t.Errorf("peer %d has %d of %d pieces that were left, want %d", i, got, free, want)
		}
		if free -= got; fill(peer(i)) != 0 {
			t.Errorf("peer %d gets more", i)
		}
	}
	for i := range all {
		all[i].free()
	}
	if _, used := arena.Bytes(); used != 0 {
		t.Errorf("%d bytes are in use", used)
	}
	all = nil
	if got := fill(peer(0)); got != most*peerShare/(peerShare+1) {
		t.Errorf("a peer whose connections have gone gets %d", got)
	}
	for i := range all {
		all[i].free()
	}
	peerBudgets.mu.Lock()
	defer peerBudgets.mu.Unlock()
	for s := range peerBudgets.m {
		if s.arena == arena {
			t.Errorf("%v still has a share", s.peer)
		}
	}
}

// An attempt that fails for lack of memory is charged to nobody: the peer gets its share later.
func TestShareOfWhatIsNotThere(t *testing.T) {
	of := peerBudget{regcache.NewArena(16<<10, 16<<10), netip.MustParseAddr("192.0.2.7")}
	for range 2 {
		if r, err := newMessageMemory(of, 32<<10); !errors.Is(err, syscall.ENOBUFS) {
			t.Fatalf("%d bytes of 16 KiB, %v", len(r.mem), err)
		}
	}
	r, err := newMessageMemory(of, 16<<10)
	if err != nil {
		t.Fatal(err)
	}
	r.close()
	peerBudgets.mu.Lock()
	defer peerBudgets.mu.Unlock()
	if n, has := peerBudgets.m[of]; has {
		t.Errorf("a share of %d bytes is left", n)
	}
}

// A dialer whose share at the acceptor is used up stays on TCP with that reason.
func TestShareUsedUp(t *testing.T) {
	for _, withoutCM := range []bool{false, true} {
		if withoutCM && testenv.Device() == "siw" {
			continue // iWARP cannot do without rdma_cm
		}
		t.Run(fmt.Sprintf("without rdma_cm %v", withoutCM), func(t *testing.T) {
			nothingLeft(t)
			ofListener := Config{WithoutCM: withoutCM, control: regcache.NewArena(16<<10, 3*restBytes)}
			l := listen(t, ofListener)
			a, b, err := connect(l, Config{WithoutCM: withoutCM})
			if err != nil {
				t.Fatal(err)
			}
			defer a.discard()
			defer b.discard()
			if a.peer != l.addrs()[0].Addr() || !b.peer.IsValid() {
				t.Errorf("the shares of %v and %v are used; the listener has %v", a.peer, b.peer, l.addrs()[0])
			}
			c, d, err := connect(l, Config{WithoutCM: withoutCM})
			if err != nil {
				t.Fatal(err)
			}
			defer c.discard()
			defer d.discard()
			if e, err := Dial(patient(t), netip.Addr{}, l.addrs()[0], Config{WithoutCM: withoutCM}); reasonOf(err) != session.ReasonResources {
				t.Errorf("%v, want %v, as a third of the listener's buffers is for other peers", err, session.ReasonResources)
				if err == nil {
					e.discard()
				}
			}
		})
	}
}
