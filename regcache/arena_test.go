package regcache

import (
	"bytes"
	"errors"
	"io"
	"math"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/iotest"
	"time"
)

func get(t testing.TB, a *Arena, n int) *Buffer {
	t.Helper()
	b, err := a.Get(n)
	if err != nil {
		t.Fatalf("Get(%d): %v", n, err)
	}
	return b
}

func TestArenaBuffersShareOneRegistration(t *testing.T) {
	d := &fakeDevice{}
	c := newCache(t, d, Config{})
	a := NewArena(1<<20, 2<<20)
	defer a.Close()
	for _, n := range []int{1, 4096, 5000, 64 << 10, 4096} {
		b := get(t, a, n)
		if len(b.Bytes()) != n {
			t.Errorf("Get(%d) has %d bytes", n, len(b.Bytes()))
		}
		release(t, acquire(t, c, b.Bytes(), LocalWrite))
		b.Put()
	}
	if entries, size := d.registered(); entries > 2 || size > 2<<20 {
		t.Errorf("%d registrations of %d bytes", entries, size)
	}
	if s := c.Stats(); s.Once != 0 {
		t.Errorf("%d registrations for one use", s.Once)
	}
	c.Close()
}

func TestArenaBuffersDoNotOverlap(t *testing.T) {
	a := NewArena(256<<10, 4<<20)
	defer a.Close()
	var buffers []*Buffer
	for i := range 30 {
		b := get(t, a, 100+i*1000)
		for j := range b.Bytes() {
			b.Bytes()[j] = byte(i)
		}
		buffers = append(buffers, b)
	}
	for i, b := range buffers {
		if want := bytes.Repeat([]byte{byte(i)}, len(b.Bytes())); !bytes.Equal(b.Bytes(), want) {
			t.Errorf("buffer %d was overwritten by another", i)
		}
		if cap(b.Bytes()) != len(b.Bytes()) {
			t.Errorf("buffer %d can be appended to", i)
		}
		b.Put()
	}
}

func TestArenaStaysWithinItsLimit(t *testing.T) {
	a := NewArena(64<<10, 256<<10)
	defer a.Close()
	var buffers []*Buffer
	for range 64 {
		buffers = append(buffers, get(t, a, 4096))
	}
	if _, err := a.Get(1); !errors.Is(err, syscall.ENOBUFS) {
		t.Errorf("Get beyond the limit: %v, want ENOBUFS", err)
	}
	if mapped, used := a.Bytes(); mapped != 256<<10 || used != 256<<10 || a.Left() != 0 {
		t.Errorf("%d mapped, %d used, %d left", mapped, used, a.Left())
	}
	for _, b := range buffers {
		b.Put()
	}
	// A slab that was cut for one size serves another size.
	large := get(t, a, 50_000)
	if mapped, used := a.Bytes(); mapped != 256<<10 || used != 64<<10 || a.Left() != 192<<10 {
		t.Errorf("%d mapped, %d used, %d left", mapped, used, a.Left())
	}
	large.Put()
	for _, n := range []int{0, -1, math.MaxInt} {
		if _, err := a.Get(n); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("Get(%d): %v, want EINVAL", n, err)
		}
	}
	a.Close()
	if n := a.Left(); n != 0 {
		t.Errorf("%d left after Close", n)
	}
}

// Memory whose slab is used for another size, or unmapped for larger buffers, is handed out only once.
func TestArenaMemoryOfAnotherSizeIsHandedOutOnce(t *testing.T) {
	const size = 256 << 10
	a := NewArena(64<<10, size)
	defer a.Close()
	for _, n := range []int{4096, 64 << 10, 8192, size, 4096, 128 << 10, 64 << 10, 4096} {
		var buffers []*Buffer
		for b, err := a.Get(n); err == nil; b, err = a.Get(n) {
			fill(b.Bytes(), byte(len(buffers)))
			buffers = append(buffers, b)
		}
		if len(buffers) != size/n {
			t.Errorf("%d buffers of %d bytes", len(buffers), n)
		}
		want := make([]byte, n)
		for i, b := range buffers {
			if fill(want, byte(i)); !bytes.Equal(b.Bytes(), want) {
				t.Errorf("buffer %d of %d bytes was overwritten by another", i, n)
			}
			b.Put()
		}
	}
}

// A buffer that was not put back keeps its memory when its arena is closed.
func TestArenaCloseLeavesABufferItsMemory(t *testing.T) {
	a := NewArena(64<<10, 256<<10)
	b := get(t, a, 4096)
	if err := a.Close(); err != ErrInUse {
		t.Errorf("Close: %v, want ErrInUse", err)
	}
	fill(b.Bytes(), 1)
	b.Put()
}

// A buffer gets a larger piece when nothing else is left, even if the piece would need a slab of its
// own.
func TestArenaStaysWithinItsLimitForLargeBuffers(t *testing.T) {
	a := NewArena(64<<10, 256<<10)
	defer a.Close()
	small := get(t, a, 4096)
	defer small.Put()
	if b, err := a.Get(256 << 10); !errors.Is(err, syscall.ENOBUFS) {
		t.Errorf("Get beyond the limit: %v, want ENOBUFS", err)
		if err == nil {
			b.Put()
		}
	}
	if mapped, _ := a.Bytes(); mapped > 256<<10 {
		t.Errorf("%d bytes mapped", mapped)
	}
}

func TestArenaGivesALargerPieceWhenNothingElseIsLeft(t *testing.T) {
	a := NewArena(64<<10, 128<<10)
	defer a.Close()
	first, second := get(t, a, 32<<10), get(t, a, 32<<10) // from one slab
	get(t, a, 64<<10)
	second.Put()
	small := get(t, a, 100)
	if len(small.Bytes()) != 100 || cap(small.Bytes()) != 100 || a.Left() != 0 {
		t.Errorf("a buffer of %d bytes, capacity %d; %d left", len(small.Bytes()), cap(small.Bytes()), a.Left())
	}
	if _, err := a.Get(1); !errors.Is(err, syscall.ENOBUFS) {
		t.Errorf("Get beyond the limit: %v, want ENOBUFS", err)
	}
	small.Put()
	first.Put()
	if a.Left() != 64<<10 {
		t.Errorf("%d left", a.Left())
	}
	get(t, a, 64<<10) // the slab is whole again
}

func TestArenaServesBuffersLargerThanItsSlabs(t *testing.T) {
	a := NewArena(64<<10, 1<<20)
	defer a.Close()
	b := get(t, a, 300<<10)
	if len(b.Bytes()) != 300<<10 {
		t.Errorf("%d bytes", len(b.Bytes()))
	}
	b.Put()
}

// Small pieces that were put back make room for a large one, in the device as well.
func TestArenaJoinsWhatIsFree(t *testing.T) {
	d := &fakeDevice{}
	c := newCache(t, d, Config{})
	a := NewArena(1<<20, 8<<20)
	defer a.Close()
	var small []*Buffer
	for range 32 {
		b := get(t, a, 256<<10)
		release(t, acquire(t, c, b.Bytes(), LocalWrite))
		small = append(small, b)
	}
	for i, b := range small {
		if i != 0 {
			b.Put()
		}
	}
	large := get(t, a, 4<<20)
	if _, err := a.Get(4 << 20); !errors.Is(err, syscall.ENOBUFS) {
		t.Errorf("with %d KiB in use: %v, want ENOBUFS", 4096+256, err)
	}
	for i := range large.Bytes() {
		large.Bytes()[i] = 1
	}
	release(t, acquire(t, c, large.Bytes(), LocalWrite))
	release(t, acquire(t, c, small[0].Bytes(), LocalWrite))
	if mapped, used := a.Bytes(); mapped > 8<<20 || used != 4<<20+256<<10 {
		t.Errorf("%d bytes mapped, %d used", mapped, used)
	}
	large.Put()
	small[0].Put()
	c.Close()
	expectEmpty(t, d)
}

// Get waits only briefly for a device that hangs.
func TestArenaDoesNotWaitForADeviceThatHangs(t *testing.T) {
	d := &fakeDevice{}
	hangs := make(chan struct{})
	answer := sync.OnceFunc(func() { close(hangs) })
	d.onDeregister = func(registration) { <-hangs }
	c := newCache(t, d, Config{})
	t.Cleanup(answer)
	late := time.AfterFunc(30*time.Second, answer)
	a := NewArena(64<<10, 256<<10)
	for range 2 {
		b := get(t, a, 64<<10)
		defer b.Put()
	}
	small := get(t, a, 64<<10)
	release(t, acquire(t, c, small.Bytes(), LocalWrite))
	small.Put()
	if _, err := a.Get(128 << 10); !errors.Is(err, syscall.ENOBUFS) {
		t.Errorf("Get of what the device has: %v, want ENOBUFS", err)
	}
	if !late.Stop() {
		t.Error("it waited for the device")
	}
	answer()
	within(t, func() bool {
		mapped, _ := a.Bytes()
		return mapped == 128<<10
	})
	get(t, a, 128<<10).Put()
	if err := c.Close(); err != nil {
		t.Error(err)
	}
}

// A connection with a large piece pins only that piece, not the neighbours'. Small pieces share a
// registration.
func TestArenaPiecesArePinnedOneByOne(t *testing.T) {
	const connections = 4
	for size, want := range map[int]int64{minAlone: minAlone, minAlone / 2: defaultSlab} {
		d := &fakeDevice{}
		a := NewArena(0, 0)
		defer a.Close()
		budget := NewBudget(64<<20, 1024)
		for range connections {
			c := newCache(t, d, Config{Budget: budget})
			b := get(t, a, size)
			defer b.Put()
			release(t, acquire(t, c, b.Bytes()[1:size-1], LocalWrite))
			release(t, acquire(t, c, b.Bytes(), LocalWrite))
			if s := c.Stats(); s.Hits != 1 {
				t.Errorf("%d hits, want 1", s.Hits)
			}
		}
		if n, bytes := d.registered(); n != connections || bytes != connections*want {
			t.Errorf("pieces of %d: %d registrations of %d bytes, want %d of %d", size, n, bytes, connections, connections*want)
		}
	}
}

func TestABufferIsGoneAfterPut(t *testing.T) {
	a := NewArena(0, 0)
	defer a.Close()
	b := get(t, a, 100)
	b.Put()
	b.Put()
	if b.Bytes() != nil {
		t.Error("the buffer can still be used")
	}
	if _, err := b.ReadFrom(strings.NewReader("x")); !errors.Is(err, ErrClosed) {
		t.Errorf("ReadFrom: %v", err)
	}
	first, second := get(t, a, 100), get(t, a, 100)
	if &first.Bytes()[0] == &second.Bytes()[0] {
		t.Error("put twice, handed out twice")
	}
}

func TestBufferReadsAndWrites(t *testing.T) {
	a := NewArena(0, 0)
	defer a.Close()
	b := get(t, a, 1)
	defer b.Put()
	n, err := b.ReadFrom(iotest.OneByteReader(strings.NewReader("hello")))
	if n != 5 || err != nil || string(b.Bytes()) != "hello" {
		t.Errorf("ReadFrom: %d, %v, %q", n, err, b.Bytes())
	}
	var out bytes.Buffer
	if n, err := b.WriteTo(&out); n != 5 || err != nil || out.String() != "hello" {
		t.Errorf("WriteTo: %d, %v, %q", n, err, out.String())
	}
	n, err = b.ReadFrom(strings.NewReader(strings.Repeat("x", 5000)))
	if n != 1<<minBufferShift || err != io.ErrShortBuffer {
		t.Errorf("ReadFrom of too much: %d, %v", n, err)
	}
	for _, broken := range []error{errors.New("broken"), io.ErrUnexpectedEOF} { // the latter is what a truncated body returns
		if n, err := b.ReadFrom(iotest.ErrReader(broken)); n != 0 || err != broken || len(b.Bytes()) != 0 {
			t.Errorf("ReadFrom of a broken reader: %d, %v, want %v", n, err, broken)
		}
		cut := io.MultiReader(strings.NewReader("hello"), iotest.ErrReader(broken))
		if n, err := b.ReadFrom(cut); n != 5 || err != broken || string(b.Bytes()) != "hello" {
			t.Errorf("ReadFrom of a reader that breaks: %d, %v, want %v", n, err, broken)
		}
	}
}

func TestAnArenaInUseKeepsItsMemory(t *testing.T) {
	d := &fakeDevice{}
	c := newCache(t, d, Config{})
	a := NewArena(64<<10, 1<<20)
	b := get(t, a, 64<<10)
	idle := get(t, a, 100)
	r := acquire(t, c, b.Bytes(), LocalRead)
	release(t, acquire(t, c, idle.Bytes(), LocalRead))
	idle.Put()
	if err := a.Close(); !errors.Is(err, ErrInUse) {
		t.Errorf("Close: %v, want ErrInUse", err)
	}
	if entries, _ := d.registered(); entries != 1 {
		t.Errorf("%d registrations, want the one in use", entries)
	}
	b.Bytes()[0] = 1 // still mapped
	release(t, r)
	b.Put()
	if _, err := a.Get(1); !errors.Is(err, ErrClosed) {
		t.Errorf("Get: %v, want ErrClosed", err)
	}
	c.Close()
	expectEmpty(t, d)
}

func TestABufferHasOneOwnerAtATime(t *testing.T) {
	a := NewArena(64<<10, 4<<20)
	defer a.Close()
	var wg sync.WaitGroup
	for id := range byte(8) {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := range 500 {
				b, err := a.Get(1 + i*37%20_000)
				if err != nil {
					t.Error(err)
					return
				}
				p := b.Bytes()
				p[0], p[len(p)-1] = id, id
				if p[0] != id || p[len(p)-1] != id {
					t.Error("handed out twice")
				}
				b.Put()
			}
		}()
	}
	wg.Wait()
}
