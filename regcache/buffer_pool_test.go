package regcache

import (
	"net/http/httputil"
	"sync"
	"testing"
)

var _ httputil.BufferPool = (*BufferPool)(nil)

// Slices come from the arena while it has memory, and are ordinary ones afterwards. A slice that was put
// back is lent again.
func TestBufferPool(t *testing.T) {
	const size = 64 << 10
	a := NewArena(2*size, 2*size)
	p := a.BufferPool(size)
	first, second, third := p.Get(), p.Get(), p.Get()
	for i, b := range [][]byte{first, second, third} {
		if len(b) != size || KindOf(b) != [...]Kind{Declared, Declared, Heap}[i] {
			t.Errorf("slice %d: %d bytes of kind %v", i, len(b), KindOf(b))
		}
	}
	p.Put(third)
	p.Put(nil)
	p.Put(first[1:]) // not the slice that was lent
	if b := p.Get(); KindOf(b) != Heap {
		t.Error("a slice that was not put back is lent again")
	}
	p.Put(second[:0])
	p.Put(second) // a second time
	if b := p.Get(); &b[0] != &second[:1][0] {
		t.Error("the slice that was put back is not lent again")
	} else if c := p.Get(); KindOf(c) != Heap {
		t.Error("it is lent twice")
	} else {
		p.Put(b)
	}
	p.Put(first)
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if b := p.Get(); KindOf(b) != Heap {
		t.Error("a closed arena lends")
	}
}

// No slice is lent to two users at the same time.
func TestBufferPoolConcurrently(t *testing.T) {
	a := NewArena(0, 0)
	defer a.Close()
	p := a.BufferPool(4096)
	var all sync.WaitGroup
	for own := range byte(8) {
		all.Go(func() {
			for range 1000 {
				b := p.Get()
				for i := range b {
					b[i] = own
				}
				for _, c := range b {
					if c != own {
						t.Error("another one writes to it")
						return
					}
				}
				p.Put(b)
			}
		})
	}
	all.Wait()
}
