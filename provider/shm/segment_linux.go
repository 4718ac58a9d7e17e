package shm

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/session"
)

// mapping is a segment that this process has mapped.
type mapping struct {
	mem   []byte
	slots int
}

// segmentSeals keep the other side from truncating a mapped segment (which would be
// SIGBUS) and from sealing it against writing later.
const segmentSeals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// mappedMost bounds the address space that all links of a process map, in bytes: peers
// ask for segments, and there are 47 bits of addresses.
const mappedMost = 16 << 40

// mappingsMost bounds the number of mappings: by default the kernel allows a process
// 65,530 (vm.max_map_count), and once they are used up its next allocation fails.
const mappingsMost = 1 << 14

var mapped, mappings atomic.Int64

var errSegment = errors.New("shm: segment refused")

// newSegment makes a segment. The caller passes its descriptor to the peer and closes it.
func newSegment(slots int) (m mapping, fd int, err error) {
	size := segmentSize(slots)
	// Beyond RLIMIT_FSIZE ftruncate raises a signal.
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &lim); err == nil && lim.Cur < uint64(size) {
		return m, -1, fmt.Errorf("shm: RLIMIT_FSIZE is %d bytes, a segment takes %d: %w", lim.Cur, size, unix.EFBIG)
	}
	fd, err = unix.MemfdCreate("san-shm", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return m, -1, fmt.Errorf("shm: memfd_create: %w", err)
	}
	if err = unix.Ftruncate(fd, size); err != nil {
		err = fmt.Errorf("shm: ftruncate: %w", err)
	} else if _, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, segmentSeals); err != nil {
		err = fmt.Errorf("shm: sealing: %w", err)
	} else {
		m, err = newMapping(fd, slots)
	}
	if err != nil {
		unix.Close(fd)
		return m, -1, err
	}
	return m, fd, nil
}

// checkSegment checks that a descriptor from the peer may be mapped: it must be a memfd
// of exactly the right size that nobody can shrink. Only shared memory files have seals.
// Huge pages are refused: they cannot be punched, and touching one may fail.
func checkSegment(fd, slots int) error {
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return fmt.Errorf("%w: no memfd: %w", errSegment, err)
	}
	if seals&segmentSeals != segmentSeals || seals&(unix.F_SEAL_WRITE|unix.F_SEAL_FUTURE_WRITE) != 0 {
		return fmt.Errorf("%w: seals %#x", errSegment, seals)
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil || fs.Type != unix.TMPFS_MAGIC {
		return fmt.Errorf("%w: file system %#x", errSegment, fs.Type)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Size != segmentSize(slots) {
		return fmt.Errorf("%w: %d bytes instead of %d", errSegment, st.Size, segmentSize(slots))
	}
	return nil
}

func newMapping(fd, slots int) (mapping, error) {
	size := segmentSize(slots)
	if size > math.MaxInt { // 32 bits; a 64-bit peer that asks for more does no wrong
		return mapping{}, fmt.Errorf("shm: %d bytes are more than this process can address: %w", size, unix.ENOMEM)
	}
	if bytes, n := mapped.Add(size), mappings.Add(1); bytes > mappedMost || n > mappingsMost {
		unmapped(size)
		return mapping{}, fmt.Errorf("shm: %d bytes of addresses in %d segments: %w", bytes, n, unix.ENOMEM)
	}
	mem, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_NORESERVE)
	if err != nil {
		unmapped(size)
		return mapping{}, fmt.Errorf("shm: mmap of %d bytes: %w", size, err)
	}
	// A forked child must not keep the pages.
	_ = unix.Madvise(mem, unix.MADV_DONTFORK)
	return mapping{mem, slots}, nil
}

func (m mapping) unmap() {
	if m.mem != nil {
		unix.Munmap(m.mem)
		unmapped(int64(len(m.mem)))
	}
}

func unmapped(size int64) {
	mapped.Add(-size)
	mappings.Add(-1)
}

// The segments of a link: the dialing end makes them, the accepting one maps them.

// addSegment adds a segment's slots to the link, at the dialing end as free ones.
func (l *link) addSegment(m mapping) {
	old := *l.slots.Load()
	slots := append(make([]*slot, 0, len(old)+m.slots), old...)
	for i := range m.slots {
		slots = append(slots, &slot{
			number:  len(slots),
			control: m.control(i),
			rings:   [2][]byte{m.ring(i, 0), m.ring(i, 1)},
		})
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.maps = append(l.maps, m)
	l.slots.Store(&slots)
	if l.side == 0 {
		for i := len(slots) - 1; i >= len(old); i-- { // so that the first is taken first
			l.free = append(l.free, slots[i])
		}
	}
}

// mapSegment checks and maps a segment from the peer.
func (l *link) mapSegment(fd int, slots uint32) error {
	if slots == 0 || int64(slots) != int64(nextSegment(len(*l.slots.Load()))) {
		return fmt.Errorf("%w: %d slots", errSegment, slots)
	}
	if err := checkSegment(fd, int(slots)); err != nil {
		return err
	}
	m, err := newMapping(fd, int(slots))
	if err != nil {
		return err
	}
	l.addSegment(m)
	return nil
}

// extend adds a segment, one at a time: the next has to wait for the peer's answer.
func (l *link) extend(ctx context.Context) error {
	select {
	case l.segment <- struct{}{}:
	case <-l.gone:
		return errLinkGone
	case <-ctx.Done():
		return unavailable(ctx.Err())
	}
	l.mu.Lock()
	enough, have := len(l.free) > 0, len(*l.slots.Load())
	l.mu.Unlock()
	if enough {
		<-l.segment
		return nil
	}
	slots := nextSegment(have)
	if slots == 0 {
		<-l.segment
		return &session.Unavailable{Reason: session.ReasonResources, Err: fmt.Errorf("shm: %d connections on one link", have)}
	}
	return l.offer(ctx, slots)
}

// offer sends a segment and waits for the peer's answer. The caller holds l.segment,
// which the method mapped releases.
func (l *link) offer(ctx context.Context, slots int) error {
	m, fd, err := newSegment(slots)
	if err != nil {
		<-l.segment
		return &session.Unavailable{Reason: session.ReasonResources, Err: err}
	}
	defer unix.Close(fd)
	said := make(chan uint8, 1)
	l.mu.Lock()
	l.offered, l.said = m, said
	l.mu.Unlock()
	if err := l.post(ctx, &message{kind: msgSegment, number: uint32(slots)}, fd); err != nil {
		l.mapped(said, codeResources) // the peer was never asked
		return linkError(err)
	}
	select {
	case code := <-said:
		if code != codeOK {
			return codeError(code)
		}
		return nil
	case <-l.gone:
		return errLinkGone
	case <-ctx.Done():
		return unavailable(ctx.Err()) // serve handles a later answer
	}
}

// mapped records the answer to the segment on offer; a said that is not nil restricts it
// to the offer with that channel. It returns false if there is no such offer.
func (l *link) mapped(said chan uint8, code uint8) bool {
	l.mu.Lock()
	if l.said == nil || said != nil && l.said != said {
		l.mu.Unlock()
		return false
	}
	m, said := l.offered, l.said
	l.offered, l.said = mapping{}, nil
	l.mu.Unlock()
	if code == codeOK {
		l.addSegment(m)
	} else {
		m.unmap()
	}
	said <- code // never blocks: buffered
	<-l.segment
	return true
}

// takeSegment maps a segment that the peer offers, and answers. If this process lacks a
// descriptor or room for it, existing connections must not suffer.
func (l *link) takeSegment(m *message, fds []int, cut error) error {
	if cut == nil && len(fds) != 1 {
		return errors.New("a segment without its descriptor")
	}
	code := uint8(codeResources)
	if cut == nil {
		err := l.mapSegment(fds[0], m.number)
		if errors.Is(err, errSegment) {
			return err
		}
		if err == nil {
			code = codeOK
		}
	}
	return l.reply(&message{kind: msgMapped, code: code})
}
