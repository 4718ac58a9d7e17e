package cachetest

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/regcache"
)

// A Device is what the cache registers with.
type Device interface {
	regcache.Registrar

	// Send returns the bytes that the device reads at the addresses of b, in
	// the pages that were registered for r.
	Send(r *regcache.Region, b []byte) ([]byte, error)
}

// The cache's budget: so small that regions are evicted, even at the pace of an emulated device.
const (
	churnBytes   = 16 << 20
	churnEntries = 16
)

// A Churn does to memory what programs and the runtime do to it, from several goroutines, and registers
// it all the while: buffers that are written, used again and dropped; garbage collection, whose memory
// is given back to the system; mappings that are unmapped, moved and mapped again; stacks that grow;
// child processes; GOMAXPROCS from 1 to 4, GOGC from off to 1. Every region that the cache returns is
// compared with the physical pages, and with what the device reads.
type Churn struct {
	// Duration is the least time that it takes; on a busy machine it goes on until everything has
	// happened. 0 means the value of SAN_TEST_CHURN, or 3 s.
	Duration time.Duration

	// UntilStale ends the churn at the first stale use, which then is the aim; otherwise a stale use is
	// an error.
	UntilStale bool

	t      *testing.T
	cache  *regcache.Cache
	device Device
	until  time.Time

	uses, stale, unknown atomic.Int64
}

// NewChurn returns a churn on a device, through a cache that is closed at the end of the test. It
// replaces a budget in config. It needs CAP_SYS_ADMIN, to see physical pages.
func NewChurn(t *testing.T, device Device, config regcache.Config) *Churn {
	t.Helper()
	config.Budget = regcache.NewBudget(churnBytes, churnEntries)
	cache := regcache.New(newRecorder(t, device), config)
	t.Cleanup(func() {
		if err := cache.Close(); err != nil && !t.Failed() {
			t.Error(err)
		}
	})
	return &Churn{t: t, cache: cache, device: device}
}

// Run runs the churn and returns how many uses of registrations there were,
// and how many of them were stale.
func (ch *Churn) Run() (uses, stale int64) {
	ch.t.Helper()
	ch.until = time.Now().Add(ch.duration())
	ch.run(4)
	s := ch.cache.Stats()
	uses, stale = ch.uses.Load(), ch.stale.Load()
	ch.t.Logf("%d uses, %d stale: %d hits, %d promoted, %d once, %d exposed, %d evicted, %v invalidated; %d times unknown",
		uses, stale, s.Hits, s.Promoted, s.Once, s.Exposed, s.Evictions, s.Invalidated, ch.unknown.Load())
	if ch.UntilStale {
		return uses, stale
	}
	if stale != 0 {
		ch.t.Errorf("%d of %d uses were of stale registrations", stale, uses)
	}
	if !ch.covered() {
		ch.t.Errorf("the test did not reach what it is for: %+v", s)
	}
	return uses, stale
}

func (ch *Churn) duration() time.Duration {
	if ch.Duration != 0 {
		return ch.Duration
	}
	if value, ok := os.LookupEnv("SAN_TEST_CHURN"); ok {
		d, err := time.ParseDuration(value)
		if err != nil {
			ch.t.Fatalf("SAN_TEST_CHURN: %v", err)
		}
		return d
	}
	return 3 * time.Second
}

func (ch *Churn) run(workers int) {
	defer debug.SetGCPercent(debug.SetGCPercent(100))
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(512 << 20)) // with GOGC=off the heap must not use up the machine's memory
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	var wg sync.WaitGroup
	for seed := range workers {
		wg.Add(1)
		go func() {
			defer wg.Done()
			ch.worker(rand.New(rand.NewPCG(uint64(seed), 4)))
		}()
	}
	wg.Add(1)
	go func() {
		defer wg.Done()
		ch.disturb(rand.New(rand.NewPCG(99, 4)))
	}()
	wg.Wait()
}

func (ch *Churn) over() bool {
	switch late := time.Since(ch.until); {
	case ch.t.Failed() || ch.UntilStale && ch.stale.Load() != 0:
		return true
	case late < 0:
		return false
	default: // on a busy machine everything takes longer
		return late > time.Minute || !ch.UntilStale && ch.covered()
	}
}

// covered reports whether everything happened that the test is for.
func (ch *Churn) covered() bool {
	s := ch.cache.Stats()
	return s.Hits != 0 && s.Evictions != 0 && s.Once != 0 && s.Exposed != 0 &&
		s.Invalidated[regcache.ObjectDied] != 0 && s.Invalidated[regcache.RangeWithdrawn] != 0 && s.Invalidated[regcache.MappingChanged] != 0
}

// disturb changes settings of the whole process.
func (ch *Churn) disturb(random *rand.Rand) {
	for !ch.over() {
		switch random.IntN(12) {
		case 0:
			runtime.GOMAXPROCS(1 + random.IntN(4))
		case 1:
			debug.SetGCPercent([]int{-1, 1, 20, 100}[random.IntN(4)])
		case 2:
			if err := exec.Command("true").Run(); err != nil {
				ch.t.Error(err)
			}
		case 3, 4, 5:
			runtime.GC()
		case 6, 7, 8:
			debug.FreeOSMemory()
		default:
			ch.mapping(random)
		}
	}
}

// There are few sizes, so that addresses recur.
var churnSizes = []int{4 << 10, 20_000, 32 << 10, 64 << 10, 100_000, 256 << 10, 1 << 20}

func (ch *Churn) worker(random *rand.Rand) {
	var kept [][]byte
	for !ch.over() {
		switch random.IntN(10) {
		case 0, 1, 2, 3: // a new buffer, used a few times
			b := make([]byte, churnSizes[random.IntN(len(churnSizes))])
			for range 1 + random.IntN(3) {
				ch.use(random, b)
			}
			if len(kept) < 8 {
				kept = append(kept, b)
			}
		case 4, 5, 6, 7: // a buffer that was used before
			if len(kept) > 0 {
				ch.use(random, kept[random.IntN(len(kept))])
			}
		case 8: // a buffer is dropped
			if i := len(kept) - 1; i >= 0 {
				kept[i] = nil
				kept = kept[:i]
			}
		case 9:
			if random.IntN(4) == 0 {
				debug.FreeOSMemory()
			} else {
				ch.stack(2 + random.IntN(12))
			}
		}
	}
}

// use registers a part of b, writes it, and compares it with what the device reads.
func (ch *Churn) use(random *rand.Rand, b []byte) {
	from := random.IntN(len(b) / 2)
	part := b[from : from+1+random.IntN(len(b)-from)]
	access := []regcache.Access{regcache.LocalRead, regcache.LocalRead, regcache.LocalWrite, regcache.BindWindow, regcache.RemoteRead}[random.IntN(5)]
	r, err := ch.cache.Acquire(part, access)
	if err != nil {
		ch.t.Errorf("Acquire(%d bytes of %v memory, %v): %v", len(part), regcache.KindOf(b), access, err)
		return
	}
	ch.uses.Add(1)
	stamp := byte(random.Uint32())
	for i := 0; i < len(part); i += 512 {
		part[i] = stamp
	}
	if err := stale(r, part); err != nil {
		if ch.stale.Add(1) == 1 {
			ch.t.Logf("stale: %v", err)
		}
	}
	if random.IntN(8) == 0 {
		sample := part[:min(len(part), 64<<10)]
		got, err := ch.device.Send(r, sample)
		if err != nil {
			ch.t.Error(err)
		} else if !bytes.Equal(got, sample) {
			ch.stale.Add(1)
		}
	}
	if err := r.Release(); err != nil {
		ch.t.Error(err)
	}
	runtime.KeepAlive(b)
}

// stack offers memory of a stack that grows and is therefore moved.
//
//go:noinline
func (ch *Churn) stack(depth int) {
	var frame [8 << 10]byte
	// The worst that a program could do.
	b := unsafe.Slice((*byte)(hide(unsafe.Pointer(&frame))), len(frame))
	ch.expectUnknown(b)
	if depth > 0 {
		ch.stack(depth - 1)
	}
	frame[depth]++
}

// hide returns p in a way that escape analysis does not recognize. It must not call anything, because
// the address is not a pointer meanwhile.
//
//go:nosplit
//go:norace
//go:nocheckptr
func hide(p unsafe.Pointer) unsafe.Pointer {
	x := uintptr(p)
	return *(*unsafe.Pointer)(unsafe.Pointer(&x))
}

func addressOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// mapping maps memory, declares or watches it, uses it, and puts other memory at its addresses.
func (ch *Churn) mapping(random *rand.Rand) {
	const size = 256 << 10
	b, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		ch.t.Error(err)
		return
	}
	defer unix.Munmap(b)
	b[0] = 1
	ch.expectUnknown(b)
	for range 3 {
		watched := random.IntN(2) == 0
		add := regcache.Declare
		if watched {
			add = regcache.Watch
		}
		r, err := add(b)
		if err != nil {
			ch.t.Error(err)
			return
		}
		ch.use(random, b)
		ch.use(random, b)
		if watched { // the kernel reports it
			ch.replace(random, b)
			ch.expectUnknown(b)
		}
		if err := r.Withdraw(); err != nil {
			ch.t.Error(err)
		}
		if !watched { // the owner has withdrawn it
			ch.replace(random, b)
			ch.expectUnknown(b)
		}
	}
}

func (ch *Churn) expectUnknown(b []byte) {
	ch.unknown.Add(1)
	r, err := ch.cache.Acquire(b, regcache.LocalRead)
	switch {
	case err == nil && ch.UntilStale:
		ch.stale.Add(1)
		r.Release()
	case !errors.Is(err, regcache.ErrUnknownMemory):
		ch.t.Errorf("Acquire of memory that nobody vouches for: %v", err)
	}
}

// replace gives other pages to b's addresses.
func (ch *Churn) replace(random *rand.Rand, b []byte) {
	start := unsafe.Pointer(unsafe.SliceData(b))
	const prot, flags = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_PRIVATE | unix.MAP_ANON
	var err error
	switch random.IntN(3) {
	case 0:
		err = unix.Madvise(b, unix.MADV_DONTNEED)
	case 1:
		_, err = unix.MmapPtr(-1, 0, start, uintptr(len(b)), prot, flags|unix.MAP_FIXED)
	case 2: // moved away, with something new in its place
		var moved unsafe.Pointer
		moved, err = unix.MremapPtr(start, uintptr(len(b)), nil, uintptr(len(b)), unix.MREMAP_MAYMOVE|unix.MREMAP_DONTUNMAP)
		if err == nil {
			err = unix.MunmapPtr(moved, uintptr(len(b)))
		}
	}
	if err != nil {
		ch.t.Error(err)
	}
}
