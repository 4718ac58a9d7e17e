package shm

import (
	"errors"
	"fmt"
	"math"

	"golang.org/x/sys/unix"
)

// mapping is a segment that this process has mapped.
type mapping struct {
	mem   []byte
	slots int
	payer account
}

// segmentSeals keep the other side from truncating a mapped segment (which would be
// SIGBUS) and from sealing it against writing later.
const segmentSeals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

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
	// The peer has a descriptor. Nobody else is to open the file by /proc.
	if err = unix.Fchmod(fd, 0); err != nil {
		err = fmt.Errorf("shm: fchmod: %w", err)
	} else if err = unix.Ftruncate(fd, size); err != nil {
		err = fmt.Errorf("shm: ftruncate: %w", err)
	} else if _, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, segmentSeals); err != nil {
		err = fmt.Errorf("shm: sealing: %w", err)
	} else {
		m, err = newMapping(fd, slots, ownAccount())
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

// newMapping maps a segment at the expense of payer.
func newMapping(fd, slots int, payer account) (mapping, error) {
	size := segmentSize(slots)
	if size > math.MaxInt { // 32 bits; a 64-bit peer that asks for more does no wrong
		return mapping{}, fmt.Errorf("shm: %d bytes are more than this process can address: %w", size, unix.ENOMEM)
	}
	if !payer.take(payer.space, size) {
		return mapping{}, fmt.Errorf("shm: %d of %d bytes of addresses are in use: %w", payer.space.Used(), payer.space.Limit(), unix.ENOMEM)
	}
	if !payer.take(payer.mappings, 1) {
		payer.uncharge(payer.space, size)
		return mapping{}, fmt.Errorf("shm: %d of %d segments are mapped: %w", payer.mappings.Used(), payer.mappings.Limit(), unix.ENOMEM)
	}
	mem, err := mapSparsely(fd, int(size))
	if err != nil {
		payer.unmapped(size)
		return mapping{}, err
	}
	return mapping{mem, slots, payer}, nil
}

// mapSparsely maps a file of which only what is touched is to have memory, whatever the
// process has asked for. mlockall(MCL_FUTURE) populates what is mapped, unless it may not be
// accessed; once unlocked, it may.
func mapSparsely(fd, size int) (mem []byte, err error) {
	mem, err = unix.Mmap(fd, 0, size, unix.PROT_NONE, unix.MAP_SHARED|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("shm: mmap of %d bytes: %w", size, err)
	}
	_ = unix.Munlock(mem)
	for _, advice := range []int{
		unix.MADV_DONTFORK,   // a forked child must not keep the pages
		unix.MADV_DONTDUMP,   // a core dump would read all of it, which allocates what is read
		unix.MADV_NOHUGEPAGE, // a huge page is more than a ring that is nearly empty takes
	} {
		_ = unix.Madvise(mem, advice) // fails where the kernel does not do what it would prevent
	}
	if err := unix.Mprotect(mem, unix.PROT_READ|unix.PROT_WRITE); err != nil {
		unix.Munmap(mem)
		return nil, fmt.Errorf("shm: mprotect: %w", err)
	}
	return mem, nil
}

func (m mapping) unmap() {
	if m.mem != nil {
		unix.Munmap(m.mem)
		m.payer.unmapped(int64(len(m.mem)))
	}
}

func (a account) unmapped(size int64) {
	a.uncharge(a.space, size)
	a.uncharge(a.mappings, 1)
}
