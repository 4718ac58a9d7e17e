package regcache

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
)

const mapped = 64 << 10

// mmap maps n bytes far from where the kernel places mappings. Otherwise, in a test that unmaps them and
// maps them again, the runtime might now and then get the addresses in between, and the end of the test
// would unmap the runtime's memory.
func mmap(t testing.TB, n int) []byte {
	t.Helper()
	place := unsafe.Add(unsafe.Pointer(nil), places+lastPlace.Add(placeEach))
	if n > placeEach {
		t.Fatalf("%d bytes are more than a place has", n)
	}
	_, err := unix.MmapPtr(-1, 0, place, uintptr(n), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_FIXED_NOREPLACE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.MunmapPtr(place, uintptr(n)) })
	return unsafe.Slice((*byte)(place), n)
}

// lastPlace is the address that mmap has used last. The addresses are between the program and those that
// the kernel chooses, with a race detector (see its tsan_platform.h) and without.
var lastPlace atomic.Uintptr

const (
	places    = 1 << (30 + 11*(^uintptr(0)>>63)) // 1<<41, if an address has 64 bits
	placeEach = 1 << (20 + 10*(^uintptr(0)>>63))
)

func watch(t testing.TB, b []byte) *Range {
	t.Helper()
	r, err := Watch(b)
	if err != nil {
		testenv.Missing(t, fmt.Sprintf("userfaultfd: %v", err))
	}
	return r
}

// mappingChanges are the changes that end a watch of b.
var mappingChanges = map[string]func(b []byte) error{
	"munmap and mmap": func(b []byte) error {
		if err := unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(b)), uintptr(len(b))); err != nil {
			return err
		}
		return mapAt(b, unix.MAP_FIXED_NOREPLACE)
	},
	"mmap over it":            func(b []byte) error { return mapAt(b, unix.MAP_FIXED) },
	"mmap over its last page": func(b []byte) error { return mapAt(b[len(b)-os.Getpagesize():], unix.MAP_FIXED) },
	"mremap away": func(b []byte) error {
		start := unsafe.Pointer(unsafe.SliceData(b))
		moved, err := unix.MremapPtr(start, uintptr(len(b)), nil, uintptr(len(b)), unix.MREMAP_MAYMOVE|unix.MREMAP_DONTUNMAP)
		if err != nil {
			return err
		}
		return unix.MunmapPtr(moved, uintptr(len(b)))
	},
	"madvise DONTNEED": func(b []byte) error { return unix.Madvise(b, unix.MADV_DONTNEED) },
	"madvise FREE":     func(b []byte) error { return unix.Madvise(b, unix.MADV_FREE) },
}

// mapAt makes a mapping at the addresses of b.
func mapAt(b []byte, flag int) error {
	_, err := unix.MmapPtr(-1, 0, unsafe.Pointer(unsafe.SliceData(b)), uintptr(len(b)),
		unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|flag)
	return err
}

func TestAWatchedRangeEndsWithItsMapping(t *testing.T) {
	for name, change := range mappingChanges {
		t.Run(name, func(t *testing.T) {
			nic := newNIC(t)
			c := newCache(t, nic, Config{})
			b := mmap(t, mapped)
			r := watch(t, b)
			defer r.Withdraw()

			release(t, acquire(t, c, b, LocalRead))
			release(t, acquire(t, c, b[100:200], LocalRead))
			if s := c.Stats(); s.Hits != 1 || s.Registrations != 1 {
				t.Fatalf("before: %d hits, %d registrations; want 1, 1", s.Hits, s.Registrations)
			}
			if err := change(b); err != nil {
				t.Fatal(err)
			}
			if _, err := c.Acquire(b, LocalRead); !errors.Is(err, ErrUnknownMemory) {
				t.Errorf("after: %v, want ErrUnknownMemory", err)
			}
			<-r.watch.done
			if entries, _ := nic.registered(); entries != 0 {
				t.Errorf("%d registrations left", entries)
			}

			again := watch(t, b)
			second := acquire(t, c, b, LocalRead)
			b[0]++
			if err := nic.Stale(second, b); err != nil {
				t.Error(err)
			}
			release(t, second)
			if err := again.Withdraw(); err != nil {
				t.Error(err)
			}
			if s := c.Stats(); s.Invalidated[MappingChanged] != 1 || s.Invalidated[RangeWithdrawn] != 1 {
				t.Errorf("invalidated: %v", s.Invalidated)
			}
		})
	}
}

// contested is a range of addresses that two threads map in turn.
type contested struct {
	t   *testing.T
	nic *fakeNIC
	c   *Cache
	b   []byte // valid while it is mapped
}

// take maps the range, and reports whether that was possible.
func (p *contested) take() bool {
	if mapAt(p.b, unix.MAP_FIXED_NOREPLACE) == nil {
		return true
	}
	runtime.Gosched() // the other thread has mapped it
	return false
}

func (p *contested) leave() {
	if err := unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(p.b)), uintptr(len(p.b))); err != nil {
		p.t.Error(err)
	}
}

// register watches and registers the mapping, and unmaps it.
func (p *contested) register() {
	r := watch(p.t, p.b)
	defer r.Withdraw()
	defer p.leave()
	region, err := p.c.Acquire(p.b, LocalRead)
	if err != nil {
		p.t.Error(err)
		return
	}
	p.b[0] = 1
	if err := p.nic.Stale(region, p.b[:1]); err != nil {
		p.t.Error(err)
	}
	region.Release()
}

// meet checks that the cache has no registration of the mapping before this one.
func (p *contested) meet() {
	p.b[0] = 2
	if region, err := p.c.Acquire(p.b, LocalRead); err == nil {
		p.t.Errorf("a registration of the mapping that was here before: stale: %v", p.nic.Stale(region, p.b[:1]))
		region.Release()
	} else if !errors.Is(err, ErrUnknownMemory) {
		p.t.Error(err)
	}
	p.leave()
}

// The kernel reports an unmapping after it is done. If another thread maps memory at the same addresses
// at once, it must not get the old registration.
func TestANewMappingIsNeverTakenForItsPredecessor(t *testing.T) {
	const rounds = 200
	nic := newNIC(t)
	p := &contested{t: t, nic: nic, c: newCache(t, nic, Config{}), b: mmap(t, mapped)}
	p.leave()
	var first sync.WaitGroup
	var over atomic.Bool
	var met atomic.Int64
	end := time.Now().Add(time.Minute)
	first.Go(func() {
		defer over.Store(true)
		for done := 0; (done < rounds || met.Load() == 0 && time.Now().Before(end)) && !t.Failed(); {
			if p.take() {
				done++
				p.register()
			}
		}
	})
	for !over.Load() {
		if p.take() {
			met.Add(1)
			p.meet()
		}
	}
	first.Wait()
	if met.Load() == 0 {
		t.Error("no mapping was met")
	}
}

func TestWatchRefusesMemoryItCannotVouchFor(t *testing.T) {
	page := os.Getpagesize()
	heap := make([]byte, 16*page)
	for name, b := range map[string][]byte{
		"heap":        heap[-addressOf(heap)%uintptr(page):][:page],
		"not a page":  mmap(t, mapped)[100:][:page],
		"half a page": mmap(t, mapped)[:page/2],
		"nothing":     nil,
		"shared":      sharedMemory(t, unix.MAP_SHARED),
		"a file's":    sharedMemory(t, unix.MAP_PRIVATE),
		"half shared": halfShared(t),
	} {
		if _, err := Watch(b); !errors.Is(err, unix.EINVAL) {
			t.Errorf("%s: %v, want EINVAL", name, err)
		}
	}
	readOnly, err := unix.Mmap(-1, 0, page, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	unix.Munmap(readOnly)
	if _, err := Watch(readOnly); err == nil {
		t.Error("memory that is not mapped was watched")
	}
}

// sharedMemory maps a file without a name: any process that has it can punch holes into it and truncate
// it, which no userfaultfd reports.
func sharedMemory(t *testing.T, flag int) []byte {
	t.Helper()
	fd, err := unix.MemfdCreate("watch", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, mapped); err != nil {
		t.Fatal(err)
	}
	b, err := unix.Mmap(fd, 0, mapped, unix.PROT_READ|unix.PROT_WRITE, flag)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(b) })
	return b
}

// The mapping below may be of a file offset that is larger than memory can be on 32 bits.
func TestMemoryBesideALargeFileIsFoundPrivate(t *testing.T) {
	fd, err := unix.MemfdCreate("watch", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	b := mmap(t, mapped)
	page := os.Getpagesize()
	_, err = unix.MmapPtr(fd, 1<<40, unsafe.Pointer(unsafe.SliceData(b)), uintptr(page), unix.PROT_READ, unix.MAP_SHARED|unix.MAP_FIXED)
	if err != nil {
		t.Fatal(err)
	}
	for from, want := range map[int]bool{0: false, page: true} {
		if private, err := privateAnonymous(b[from:]); private != want || err != nil {
			t.Errorf("from %d on: %v, %v; want %v", from, private, err, want)
		}
	}
}

// halfShared is private only in its first half.
func halfShared(t *testing.T) []byte {
	t.Helper()
	b := mmap(t, mapped)
	half := b[mapped/2:]
	if _, err := unix.MmapPtr(-1, 0, unsafe.Pointer(unsafe.SliceData(half)), uintptr(len(half)),
		unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANON|unix.MAP_FIXED); err != nil {
		t.Fatal(err)
	}
	return b
}

func TestWithdrawLeavesNoDescriptor(t *testing.T) {
	b := mmap(t, mapped)
	watch(t, b).Withdraw()
	before := descriptors(t)
	for range 50 {
		r := watch(t, b)
		if err := r.Withdraw(); err != nil {
			t.Fatal(err)
		}
	}
	if after := descriptors(t); after != before {
		t.Errorf("%d descriptors, %d before", after, before)
	}
}

// A forked child that has not executed anything yet has the descriptor too. Withdraw must end the watch
// nevertheless: otherwise the memory would stay registered with the userfaultfd.
func TestWithdrawEndsTheWatchThoughAChildHasTheDescriptor(t *testing.T) {
	b := mmap(t, mapped)
	r := watch(t, b)
	inherited, err := unix.Dup(int(r.watch.fd))
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(inherited)
	if err := r.Withdraw(); err != nil {
		t.Error(err)
	}
	again, err := Watch(b)
	if err != nil {
		t.Fatalf("it is watched still: %v", err)
	}
	if err := again.Withdraw(); err != nil {
		t.Error(err)
	}
	if err := unix.Madvise(b, unix.MADV_DONTNEED); err != nil {
		t.Error(err)
	}
}

func descriptors(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}
