package regcache

import (
	"fmt"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

var benchSizes = []int{4 << 10, 64 << 10, 1 << 20, 8 << 20}

// BenchmarkPinned measures registrations that pin memory: those of io_uring take the same path through
// the kernel as ibv_reg_mr, except for the device's translation table.
func BenchmarkPinned(b *testing.B) {
	for _, size := range benchSizes {
		for _, c := range []struct {
			name     string
			config   Config
			fresh    bool
			uses     int // of each buffer
			exposing bool
		}{
			{name: "no cache", config: Config{Disabled: true}, uses: 1},
			{name: "hit", config: Config{}, uses: 1},
			{name: "exposed, pages pinned", config: Config{}, uses: 1, exposing: true},
			{name: "exposed, not pinned", config: Config{Disabled: true}, uses: 1, exposing: true},
			{name: "each buffer used once", fresh: true, uses: 1},
			{name: "each buffer used 4 times", fresh: true, uses: 4},
		} {
			b.Run(fmt.Sprintf("%d KiB/%s", size>>10, c.name), func(b *testing.B) {
				nic := newNIC(b)
				nic.blind = true
				c.config.Budget = NewBudget(64<<20, 1024)
				cache := newCache(b, nic, c.config)
				access := LocalRead
				if c.exposing {
					access = RemoteRead
				}
				buffer := make([]byte, size)
				for i := range buffer {
					buffer[i] = 1
				}
				use := func() {
					r, err := cache.Acquire(buffer, access)
					if err != nil {
						b.Fatal(err)
					}
					r.Release()
				}
				use()
				use()
				for b.Loop() {
					if c.fresh {
						b.StopTimer()
						buffer = make([]byte, size)
						for i := 0; i < size; i += 4096 {
							buffer[i] = 1
						}
						b.StartTimer()
					}
					for range c.uses {
						use()
					}
				}
				runtime.KeepAlive(buffer)
				cache.Close()
			})
		}
	}
}

// BenchmarkHitParallel gives each goroutine its own buffers, as connections have. If look-ups scale, the
// CPU time per hit stays the same, even on a busy machine.
func BenchmarkHitParallel(b *testing.B) {
	for _, shared := range []bool{false, true} {
		for _, goroutines := range []int{1, 2, 4, 8} {
			name := fmt.Sprintf("%d goroutines, own buffers", goroutines)
			if shared {
				name = fmt.Sprintf("%d goroutines, one buffer", goroutines)
			}
			b.Run(name, func(b *testing.B) {
				defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(min(goroutines, runtime.NumCPU())))
				c, buffers := cachedBuffers(b, 64, 64<<10)
				var next atomic.Int32
				b.SetParallelism((goroutines + runtime.GOMAXPROCS(0) - 1) / runtime.GOMAXPROCS(0))
				before := cpuTime()
				b.RunParallel(func(pb *testing.PB) {
					own := buffers[:1]
					if !shared {
						first := int(next.Add(1)-1) % 8 * 8
						own = buffers[first : first+8]
					}
					for i := 0; pb.Next(); i++ {
						r, err := c.Acquire(own[i%len(own)], LocalRead)
						if err != nil {
							b.Error(err)
							return
						}
						r.Release()
					}
				})
				b.ReportMetric(float64(cpuTime()-before)/float64(b.N), "cpu-ns/op")
			})
		}
	}
}

// cpuTime returns the CPU time that this process has used.
func cpuTime() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func BenchmarkWatchedValidator(b *testing.B) {
	r := watch(b, mmap(b, mapped))
	defer r.Withdraw()
	for b.Loop() {
		if !r.valid() {
			b.Fatal("not valid")
		}
	}
}
