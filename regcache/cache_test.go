package regcache

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"
)

// book is a device that only keeps a record of its registrations.
type book struct {
	limit  int64                // bytes in all; 0: any
	refuse func(n int) error    // when set: asked before each registration
	onDrop func(r registration) // when set: called before each deregistration
	keep   error                // when set: what each deregistration fails with

	mu    sync.Mutex
	live  map[uint32]registration
	bytes int64
	next  uint32
	made  int
}

type registration struct {
	start, end uintptr
	access     Access
}

func (d *book) Register(addr uintptr, n int, access Access) (MR, error) {
	if d.refuse != nil {
		if err := d.refuse(n); err != nil {
			return MR{}, err
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.limit != 0 && d.bytes+int64(n) > d.limit {
		return MR{}, fmt.Errorf("book: %w", syscall.ENOMEM)
	}
	if d.live == nil {
		d.live = make(map[uint32]registration)
	}
	d.next++
	d.made++
	d.bytes += int64(n)
	d.live[d.next] = registration{addr, addr + uintptr(n), access}
	return MR{LKey: d.next, RKey: d.next}, nil
}

func (d *book) Deregister(mr MR) error {
	d.mu.Lock()
	r, ok := d.live[mr.LKey]
	d.mu.Unlock()
	if !ok {
		return fmt.Errorf("book: key %d: %w", mr.LKey, syscall.EINVAL)
	}
	if d.onDrop != nil {
		d.onDrop(r)
	}
	if d.keep != nil {
		return d.keep
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.live, mr.LKey)
	d.bytes -= int64(r.end - r.start)
	return nil
}

func (d *book) registrations() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.made
}

func (d *book) registered() (entries int, bytes int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.live), d.bytes
}

// covers reports whether key stands for a live registration of b with access.
func (d *book) covers(key uint32, b []byte, access Access) error {
	d.mu.Lock()
	r, ok := d.live[key]
	d.mu.Unlock()
	start := addressOf(b)
	switch {
	case !ok:
		return fmt.Errorf("key %d is not registered", key)
	case start < r.start || start+uintptr(len(b)) > r.end:
		return fmt.Errorf("[%#x, +%d) is not in [%#x, %#x)", start, len(b), r.start, r.end)
	case r.access&access != access:
		return fmt.Errorf("rights %v, want %v", r.access, access)
	}
	return nil
}

func fill(b []byte, seed byte) {
	for i := range b {
		b[i] = byte(i)*31 + seed
	}
}

func newCache(t testing.TB, r Registrar, config Config) *Cache {
	t.Helper()
	if config.Budget == nil {
		config.Budget = NewBudget(64<<20, 1024)
	}
	c, err := New(r, config)
	if err != nil {
		t.Fatal(err)
	}
	// This runs before the device's own Cleanup. A registration of an object that dies
	// later would be removed from a closed descriptor, or from the next device with its
	// number.
	t.Cleanup(func() {
		if err := c.Close(); err != nil && !t.Failed() {
			t.Errorf("%v: the test has not released everything", err)
		}
	})
	return c
}

func acquire(t testing.TB, c *Cache, b []byte, access Access) *Region {
	t.Helper()
	r, err := c.Acquire(b, access)
	if err != nil {
		t.Fatalf("Acquire(%d bytes, %v): %v", len(b), access, err)
	}
	return r
}

func release(t testing.TB, r *Region) {
	t.Helper()
	if err := r.Release(); err != nil {
		t.Fatalf("Release: %v", err)
	}
}

// expectRegistrations fails unless the device was asked n times so far.
func expectRegistrations(t testing.TB, d *book, n int) {
	t.Helper()
	if made := d.registrations(); made != n {
		t.Errorf("the device registered %d times, want %d", made, n)
	}
}

// expectEmpty fails unless the device holds nothing.
func expectEmpty(t testing.TB, d *book) {
	t.Helper()
	if entries, bytes := d.registered(); entries != 0 || bytes != 0 {
		t.Errorf("the device holds %d registrations of %d bytes, want none", entries, bytes)
	}
}

var variable [100_000]byte

func TestKindsOfMemory(t *testing.T) {
	stack := make(chan Kind)
	go func() {
		var frame [4096]byte
		stack <- KindOf(unsafe.Slice((*byte)(hide(unsafe.Pointer(&frame))), len(frame)))
		frame[0]++
	}()
	constant := "read-only data of the program"
	arena := NewArena(0, 0)
	defer arena.Close()
	buffer, err := arena.Get(5000)
	if err != nil {
		t.Fatal(err)
	}
	defer buffer.Put()
	large := make([]byte, 10<<20)
	for _, c := range []struct {
		name string
		got  Kind
		want Kind
	}{
		{"nil", KindOf(nil), Unknown},
		{"empty", KindOf(large[:0]), Unknown},
		{"past the end", KindOf(large[len(large):]), Unknown},
		{"large object", KindOf(large), Heap},
		{"inside of it", KindOf(large[5<<20:][:1]), Heap},
		{"its last byte", KindOf(large[len(large)-1:]), Heap},
		{"tiny object", KindOf(append([]byte(nil), 1, 2, 3)), Heap},
		{"variable", KindOf(variable[:]), Global},
		{"its last byte", KindOf(variable[len(variable)-1:]), Global},
		{"constant", KindOf(unsafe.Slice(unsafe.StringData(constant), len(constant))), Unknown},
		{"stack", <-stack, Unknown},
		{"arena", KindOf(buffer.Bytes()), Declared},
	} {
		if c.got != c.want {
			t.Errorf("%s: %v, want %v", c.name, c.got, c.want)
		}
	}
}

// A stack may move at any call, even one that asks about it. What it leaves behind is not
// Go's memory any more, and asking about that is fatal.
func TestStacksThatMoveWhileTheyAreAskedAbout(t *testing.T) {
	c := newCache(t, &book{}, Config{Eager: true})
	var wg sync.WaitGroup
	for depth := range 2000 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			askAboutStack(t, c, depth%40)
		}()
		if depth%100 == 0 {
			runtime.GC() // shrinks
		}
	}
	wg.Wait()
}

//go:noinline
func askAboutStack(t *testing.T, c *Cache, depth int) {
	var frame [3000]byte
	if depth > 0 {
		askAboutStack(t, c, depth-1)
	}
	b := unsafe.Slice((*byte)(hide(unsafe.Pointer(&frame))), len(frame))
	if r, err := c.Acquire(b, LocalRead); !errors.Is(err, ErrUnknownMemory) {
		t.Errorf("Acquire of a stack: %v, %v", r, err)
	}
	frame[depth]++
}

// hide returns p in a way that escape analysis does not see. It must not call
// anything, for the address is no pointer in between.
//
//go:nosplit
//go:norace
//go:nocheckptr
func hide(p unsafe.Pointer) unsafe.Pointer {
	x := uintptr(p)
	return *(*unsafe.Pointer)(unsafe.Pointer(&x))
}

func TestAPartOfARegisteredBufferIsAHit(t *testing.T) {
	d := &book{}
	c := newCache(t, d, Config{Eager: true})
	b := make([]byte, 1<<20)
	release(t, acquire(t, c, b, LocalRead))
	for _, part := range [][]byte{b, b[:1], b[len(b)-1:], b[1000:50_000]} {
		r := acquire(t, c, part, LocalRead)
		if err := d.covers(r.LKey(), part, LocalRead); err != nil {
			t.Error(err)
		}
		release(t, r)
	}
	expectRegistrations(t, d, 1)
	if s := c.Stats(); s.Hits != 4 || s.Misses != 1 || s.Entries != 1 || s.Bytes != 1<<20 {
		t.Errorf("%+v", s)
	}
	runtime.KeepAlive(b)
}

// A region serves what lies in it to the last byte, and nothing beyond.
func TestTheIndexKeepsToTheBounds(t *testing.T) {
	var x index
	r := &Region{start: 0x1000, end: 0x2000}
	x.insert(r)
	for _, c := range []struct {
		start, end uintptr
		want       *Region
	}{{0x1000, 0x2000, r}, {0x1fff, 0x2000, r}, {0x1000, 0x2001, nil}, {0xfff, 0x2000, nil}, {0x2000, 0x2001, nil}} {
		if got := x.find(c.start, c.end); got != c.want {
			t.Errorf("[%#x, %#x): %v, want %v", c.start, c.end, got, c.want)
		}
	}
}

// A registration that fails gives its room in the budget back.
func TestAFailedRegistrationTakesNoRoom(t *testing.T) {
	d := &book{refuse: func(int) error { return syscall.EIO }}
	budget := NewBudget(1<<20, 100)
	c := newCache(t, d, Config{Budget: budget, Eager: true})
	for range 3 {
		if _, err := c.Acquire(make([]byte, 64<<10), LocalRead); !errors.Is(err, syscall.EIO) {
			t.Errorf("Acquire: %v, want EIO", err)
		}
	}
	if budget.bytes != 0 || budget.entries != 0 {
		t.Errorf("%v", budget)
	}
}

// If a declaration is withdrawn while its memory is being registered, no cache keeps it.
func TestWithdrawnWhileItIsRegistered(t *testing.T) {
	d := &book{}
	c := newCache(t, d, Config{})
	b := make([]byte, 64<<10)
	stable, err := Declare(b)
	if err != nil {
		t.Fatal(err)
	}
	d.refuse = func(int) error { return stable.Withdraw() }
	release(t, acquire(t, c, b, LocalRead))
	expectEmpty(t, d)
}

// A slice that reaches beyond its object was not made by Go.
func TestASliceBeyondItsObjectIsUnknown(t *testing.T) {
	const size, pages = 1 << 10, 8 << 10 // several objects of that size share a span of so many bytes
	var all [2 * pages / size][]byte
	for i := range all {
		all[i] = make([]byte, size)
	}
	for _, b := range all {
		if addressOf(b)%pages+2*size > pages {
			continue // the next object may be in another span
		}
		header := struct {
			start    unsafe.Pointer
			len, cap int
		}{unsafe.Pointer(&b[0]), size + 1, size + 1}
		if k := KindOf(*(*[]byte)(unsafe.Pointer(&header))); k != Unknown {
			t.Errorf("one byte of the next object makes it %v", k)
		}
		if k := KindOf(b); k != Heap {
			t.Errorf("the object is %v", k)
		}
	}
	runtime.KeepAlive(&all)
}

func TestAHitAllocatesNothing(t *testing.T) {
	c := newCache(t, &book{}, Config{Eager: true})
	b := make([]byte, 64<<10)
	release(t, acquire(t, c, b, LocalRead))
	if n := testing.AllocsPerRun(100, func() {
		r, err := c.Acquire(b, LocalRead)
		if err != nil {
			t.Fatal(err)
		}
		r.Release()
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestWhatIsLargerThanMemlockIsNotTried(t *testing.T) {
	d := &book{}
	budget := NewBudget(32<<10, 10)
	budget.memlock = 64 << 10
	c := newCache(t, d, Config{Eager: true, Budget: budget})
	small := make([]byte, 4<<10)
	release(t, acquire(t, c, small, LocalRead))
	if _, err := c.Acquire(make([]byte, 100<<10), LocalRead); !errors.Is(err, syscall.ENOBUFS) {
		t.Errorf("error %v, want ENOBUFS", err)
	}
	release(t, acquire(t, c, small, LocalRead))
	expectRegistrations(t, d, 1) // and what was cached still is
}

func TestTheObjectIsRegisteredFromItsStart(t *testing.T) {
	d := &book{}
	c := newCache(t, d, Config{Eager: true})
	b := make([]byte, 64<<10)
	release(t, acquire(t, c, b[30_000:], LocalRead))
	release(t, acquire(t, c, b, LocalRead))
	expectRegistrations(t, d, 1)
	runtime.KeepAlive(b)
}

// The old idiom for memory of C, with a capacity far beyond the object.
func TestACapacityThatIsNotTheObjectsIsNotRegistered(t *testing.T) {
	d := &book{}
	c := newCache(t, d, Config{Eager: true})
	object := make([]byte, 8<<10)
	header := struct {
		start    unsafe.Pointer
		len, cap int
	}{unsafe.Pointer(&object[0]), len(object), 1 << 20}
	b := *(*[]byte)(unsafe.Pointer(&header))
	r := acquire(t, c, b, LocalRead)
	if start, n := r.Range(); start != addressOf(object) || n != len(object) {
		t.Errorf("[%#x, +%d) is registered, the object is [%#x, +%d)", start, n, addressOf(object), len(object))
	}
	release(t, r)
}

func TestRightsArePartOfTheMatch(t *testing.T) {
	d := &book{}
	c := newCache(t, d, Config{Eager: true})
	b := make([]byte, 64<<10)
	reading := acquire(t, c, b, LocalRead)
	if err := d.covers(reading.LKey(), b, LocalWrite); err == nil {
		t.Error("a registration for reading can write")
	}
	writing := acquire(t, c, b, LocalWrite)
	if err := d.covers(writing.LKey(), b, LocalWrite); err != nil {
		t.Error(err)
	}
	if err := d.covers(reading.LKey(), b, LocalRead); err != nil {
		t.Errorf("the one in use was taken away: %v", err)
	}
	release(t, reading)
	release(t, writing)
	release(t, acquire(t, c, b, LocalRead)) // the wider serves both
	expectRegistrations(t, d, 2)
	if entries, _ := d.registered(); entries != 1 {
		t.Errorf("%d registrations, want the merged one", entries)
	}
	runtime.KeepAlive(b)
}

func TestOverlappingRangesMerge(t *testing.T) {
	d := &book{}
	c := newCache(t, d, Config{Eager: true, Budget: NewBudget(1<<30, 100)})
	b := make([]byte, 64<<20) // too large to be registered as a whole
	release(t, acquire(t, c, b[0:8<<20], LocalRead))
	release(t, acquire(t, c, b[4<<20:12<<20], LocalRead))
	release(t, acquire(t, c, b[0:12<<20], LocalRead))
	expectRegistrations(t, d, 2)
	if s := c.Stats(); s.Merges != 1 || s.Entries != 1 {
		t.Errorf("%d merges, %d entries; want 1, 1", s.Merges, s.Entries)
	}
	runtime.KeepAlive(b)
}

// An object that is worked through in overlapping steps must not be registered
// from its start again and again.
func TestMergingEnds(t *testing.T) {
	d := &book{}
	c := newCache(t, d, Config{Eager: true, Budget: NewBudget(1<<30, 1000)})
	b := make([]byte, 256<<20)
	const step = 1 << 20
	for at := 0; at+2*step <= len(b); at += step {
		release(t, acquire(t, c, b[at:at+step+1], LocalRead))
	}
	for _, r := range d.live {
		if n := r.end - r.start; n > mergeGrowth*(step+1) {
			t.Errorf("a step of %d bytes grew to a registration of %d", step, n)
		}
	}
	runtime.KeepAlive(b)
}

func TestALargeObjectSentPieceByPieceIsRegisteredOnce(t *testing.T) {
	for _, eager := range []bool{false, true} {
		registered := 0
		d := &book{refuse: func(n int) error { registered += n; return nil }}
		c := newCache(t, d, Config{Eager: eager, Budget: NewBudget(1<<30, 1000)})
		b := make([]byte, 64<<20)
		const piece = 1 << 20
		for at := 0; at < len(b); at += piece {
			release(t, acquire(t, c, b[at:at+piece], LocalRead))
		}
		if limit := len(b) + 4*piece; registered > limit {
			t.Errorf("eager %v: %d bytes were registered to send %d", eager, registered, len(b))
		}
		runtime.KeepAlive(b)
	}
}

func TestABufferUsedOnceIsNotCached(t *testing.T) {
	d := &book{}
	c := newCache(t, d, Config{})
	b := make([]byte, 64<<10)
	release(t, acquire(t, c, b, LocalRead))
	expectEmpty(t, d)
	release(t, acquire(t, c, b, LocalRead))
	release(t, acquire(t, c, b, LocalRead))
	release(t, acquire(t, c, b, LocalRead))
	expectRegistrations(t, d, 2)
	if s := c.Stats(); s.Once != 1 || s.Promoted != 1 || s.Hits != 2 {
		t.Errorf("once %d, promoted %d, hits %d; want 1, 1, 2", s.Once, s.Promoted, s.Hits)
	}
	runtime.KeepAlive(b)
}

func TestTheLeastRecentlyUsedGoes(t *testing.T) {
	d := &book{}
	c := newCache(t, d, Config{Eager: true, Budget: NewBudget(1<<30, 3)})
	buffers := make([][]byte, 4)
	for i := range buffers {
		buffers[i] = make([]byte, 64<<10)
	}
	for _, i := range []int{0, 1, 2, 0} {
		release(t, acquire(t, c, buffers[i], LocalRead))
	}
	release(t, acquire(t, c, buffers[3], LocalRead)) // in place of 1
	expectRegistrations(t, d, 4)
	for _, i := range []int{2, 0, 3} {
		release(t, acquire(t, c, buffers[i], LocalRead))
	}
	expectRegistrations(t, d, 4)
	release(t, acquire(t, c, buffers[1], LocalRead))
	expectRegistrations(t, d, 5)
	runtime.KeepAlive(buffers)
}

func TestWhatIsInUseStays(t *testing.T) {
	d := &book{}
	c := newCache(t, d, Config{Eager: true, Budget: NewBudget(128<<10, 100)})
	first, second, third := make([]byte, 64<<10), make([]byte, 64<<10), make([]byte, 64<<10)
	c.config.Eager = true
	// 64 KiB are more than a quarter of the budget, hence not "whole objects",
	// but two of them fill it.
	a := acquire(t, c, first, LocalRead)
	b := acquire(t, c, second, LocalRead)
	beside := acquire(t, c, third, LocalRead)
	if s := c.Stats(); s.Full != 1 || s.Evictions != 0 || s.Entries != 2 {
		t.Errorf("full %d, evicted %d, entries %d; want 1, 0, 2", s.Full, s.Evictions, s.Entries)
	}
	for _, r := range []*Region{a, b, beside} {
		release(t, r)
	}
	if s := c.Stats(); s.PinnedBytes != 128<<10 {
		t.Errorf("%d bytes pinned after release, want the budget's", s.PinnedBytes)
	}
	runtime.KeepAlive([][]byte{first, second, third})
}

// However much is in use or was used recently, everything else is found.
func TestRoomIsMadeBehindWhatIsInUse(t *testing.T) {
	for held := range 9 {
		d := &book{}
		budget := NewBudget(64<<20, 1024)
		c := newCache(t, d, Config{Budget: budget, Eager: true})
		var buffers [][]byte
		var regions []*Region
		for range 2 * held {
			b := make([]byte, 64<<10)
			buffers = append(buffers, b)
			r := acquire(t, c, b, LocalRead)
			if len(regions) < held {
				regions = append(regions, r)
			} else {
				release(t, r)
			}
		}
		for _, b := range buffers {
			release(t, acquire(t, c, b, LocalRead))
		}
		if s := c.Stats(); s.IdleBytes != int64(held)*64<<10 || s.Bytes != 2*s.IdleBytes {
			t.Errorf("%d in use: %d bytes idle of %d", held, s.IdleBytes, s.Bytes)
		}
		budget.SetLimits(0, 0)
		if s := c.Stats(); s.Entries != held || s.IdleBytes != 0 {
			t.Errorf("%d in use: %d stay, %d bytes of them idle", held, s.Entries, s.IdleBytes)
		}
		for _, r := range regions {
			release(t, r)
		}
		runtime.KeepAlive(buffers)
	}
}

// A region that one goroutine is giving back may be the room that another needs.
func TestNobodyIsRefusedWhatIsOnItsWayOut(t *testing.T) {
	d := &book{limit: 1 << 20}
	dropping, refused := make(chan struct{}), make(chan struct{})
	d.onDrop = func(registration) {
		close(dropping) // once: there is one
		<-refused
	}
	c := newCache(t, d, Config{Eager: true})
	release(t, acquire(t, c, make([]byte, 1<<20), LocalRead))
	flushed := make(chan struct{})
	go func() {
		defer close(flushed)
		c.budget.Flush()
	}()
	<-dropping
	var asked atomic.Int32
	d.refuse = func(int) error {
		if asked.Add(1) == 1 {
			time.AfterFunc(10*time.Millisecond, func() { close(refused) })
		}
		return nil
	}
	r, err := c.Acquire(make([]byte, 256<<10), LocalRead)
	if err != nil {
		t.Fatalf("with nothing in use: %v", err)
	}
	<-flushed
	release(t, r)
	d.onDrop = nil
}

// A device that hangs does not hold up users of another.
func TestRoomIsMadeBesideADeviceThatHangs(t *testing.T) {
	hanging, healthy := &book{}, &book{}
	hangs := make(chan struct{})
	hanging.onDrop = func(registration) { <-hangs }
	budget := NewBudget(64<<20, 1)
	one := newCache(t, hanging, Config{Budget: budget, Eager: true})
	two := newCache(t, healthy, Config{Budget: budget, Eager: true})
	// If it is waited for after all, it goes on then, and the test fails because of that.
	late := time.AfterFunc(10*time.Second, func() { close(hangs) })

	a, b := make([]byte, 64<<10), make([]byte, 64<<10)
	release(t, acquire(t, one, a, LocalRead))
	release(t, acquire(t, two, b, LocalRead)) // evicts a
	release(t, acquire(t, one, a, LocalRead)) // evicts b
	release(t, acquire(t, two, b, LocalWrite))
	budget.SetLimits(64<<20, 2)
	release(t, acquire(t, one, a, LocalRead))
	budget.Flush()
	if entries, _ := hanging.registered(); entries != 3 {
		t.Errorf("%d registrations on the device that hangs, want 3", entries)
	}
	if late.Stop() {
		close(hangs)
	}
	runtime.KeepAlive([][]byte{a, b})
}

// A caller who learns that memory is not registered any more may unmap it.
func TestADeviceThatKeepsARegistrationIsReported(t *testing.T) {
	d := &book{}
	c, err := New(d, Config{Budget: NewBudget(64<<20, 1024)})
	if err != nil {
		t.Fatal(err)
	}
	arena := NewArena(0, 0)
	memory := get(t, arena, 64<<10)
	b := memory.Bytes()
	release(t, acquire(t, c, b, LocalRead))
	memory.Put()
	d.keep = syscall.EBUSY
	if err := arena.Close(); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("Arena.Close: %v, want EBUSY", err)
	}
	b[0]++ // still mapped
	if s := c.Stats(); s.DeregisterFailed != 1 || s.PinnedBytes != defaultChunk {
		t.Errorf("%d not deregistered, %d bytes pinned; want 1, %d", s.DeregisterFailed, s.PinnedBytes, defaultChunk)
	}
	for range 2 {
		if err := c.Close(); !errors.Is(err, syscall.EBUSY) {
			t.Errorf("Cache.Close: %v, want EBUSY", err)
		}
	}
	if len(c.budget.caches) != 0 {
		t.Error("the cache still counts")
	}
}

// RLIMIT_MEMLOCK counts pages.
func TestPagesAreCounted(t *testing.T) {
	d := &book{}
	c := newCache(t, d, Config{Eager: true})
	page := os.Getpagesize()
	b := make([]byte, 1<<20)
	r := acquire(t, c, b[page-1:][:page+2], RemoteRead) // exactly; and its pin below
	want := int64(3*page) + c.Stats().Bytes
	if s := c.Stats(); s.Bytes%int64(page) != 0 || s.PinnedBytes != want {
		t.Errorf("%d bytes cached, %d pinned, want whole pages and %d", s.Bytes, s.PinnedBytes, want)
	}
	release(t, r)
	runtime.KeepAlive(b)
}

func TestADeviceOutOfMemoryGetsTheUnusedBack(t *testing.T) {
	d := &book{limit: 256 << 10}
	c := newCache(t, d, Config{Eager: true})
	small := make([][]byte, 4)
	for i := range small {
		small[i] = make([]byte, 64<<10)
		release(t, acquire(t, c, small[i], LocalRead))
	}
	large := make([]byte, 200<<10)
	r := acquire(t, c, large, LocalRead)
	if s := c.Stats(); s.Flushes != 1 || s.Evictions != 4 {
		t.Errorf("%d flushes, %d evictions; want 1, 4", s.Flushes, s.Evictions)
	}

	// With that one in use there is nothing to give back.
	_, err := c.Acquire(make([]byte, 100<<10), LocalRead)
	if !errors.Is(err, syscall.ENOBUFS) {
		t.Errorf("error %v, want ENOBUFS", err)
	}
	if s := c.Stats(); s.Refused == 0 {
		t.Error("the refusal was not counted")
	}
	release(t, r)
	release(t, acquire(t, c, make([]byte, 100<<10), LocalRead))
	runtime.KeepAlive(small)
}

func TestAFailingDeviceIsReportedAndForgotten(t *testing.T) {
	broken := errors.New("broken")
	d := &book{refuse: func(int) error { return broken }}
	c := newCache(t, d, Config{Eager: true})
	b := make([]byte, 64<<10)
	if _, err := c.Acquire(b, LocalRead); !errors.Is(err, broken) {
		t.Errorf("error %v, want the device's", err)
	}
	if s := c.Stats(); s.Entries != 0 || s.Bytes != 0 || s.PinnedEntries != 0 || s.Failed == 0 {
		t.Errorf("%+v", s)
	}
	d.refuse = nil
	release(t, acquire(t, c, b, LocalRead))
}

// A whole object may be refused when the part that was asked for is not.
func TestThePartIsRegisteredWhenTheWholeIsRefused(t *testing.T) {
	d := &book{limit: 100 << 10}
	c := newCache(t, d, Config{Eager: true})
	b := make([]byte, 1<<20)
	r := acquire(t, c, b[60<<10:][:64<<10], LocalRead)
	if _, n := r.Range(); n != 64<<10 {
		t.Errorf("%d bytes registered", n)
	}
	release(t, r)
	expectEmpty(t, d)
}

// A guard page, or the end of a file, beside the bytes that are used.
func TestThePartIsCachedWhenTheWholeCannotBeRegistered(t *testing.T) {
	const part = 8 << 10
	d := &book{refuse: func(n int) error {
		if n > part {
			return syscall.EFAULT
		}
		return nil
	}}
	c := newCache(t, d, Config{})
	b := make([]byte, 64<<10)
	declared, err := Declare(b)
	if err != nil {
		t.Fatal(err)
	}
	for range 10 {
		release(t, acquire(t, c, b[part:2*part], LocalRead))
	}
	if s := c.Stats(); s.Hits != 9 || s.Full != 0 {
		t.Errorf("%d hits of 9, %d found no room", s.Hits, s.Full)
	}
	if err := declared.Withdraw(); err != nil {
		t.Error(err)
	}
}

// Go has one goroutine for cleanups per four processors, so none of them may wait for a
// device.
func TestASlowDeviceHoldsUpNoCleanups(t *testing.T) {
	d := &book{}
	others := make(chan struct{})
	d.onDrop = func(registration) { <-others }
	c := newCache(t, d, Config{Eager: true})
	answer := sync.OnceFunc(func() { close(others) })
	t.Cleanup(answer)
	for died := range uint64(runtime.GOMAXPROCS(0)/4 + 1) {
		release(t, acquire(t, c, make([]byte, 64<<10), LocalRead))
		within(t, func() bool {
			runtime.GC()
			return c.Stats().Invalidated[ObjectDied] > died
		})
	}
	ran := make(chan struct{})
	runtime.AddCleanup(new([1 << 16]byte), func(int) { close(ran) }, 0)
	within(t, func() bool {
		runtime.GC()
		select {
		case <-ran:
			return true
		default:
			return false
		}
	})
	answer()
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	expectEmpty(t, d)
}

func TestADeadObjectIsPruned(t *testing.T) {
	d := &book{}
	c := newCache(t, d, Config{Eager: true})
	for range 20 {
		release(t, acquire(t, c, make([]byte, 64<<10), LocalRead))
	}
	within(t, func() bool {
		runtime.GC()
		entries, _ := d.registered()
		return entries == 0
	})
	s := c.Stats()
	if s.Invalidated[ObjectDied] == 0 || s.Entries != 0 || s.PinnedBytes != 0 {
		t.Errorf("%+v", s)
	}
}

// within waits until another goroutine has brought something about.
func within(t testing.TB, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !done(); {
		if time.Now().After(deadline) {
			t.Fatal("it did not happen")
		}
		runtime.Gosched()
	}
}

func TestARegionInUseOutlivesItsObjectsEntry(t *testing.T) {
	d := &book{}
	c := newCache(t, d, Config{Eager: true})
	b := make([]byte, 64<<10)
	stable, err := Declare(b)
	if err != nil {
		t.Fatal(err)
	}
	r := acquire(t, c, b, LocalRead)
	if err := stable.Withdraw(); !errors.Is(err, ErrInUse) {
		t.Errorf("Withdraw: %v, want ErrInUse", err)
	}
	if err := d.covers(r.LKey(), b, LocalRead); err != nil {
		t.Error(err)
	}
	release(t, r)
	expectEmpty(t, d)
}

func TestDeclaredRanges(t *testing.T) {
	b := make([]byte, 64<<10)
	stable, err := Declare(b[10_000:20_000])
	if err != nil {
		t.Fatal(err)
	}
	for _, overlapping := range [][]byte{b, b[9_000:10_001], b[19_999:], b[12_000:13_000]} {
		if _, err := Declare(overlapping); !errors.Is(err, syscall.EEXIST) {
			t.Errorf("Declare: %v, want EEXIST", err)
		}
	}
	for name, c := range map[string]struct {
		b    []byte
		want Kind
	}{
		"inside":          {b[10_000:20_000], Declared},
		"across its end":  {b[19_000:20_001], Heap},
		"across its head": {b[9_999:10_001], Heap},
	} {
		if got := KindOf(c.b); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
	if err := stable.Withdraw(); err != nil {
		t.Error(err)
	}
	if got := KindOf(b[10_000:20_000]); got != Heap {
		t.Errorf("withdrawn: %v", got)
	}
	if _, err := Declare(nil); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("Declare(nil): %v", err)
	}
}

func TestExposureIsExactAndEndsWithRelease(t *testing.T) {
	d := &book{}
	c := newCache(t, d, Config{Eager: true})
	b := make([]byte, 64<<10)
	part := b[1000:2000]
	for round := range 3 {
		r := acquire(t, c, part, RemoteRead)
		if start, n := r.Range(); start != addressOf(part) || n != len(part) {
			t.Errorf("[%#x, +%d) is exposed, want [%#x, +%d)", start, n, addressOf(part), len(part))
		}
		if r.Access() != RemoteRead {
			t.Errorf("exposed for %v", r.Access())
		}
		if entries, _ := d.registered(); entries != 2 {
			t.Errorf("round %d: %d registrations, want the exposed and the pinned one", round, entries)
		}
		key := r.RKey()
		release(t, r)
		if err := d.covers(key, part, LocalRead); err == nil {
			t.Error("the exposed registration survived its release")
		}
	}
	expectRegistrations(t, d, 4) // one keeps the pages pinned
	for key := range d.live {
		if access := d.live[key].access; access&remoteAccess != 0 {
			t.Errorf("what is left grants %v", access)
		}
	}
	runtime.KeepAlive(b)
}

func TestExposureDoesWithoutThePin(t *testing.T) {
	d := &book{limit: 100 << 10} // MEMLOCK counts both
	c := newCache(t, d, Config{Eager: true})
	b := make([]byte, 64<<10)
	r := acquire(t, c, b, RemoteWrite)
	if entries, _ := d.registered(); entries != 1 {
		t.Errorf("%d registrations", entries)
	}
	release(t, r)
	expectEmpty(t, d)
}

func TestWindowsShareTheCachedRegistration(t *testing.T) {
	d := &book{}
	c := newCache(t, d, Config{Eager: true})
	b := make([]byte, 64<<10)
	for range 3 {
		r := acquire(t, c, b[:1000], BindWindow)
		if r.Access()&remoteAccess != 0 || r.Access()&BindWindow == 0 {
			t.Errorf("rights %v, want to bind only", r.Access())
		}
		release(t, r)
	}
	expectRegistrations(t, d, 1)
	r := acquire(t, c, b, BindWindow|LocalWrite)
	if r.Access()&(LocalWrite|BindWindow) != LocalWrite|BindWindow {
		t.Errorf("a window for writing cannot be bound on %v", r.Access())
	}
	release(t, r)
}

func TestDisabledRegistersEachTime(t *testing.T) {
	d := &book{}
	c := newCache(t, d, Config{Eager: true, Disabled: true})
	b := make([]byte, 64<<10)
	for _, access := range []Access{LocalRead, LocalRead, RemoteRead} {
		release(t, acquire(t, c, b, access))
		expectEmpty(t, d)
	}
	expectRegistrations(t, d, 3)
}

func TestUnusableArguments(t *testing.T) {
	c := newCache(t, &book{}, Config{})
	if _, err := c.Acquire(nil, LocalRead); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("Acquire(nil): %v", err)
	}
	constant := "read-only"
	for _, access := range []Access{LocalRead, RemoteRead} {
		_, err := c.Acquire(unsafe.Slice(unsafe.StringData(constant), len(constant)), access)
		if !errors.Is(err, ErrUnknownMemory) {
			t.Errorf("Acquire of a constant: %v", err)
		}
	}
	if s := c.Stats(); s.Unknown != 2 {
		t.Errorf("%d times unknown, want 2", s.Unknown)
	}
}

func TestReleasingTwicePanics(t *testing.T) {
	c := newCache(t, &book{}, Config{})
	r := acquire(t, c, make([]byte, 5000), LocalRead)
	release(t, r)
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	r.Release()
}

func TestAfterCloseNothingIsRegistered(t *testing.T) {
	d := &book{}
	c := newCache(t, d, Config{Eager: true})
	b, used := make([]byte, 64<<10), make([]byte, 64<<10)
	release(t, acquire(t, c, b, LocalRead))
	r := acquire(t, c, used, LocalRead)
	if err := c.Close(); !errors.Is(err, ErrInUse) {
		t.Errorf("Close: %v, want ErrInUse", err)
	}
	if entries, _ := d.registered(); entries != 1 {
		t.Errorf("%d registrations, want the one in use", entries)
	}
	for _, access := range []Access{LocalRead, RemoteRead} {
		if _, err := c.Acquire(b, access); !errors.Is(err, ErrClosed) {
			t.Errorf("Acquire: %v, want ErrClosed", err)
		}
	}
	release(t, r)
	if err := c.Close(); err != nil {
		t.Errorf("Close again: %v", err)
	}
	expectEmpty(t, d)
}

// Registering takes long, and a device may call back: no lock is held.
func TestTheDeviceIsCalledWithoutALock(t *testing.T) {
	d := &book{}
	budget := NewBudget(1<<30, 2)
	c := newCache(t, d, Config{Eager: true, Budget: budget})
	other := make([]byte, 64<<10)
	stable, err := Declare(make([]byte, 64<<10))
	if err != nil {
		t.Fatal(err)
	}
	calls, inside := 0, false
	look := func() {
		calls++
		if inside {
			return
		}
		inside = true
		defer func() { inside = false }()
		c.Stats()
		_ = budget.String()
		if r, err := c.Acquire(other, LocalRead); err == nil {
			release(t, r)
		} else if !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
	}
	d.refuse = func(int) error { look(); return nil }
	d.onDrop = func(registration) { look() }
	for range 4 { // registered, evicted
		release(t, acquire(t, c, make([]byte, 64<<10), LocalRead))
	}
	release(t, acquire(t, c, stable.memory, LocalRead))
	if err := stable.Withdraw(); err != nil {
		t.Error(err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if calls < 8 {
		t.Errorf("%d calls of the device", calls)
	}
}

func TestCachesShareTheBudget(t *testing.T) {
	d := &book{}
	budget := NewBudget(1<<30, 2)
	one := newCache(t, d, Config{Eager: true, Budget: budget})
	two := newCache(t, d, Config{Eager: true, Budget: budget})
	a, b, x := make([]byte, 64<<10), make([]byte, 64<<10), make([]byte, 64<<10)
	release(t, acquire(t, one, a, LocalRead))
	release(t, acquire(t, one, b, LocalRead))
	release(t, acquire(t, two, x, LocalRead))
	release(t, acquire(t, two, x, LocalRead))
	if n1, n2 := one.Stats(), two.Stats(); n1.Entries != 1 || n1.Evictions != 1 || n2.Entries != 1 {
		t.Errorf("entries %d and %d, evicted %d; want 1, 1, 1", n1.Entries, n2.Entries, n1.Evictions)
	}
	if s := budget.Stats(); s.Hits != 1 || s.Misses != 3 || s.Evictions != 1 || s.Entries != 2 || s.Bytes != 128<<10 {
		t.Errorf("both together: %+v", s)
	}
	budget.SetLimits(1<<30, 1)
	if n1, n2 := one.Stats(), two.Stats(); n1.Entries+n2.Entries != 1 {
		t.Errorf("entries %d and %d after the limit was lowered to 1", n1.Entries, n2.Entries)
	}
	used := acquire(t, two, x, LocalRead)
	budget.Flush()
	if entries, _ := d.registered(); entries != 1 {
		t.Errorf("%d registrations after Flush, want the one in use", entries)
	}
	release(t, used)
	budget.SetLimits(0, 0)
	expectEmpty(t, d)
	if s := budget.String(); !strings.Contains(s, "0 registrations") {
		t.Errorf("budget: %s", s)
	}
	runtime.KeepAlive([][]byte{a, b, x})
}

func TestManyConnectionsLeaveNothing(t *testing.T) {
	d := &book{}
	budget := NewBudget(8<<20, 64)
	buffers := make([][]byte, 16)
	for i := range buffers {
		buffers[i] = make([]byte, 64<<10)
	}
	const connections = 10_000
	for n := range connections {
		c, err := New(d, Config{Budget: budget}) // a protection domain each
		if err != nil {
			t.Fatal(err)
		}
		for _, access := range []Access{LocalRead, LocalWrite, RemoteRead} {
			release(t, acquire(t, c, buffers[n%len(buffers)], access))
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
	expectEmpty(t, d)
	if budget.bytes != 0 || budget.entries != 0 || len(budget.order) != 0 || len(budget.caches) != 0 {
		t.Errorf("budget: %v", budget)
	}
	s := budget.Stats()
	if s.Entries != 0 || s.Bytes != 0 || s.PinnedEntries != 0 || s.PinnedBytes != 0 {
		t.Errorf("left: %+v", s)
	}
	if s.Misses+s.Hits+s.Exposed < 3*connections || s.Registrations != s.Deregistrations || int(s.Registrations) != d.registrations() {
		t.Errorf("what all of them did is not in the budget's account: %+v", s)
	}
}

// Everything at once, for the race detector and to check the records: a region that is
// held is registered, covers what was asked for, and has the rights asked for.
func TestConcurrentUse(t *testing.T) {
	d := &book{}
	budget := NewBudget(2<<20, 12)
	caches := []*Cache{
		newCache(t, d, Config{Budget: budget}),
		newCache(t, d, Config{Budget: budget, Eager: true}),
		newCache(t, d, Config{Budget: budget, Disabled: true}),
	}
	shared := make([][]byte, 24)
	for i := range shared {
		shared[i] = make([]byte, 16<<10<<(i%4))
	}
	var failures atomic.Int32
	d.refuse = func(int) error {
		if failures.Add(1)%50 == 0 {
			return syscall.ENOMEM
		}
		return nil
	}
	var wg sync.WaitGroup
	for seed := range 8 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			random := rand.New(rand.NewPCG(uint64(seed), 1))
			for range 1500 {
				c := caches[random.IntN(len(caches))]
				b := shared[random.IntN(len(shared))]
				switch random.IntN(40) {
				case 0:
					budget.SetLimits(int64(1+random.IntN(4))<<20, 12)
				case 1:
					c.Stats()
				case 2:
					b = make([]byte, 64<<10)
				case 3:
					if r, err := Declare(b); err == nil {
						defer r.Withdraw()
					}
				}
				from := random.IntN(len(b))
				part := b[from : from+1+random.IntN(len(b)-from)]
				access := Access(random.IntN(16))
				r, err := c.Acquire(part, access)
				if err != nil {
					if !errors.Is(err, syscall.ENOBUFS) {
						t.Error(err)
					}
					continue
				}
				if err := d.covers(r.LKey(), part, access); err != nil {
					t.Error(err)
				}
				runtime.Gosched()
				if err := d.covers(r.LKey(), part, access); err != nil {
					t.Errorf("while held: %v", err)
				}
				if err := r.Release(); err != nil {
					t.Error(err)
				}
			}
		}()
	}
	wg.Wait()
	for _, c := range caches {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		if s := c.Stats(); s.PinnedBytes != 0 || s.PinnedEntries != 0 || s.Entries != 0 || s.Bytes != 0 {
			t.Errorf("%+v", s)
		}
	}
	expectEmpty(t, d)
	if budget.bytes != 0 || budget.entries != 0 {
		t.Errorf("budget: %v", budget)
	}
}
