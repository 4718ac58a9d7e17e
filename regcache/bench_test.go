package regcache

import (
	"fmt"
	"runtime"
	"testing"
)

// cachedBuffers returns a cache and n buffers of the given size that are in it.
func cachedBuffers(b *testing.B, n, size int) (*Cache, [][]byte) {
	b.Helper()
	c := newCache(b, &fakeDevice{}, Config{Budget: NewBudget(1<<32, 1<<20)})
	buffers := make([][]byte, n)
	for i := range buffers {
		buffers[i] = make([]byte, size)
		release(b, acquireAgain(b, c, buffers[i], LocalRead))
	}
	return c, buffers
}

func BenchmarkHit(b *testing.B) {
	for _, n := range []int{1, 100, 1000, 10_000} {
		b.Run(fmt.Sprintf("%d cached", n), func(b *testing.B) {
			c, buffers := cachedBuffers(b, n, 64<<10)
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				r, err := c.Acquire(buffers[i%n], LocalRead)
				if err != nil {
					b.Fatal(err)
				}
				r.Release()
			}
		})
	}
}

// BenchmarkValidator measures the validator's part of a hit.
func BenchmarkValidator(b *testing.B) {
	page := make([]byte, 64<<10)
	heap := classify(page).newValidator()
	stable, err := Declare(page)
	if err != nil {
		b.Fatal(err)
	}
	defer stable.Withdraw()
	for name, p := range map[string]validator{"heap": heap, "global": always{}, "declared": stable} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if !p.valid() {
					b.Fatal("not valid")
				}
			}
		})
	}
	runtime.KeepAlive(page)
}

// BenchmarkMiss measures what the cache adds to the cost of a registration: the device here costs
// nothing.
func BenchmarkMiss(b *testing.B) {
	for _, c := range []struct {
		name   string
		config Config
	}{
		{"once", Config{Disabled: true}},
		{"into the cache", Config{}},
	} {
		b.Run(c.name, func(b *testing.B) {
			c.config.Budget = NewBudget(1<<30, 100) // full after the first few
			cache := newCache(b, &fakeDevice{}, c.config)
			buffers := make([][]byte, 1000)
			for i := range buffers {
				buffers[i] = make([]byte, 64<<10)
				release(b, acquire(b, cache, buffers[i], LocalRead)) // the use in the loop is the second one
			}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				r, err := cache.Acquire(buffers[i%len(buffers)], LocalRead)
				if err != nil {
					b.Fatal(err)
				}
				r.Release()
			}
		})
	}
}

func BenchmarkKindOf(b *testing.B) {
	for name, memory := range map[string][]byte{
		"heap": make([]byte, 64<<10), "global": variable[:],
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				KindOf(memory)
			}
		})
	}
}

func BenchmarkArena(b *testing.B) {
	a := NewArena(0, 0)
	defer a.Close()
	b.ReportAllocs()
	for b.Loop() {
		buffer, err := a.Get(64 << 10)
		if err != nil {
			b.Fatal(err)
		}
		buffer.Put()
	}
}
