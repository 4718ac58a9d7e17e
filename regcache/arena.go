package regcache

import (
	"fmt"
	"math/bits"
	"slices"
	"sync"
	"syscall"
	"time"
)

const (
	// defaultSlab is how many bytes an arena maps at a time, except for larger buffers: enough for few
	// registrations, and little enough for an RLIMIT_MEMLOCK of 8 MiB.
	defaultSlab = 1 << 20
	minSlab     = 16 << 10
	// minAlone: pieces of this size or more are registered one by one, so that a connection does not
	// pin those of others too. Smaller ones share their slab's registration, as they would take too
	// many entries of a Budget.
	minAlone = 128 << 10
	// minBufferShift: the smallest buffer is a page, so that no two buffers share one.
	minBufferShift = 12
	maxBufferShift = 30
	// defaultArenaBytes is the size to which an arena may grow by default.
	defaultArenaBytes = 64 << 20
	// DefaultArena may grow to 1/arenaMemoryShare of the memory that this process may have,
	// if that is more.
	arenaMemoryShare = 16
	// mostArena is more than a process can map. What is computed from it, such as the
	// budget's limits, does not overflow.
	mostArena = 1 << 47
	// If RLIMIT_MEMLOCK applies, DefaultArena gets at most 1/arenaMemlockShare of it, besides the
	// caches' half (memlockShare).
	arenaMemlockShare = 4
)

// An Arena provides buffers of memory that the library owns. The memory is mapped once, outside the Go
// heap, and never moves. So each cache registers it at its first use (the smaller buffers together),
// and hits from then on, until it is evicted or its users have left. Connections take their buffers
// from an arena, and so can programs whose data is to be moved without a copy.
//
// Its methods may be called concurrently.
type Arena struct {
	slabSize int

	mu       sync.Mutex // guards the fields below
	maxBytes int64
	free     [maxBufferShift + 1][]piece
	slabs    map[*slab]struct{}
	bytes    int64 // mapped
	used     int64 // handed out
	closed   bool
}

// A slab is one mapping, cut into pieces of one size.
type slab struct {
	memory []byte
	shift  int // log2 of the pieces' size
	used   int // pieces handed out
	stable *Range
}

type piece struct {
	slab   *slab
	memory []byte
}

// NewArena returns an arena that maps slabSize bytes at a time, rounded up to a
// power of two, or more for a larger buffer, and as many whole slabs as maxBytes
// has room for. 0 means the default for either: 1 MiB, and 64 MiB.
func NewArena(slabSize int, maxBytes int64) *Arena {
	if slabSize == 0 {
		slabSize = defaultSlab
	}
	if maxBytes == 0 {
		maxBytes = defaultArenaBytes
	}
	shift := max(bits.Len(uint(slabSize-1)), minBufferShift)
	maxBytes &^= 1<<shift - 1 // a rest could not be mapped
	return &Arena{slabSize: 1 << shift, maxBytes: maxBytes, slabs: make(map[*slab]struct{})}
}

// DefaultArena returns the arena of the process. It may grow to a sixteenth of the host's memory or of
// the control group's limit, and at least to 64 MiB; but if RLIMIT_MEMLOCK applies, at most to a
// quarter of that. It maps 1 MiB at a time, less with a small limit, when it is used. Connections also
// take their inboxes and send buffers from it. SetArenaLimit changes its limit.
var DefaultArena = sync.OnceValue(func() *Arena {
	bytes, slab := max(MemoryLimit()/arenaMemoryShare, defaultArenaBytes), int64(defaultSlab)
	if limit, limited := MemlockLimit(); limited {
		bytes = max(min(limit/arenaMemlockShare, bytes), minSlab)
		slab = min(max(bytes/2, minSlab), slab)
	}
	return NewArena(int(slab), bytes)
})

// SetArenaLimit changes the size in bytes to which DefaultArena may grow; mapped memory stays mapped.
// DefaultBudget's limits follow, unless Budget.SetLimits has set them. SAN_ARENA, which package san
// reads at its first dial or listen, replaces an earlier limit.
func SetArenaLimit(bytes int64) {
	bytes = min(max(bytes, 0), mostArena)
	a := DefaultArena()
	a.mu.Lock()
	a.maxBytes = bytes &^ int64(a.slabSize-1)
	a.mu.Unlock()
	DefaultBudget().fitArena(bytes)
}

// Get returns a buffer of n bytes, whose contents are undefined. It takes a power of two
// of the arena, at least 4 KiB. The error matches syscall.ENOBUFS if the arena has
// reached its limit, EINVAL if n is not between 1 and 1 GiB, or ErrClosed. If a large
// buffer takes the place of smaller ones that were put back, Get may wait for devices to
// deregister those, for a second at most.
func (a *Arena) Get(n int) (*Buffer, error) {
	if n <= 0 || n > 1<<maxBufferShift {
		return nil, fmt.Errorf("regcache: arena: buffer of %d bytes: %w", n, syscall.EINVAL)
	}
	shift := max(bits.Len(uint(n-1)), minBufferShift)
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return nil, ErrClosed
	}
	if len(a.free[shift]) == 0 {
		err := a.growLocked(shift)
		if err != nil && a.unmapIdleLocked(shift) {
			if a.closed {
				return nil, ErrClosed
			}
			err = a.growLocked(shift)
		}
		if err != nil {
			for len(a.free[shift]) == 0 { // a larger piece serves, too
				if shift++; shift > maxBufferShift {
					return nil, err
				}
			}
		}
	}
	last := len(a.free[shift]) - 1
	p := a.free[shift][last]
	a.free[shift] = a.free[shift][:last]
	p.slab.used++
	a.used += 1 << p.slab.shift
	return &Buffer{arena: a, piece: p, length: n}, nil
}

// growLocked adds free pieces of 1<<shift bytes: from a new slab, or from one that served
// another size and is entirely free. Mapping anonymous memory does not block.
func (a *Arena) growLocked(shift int) error {
	size := max(a.slabSize, 1<<shift)
	if a.bytes+int64(size) <= a.maxBytes {
		c, err := newSlab(size)
		if err != nil {
			return err
		}
		a.slabs[c] = struct{}{}
		a.bytes += int64(size)
		a.cutLocked(c, shift)
		return nil
	}
	var least *slab // the smallest, to keep large slabs for large buffers
	for c := range a.slabs {
		if c.used == 0 && len(c.memory) >= 1<<shift && (least == nil || len(c.memory) < len(least.memory)) {
			least = c
		}
	}
	if least != nil {
		a.uncutLocked(least)
		a.cutLocked(least, shift)
		return nil
	}
	return fmt.Errorf("regcache: arena: %s of %s in use: %w", sizeString(a.bytes), sizeString(a.maxBytes), syscall.ENOBUFS)
}

// unmapIdleLocked unmaps slabs that are entirely free if that makes room for a slab with
// a piece of 1<<shift bytes; growLocked has found that each of them is too small. It
// releases mu while it waits for devices. After flushTime it returns, and the rest is
// unmapped in the background.
func (a *Arena) unmapIdleLocked(shift int) bool {
	missing := a.bytes + int64(max(a.slabSize, 1<<shift)) - a.maxBytes
	var idle []*slab
	for c := range a.slabs {
		if missing <= 0 {
			break
		}
		if c.used == 0 {
			idle = append(idle, c)
			missing -= int64(len(c.memory))
		}
	}
	if missing > 0 {
		return false
	}
	for _, c := range idle {
		a.uncutLocked(c)
		delete(a.slabs, c)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		a.unmap(idle)
	}()
	a.mu.Unlock()
	defer a.mu.Lock()
	select {
	case <-done:
	case <-time.After(flushTime):
	}
	return true
}

// unmap unmaps slabs that were taken out of the arena. Those that a device has not
// deregistered go back into it.
func (a *Arena) unmap(idle []*slab) {
	var gone int64
	kept := idle[:0]
	for _, c := range idle {
		if c.unmap() == nil {
			gone += int64(len(c.memory))
		} else if stable, err := declareSlab(c.memory); err == nil {
			c.stable = stable
			kept = append(kept, c)
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return // memory that is still registered stays mapped for good
	}
	a.bytes -= gone
	for _, c := range kept {
		a.slabs[c] = struct{}{} // growLocked cuts it
	}
}

// unmap unmaps the slab, unless it is still registered with a device.
func (c *slab) unmap() error {
	if err := c.stable.Withdraw(); err != nil {
		return err
	}
	return unmapMemory(c.memory)
}

// cutLocked makes free pieces of 1<<shift bytes of a slab that has none.
func (a *Arena) cutLocked(c *slab, shift int) {
	c.shift = shift
	c.stable.piece.Store(0)
	if 1<<shift >= minAlone {
		c.stable.piece.Store(1 << shift)
	}
	for rest := c.memory; len(rest) >= 1<<shift; rest = rest[1<<shift:] {
		a.free[shift] = append(a.free[shift], piece{c, rest[: 1<<shift : 1<<shift]})
	}
}

// uncutLocked removes the free pieces of a slab.
func (a *Arena) uncutLocked(c *slab) {
	a.free[c.shift] = slices.DeleteFunc(a.free[c.shift], func(p piece) bool { return p.slab == c })
}

func newSlab(size int) (*slab, error) {
	memory, err := mapMemory(size)
	if err != nil {
		return nil, fmt.Errorf("regcache: arena: map %s: %w", sizeString(int64(size)), err)
	}
	stable, err := declareSlab(memory)
	if err != nil {
		unmapMemory(memory)
		return nil, err
	}
	return &slab{memory: memory, stable: stable}, nil
}

// declareSlab declares memory of mapMemory.
func declareSlab(memory []byte) (*Range, error) {
	return ranges.add(&Range{memory: memory, kind: Declared, unforked: true})
}

// Close unmaps the memory. ErrInUse: buffers were not put back, or a transfer still uses one. Any other
// error is that of a device that has not deregistered a piece. Memory that an error is about stays
// mapped for good.
func (a *Arena) Close() error {
	a.mu.Lock()
	a.closed = true
	slabs := a.slabs
	a.slabs = nil
	a.free = [maxBufferShift + 1][]piece{}
	a.bytes = 0
	var idle []*slab
	var err error
	for c := range slabs {
		if c.used != 0 {
			err = ErrInUse
			continue
		}
		idle = append(idle, c)
	}
	a.mu.Unlock()
	for _, c := range idle {
		if e := c.unmap(); e != nil {
			err = e
		}
	}
	return err
}

// Bytes returns how many bytes are mapped, and how many of them are handed out.
func (a *Arena) Bytes() (mapped, used int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.bytes, a.used
}

// Left returns how many more bytes the arena may hand out, each buffer rounded up to what it takes; 0
// after Close.
func (a *Arena) Left() int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return 0
	}
	return max(a.maxBytes-a.used, 0)
}

func (a *Arena) limit() int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.maxBytes
}
