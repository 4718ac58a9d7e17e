package regcache

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/frames"
	"github.com/sanconn/san/internal/testenv"
)

// fakeNIC is a simulated network card. It pins pages as a card does, with io_uring's registered buffers,
// and moves bytes through those pages, even if the addresses have other pages by then. It also records
// the physical frames, so that a stale registration is found.
type fakeNIC struct {
	ring  *ring
	blind bool // does not record frames, for benchmarks

	mu      sync.Mutex // guards what follows
	nextKey uint32
	keys    map[uint32]*pinned
	bytes   int64
}

// pinned is one registration.
type pinned struct {
	start, end uintptr
	access     Access
	frames     frames.Record // empty if blind
	slot       int
}

func newNIC(t testing.TB) *fakeNIC {
	t.Helper()
	if err := frames.Visible(); err != nil {
		testenv.Missing(t, fmt.Sprintf("frames: %v", err))
	}
	r, err := newRing()
	if err != nil {
		testenv.Missing(t, fmt.Sprintf("io_uring: %v", err))
	}
	n := &fakeNIC{ring: r, nextKey: 1, keys: make(map[uint32]*pinned)}
	t.Cleanup(func() {
		if entries, bytes := n.registered(); entries != 0 && !t.Failed() {
			t.Errorf("%d registrations of %d bytes left on the NIC", entries, bytes)
		}
		n.ring.close()
	})
	return n
}

func (n *fakeNIC) Register(addr uintptr, size int, access Access) (MR, error) {
	slot, err := n.ring.register(addr, size)
	if err != nil {
		return MR{}, fmt.Errorf("fakeNIC: %w", err)
	}
	p := &pinned{start: addr, end: addr + uintptr(size), access: access, slot: slot}
	if !n.blind {
		p.frames = frames.Of(addr, size)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	key := n.nextKey // easy to guess, like rxe's
	n.nextKey++
	n.keys[key] = p
	n.bytes += int64(size)
	return MR{LKey: key, RKey: key, Ref: p}, nil
}

func (n *fakeNIC) Deregister(mr MR) error {
	n.mu.Lock()
	p := n.keys[mr.LKey]
	delete(n.keys, mr.LKey)
	if p != nil {
		n.bytes -= int64(p.end - p.start)
	}
	n.mu.Unlock()
	if p == nil {
		return fmt.Errorf("fakeNIC: key %d: %w", mr.LKey, syscall.EINVAL)
	}
	return n.ring.unregister(p.slot)
}

// Stale reports whether a page of b is no longer the one that was registered.
func (n *fakeNIC) Stale(r *Region, b []byte) error {
	n.mu.Lock()
	p := n.keys[r.LKey()]
	n.mu.Unlock()
	if p == nil {
		return fmt.Errorf("key %d is not registered", r.LKey())
	}
	return p.frames.Compare(addressOf(b), len(b))
}

// Send returns what the device reads, from the pages that were pinned for b's addresses.
func (n *fakeNIC) Send(r *Region, b []byte) ([]byte, error) {
	n.mu.Lock()
	p := n.keys[r.LKey()]
	n.mu.Unlock()
	if p == nil {
		return nil, fmt.Errorf("key %d is not registered", r.LKey())
	}
	return n.ring.read(p.slot, addressOf(b), len(b))
}

var errRemoteAccess = errors.New("remote access error")

// remote is a peer's RDMA read or write.
func (n *fakeNIC) remote(key uint32, addr uintptr, size int, right Access) ([]byte, error) {
	n.mu.Lock()
	p := n.keys[key]
	n.mu.Unlock()
	if p == nil || p.access&right == 0 || addr < p.start || addr+uintptr(size) > p.end || addr+uintptr(size) < addr {
		return nil, errRemoteAccess
	}
	return n.ring.read(p.slot, addr, size)
}

func (n *fakeNIC) registered() (entries int, bytes int64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.keys), n.bytes
}

func TestTheNICReadsWhatWasRegistered(t *testing.T) {
	nic := newNIC(t)
	c := newCache(t, nic, Config{})
	b := make([]byte, 300_000)
	fill(b, 7)
	r := acquireAgain(t, c, b, LocalRead)
	got, err := nic.Send(r, b[1000:200_000])
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, b[1000:200_000]) {
		t.Error("the nic read other bytes")
	}
	if err := nic.Stale(r, b); err != nil {
		t.Error(err)
	}
	release(t, r)
}

// The tests that look for stale registrations can find one.
func TestTheNICNoticesReplacedPages(t *testing.T) {
	nic := newNIC(t)
	c := newCache(t, nic, Config{})
	b := mmap(t, mapped)
	stable, err := Declare(b)
	if err != nil {
		t.Fatal(err)
	}
	defer stable.Withdraw()
	fill(b, 1)
	release(t, acquire(t, c, b, LocalRead))
	page := os.Getpagesize()
	replaced := b[page : 2*page]
	if err := unix.Madvise(replaced, unix.MADV_DONTNEED); err != nil { // violates the declaration
		t.Fatal(err)
	}
	fill(replaced, 2)

	r := acquire(t, c, b, LocalRead)
	defer release(t, r)
	if hits := c.Stats().Hits; hits != 1 {
		t.Fatalf("%d hits, want the stale one", hits)
	}
	if err := nic.Stale(r, b[:page]); err != nil {
		t.Errorf("a page that was not replaced: %v", err)
	}
	if err := nic.Stale(r, b); err == nil {
		t.Error("the replaced page has the frame of the registered one")
	}
	got, err := nic.Send(r, replaced)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Equal(got, replaced) {
		t.Error("the nic read the new page, which was not registered")
	}
}
