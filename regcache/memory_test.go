package regcache

import (
	"errors"
	"runtime"
	"sync"
	"testing"
	"unsafe"
)

var variable [100_000]byte

func TestKindOfTellsWhoVouchesForMemory(t *testing.T) {
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

// A stack may move at any call, even during the look-up. The memory that it leaves is no longer Go's,
// and looking that up is fatal.
func TestAStackThatMovesIsNeverRegistered(t *testing.T) {
	c := newCache(t, &fakeDevice{}, Config{})
	var wg sync.WaitGroup
	for depth := range 2000 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			acquireStack(t, c, depth%40)
		}()
		if depth%100 == 0 {
			runtime.GC() // shrinks stacks
		}
	}
	wg.Wait()
}

//go:noinline
func acquireStack(t *testing.T, c *Cache, depth int) {
	var frame [3000]byte
	if depth > 0 {
		acquireStack(t, c, depth-1)
	}
	b := unsafe.Slice((*byte)(hide(unsafe.Pointer(&frame))), len(frame))
	if r, err := c.Acquire(b, LocalRead); !errors.Is(err, ErrUnknownMemory) {
		t.Errorf("Acquire of a stack: %v, %v", r, err)
	}
	frame[depth]++
}

// A slice that extends beyond its object was not made by Go.
func TestASliceBeyondItsObjectIsUnknown(t *testing.T) {
	const size, pages = 1 << 10, 8 << 10 // several objects of that size share a span of that many bytes
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

// A slice of C's memory by the old idiom has a capacity far beyond the object, and is not registered.
func TestACapacityThatIsNotTheObjectsIsNotRegistered(t *testing.T) {
	d := &fakeDevice{}
	c := newCache(t, d, Config{})
	object := make([]byte, 8<<10)
	header := struct {
		start    unsafe.Pointer
		len, cap int
	}{unsafe.Pointer(&object[0]), len(object), 1 << 20}
	b := *(*[]byte)(unsafe.Pointer(&header))
	r := acquireAgain(t, c, b, LocalRead)
	if start, n := r.Range(); start != addressOf(object) || n != len(object) {
		t.Errorf("[%#x, +%d) is registered, the object is [%#x, +%d)", start, n, addressOf(object), len(object))
	}
	release(t, r)
}
