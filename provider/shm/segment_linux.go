package shm

import (
	"cmp"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/session"
)

// A segment has two halves. Each side makes the half that it writes, and maps the other one for reading
// only; its descriptor of that permits no more.

// mapping is one half of a segment, mapped into this process.
type mapping struct {
	mem   []byte
	slots int
	payer account
	file  int // of a final half of this end, for unmapKept; -1: none
}

// segment is both halves of a segment.
type segment struct{ own, peers mapping }

// halfSeals keep a side from truncating its half, where the other side would get a SIGBUS.
const halfSeals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// finalSeals are the seals of a final half. They also keep its side from punching holes into it: a
// reader of the other side would wait in the kernel for as long as that takes.
const finalSeals = halfSeals | unix.F_SEAL_FUTURE_WRITE

var errSegment = errors.New("shm: segment refused")

// newHalf makes the half that this process writes, charged to payer. The caller passes the descriptor
// to the peer and closes it. It is for reading only, and another user cannot open it again for writing.
// A process of this user could write to this process's memory anyway; but it cannot write to a final
// half. On the other hand nobody can give back memory of a final half (unmapKept).
func newHalf(slots int, payer account, final bool) (m mapping, fd int, err error) {
	size := halfSize(slots)
	// ftruncate beyond RLIMIT_FSIZE raises a signal.
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &lim); err == nil && lim.Cur < uint64(size) {
		return m, -1, fmt.Errorf("shm: RLIMIT_FSIZE is %d bytes, a segment takes %d: %w", lim.Cur, size, unix.EFBIG)
	}
	file, err := unix.MemfdCreate("san-shm", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return m, -1, fmt.Errorf("shm: memfd_create: %w", err)
	}
	defer unix.Close(file)
	if err = unix.Ftruncate(file, size); err != nil {
		return m, -1, fmt.Errorf("shm: ftruncate: %w", err)
	}
	fd, err = unix.Open(fmt.Sprintf("/proc/self/fd/%d", file), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return m, -1, fmt.Errorf("shm: no descriptor for reading: %w", err)
	}
	watch := final && kept.mayWatch(file)
	if err = unix.Fchmod(file, 0); err != nil {
		err = fmt.Errorf("shm: fchmod: %w", err)
	} else if m, err = newMapping(file, slots, payer, unix.PROT_READ|unix.PROT_WRITE); err == nil {
		if _, err = unix.FcntlInt(uintptr(file), unix.F_ADD_SEALS, sealsOf(final)); err != nil {
			err = fmt.Errorf("shm: sealing: %w", err)
			if is(err, unix.EINVAL) { // F_SEAL_FUTURE_WRITE, before Linux 5.1
				err = &session.Unavailable{Reason: session.ReasonNoProvider, Err: err}
			}
		} else if watch {
			m.file, err = payer.keepFile(file)
		}
	}
	if err != nil {
		m.unmap()
		unix.Close(fd)
		return mapping{}, -1, err
	}
	return m, fd, nil
}

// keepFile returns another descriptor of a file, charged to the account.
func (a account) keepFile(file int) (int, error) {
	if !a.descriptors.Take(a.user, 1) {
		return -1, fmt.Errorf("shm: %d of %d descriptors are in use: %w", a.descriptors.Used(), a.descriptors.Limit(), unix.EMFILE)
	}
	kept, err := unix.FcntlInt(uintptr(file), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		a.descriptors.Return(a.user, 1)
	}
	return kept, err
}

func sealsOf(final bool) int {
	if final {
		return finalSeals
	}
	return halfSeals
}

// mapHalf checks and maps a half that the peer has made.
func mapHalf(fd, slots int, payer account, final bool) (mapping, error) {
	if err := checkHalf(fd, slots, sealsOf(final)); err != nil {
		return mapping{}, err
	}
	return newMapping(fd, slots, payer, unix.PROT_READ)
}

// checkHalf checks that a descriptor from the peer may be mapped: it must be a memfd of exactly the
// right size that nobody can shrink. Only shared memory files have seals. Huge pages are refused,
// because touching one may fail.
func checkHalf(fd, slots, want int) error {
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	switch {
	case err == unix.EINVAL:
		return fmt.Errorf("%w: no memfd", errSegment)
	case err != nil: // here and below, not the peer's fault
		return fmt.Errorf("shm: fcntl: %w", err)
	case seals&want != want:
		return fmt.Errorf("%w: seals %#x", errSegment, seals)
	}
	var fs unix.Statfs_t
	var st unix.Stat_t
	switch err := cmp.Or(unix.Fstatfs(fd, &fs), unix.Fstat(fd, &st)); {
	case err != nil:
		return fmt.Errorf("shm: fstat: %w", err)
	case fs.Type != unix.TMPFS_MAGIC:
		return fmt.Errorf("%w: file system %#x", errSegment, fs.Type)
	case st.Size != halfSize(slots):
		return fmt.Errorf("%w: %d bytes instead of %d", errSegment, st.Size, halfSize(slots))
	}
	return nil
}

// newMapping maps a half of a segment, charged to payer.
func newMapping(fd, slots int, payer account, prot int) (mapping, error) {
	size := halfSize(slots)
	if !payer.space.Take(payer.user, size) {
		return mapping{}, fmt.Errorf("shm: %d of %d bytes of addresses are in use: %w", payer.space.Used(), payer.space.Limit(), unix.ENOMEM)
	}
	if !payer.mappings.Take(payer.user, 1) {
		payer.space.Return(payer.user, size)
		return mapping{}, fmt.Errorf("shm: %d of %d mappings are in use: %w", payer.mappings.Used(), payer.mappings.Limit(), unix.ENOMEM)
	}
	mem, err := mapSparsely(fd, int(size), prot)
	if err != nil {
		payer.unmapped(size)
		return mapping{}, err
	}
	return mapping{mem, slots, payer, -1}, nil
}

// mapSparsely maps a file so that only touched pages get memory, whatever the process has requested of
// the kernel. mlockall(MCL_FUTURE) populates each new mapping, except one that may not be accessed.
// Such a mapping is unlocked first, and made accessible then.
func mapSparsely(fd, size, prot int) (mem []byte, err error) {
	mem, err = unix.Mmap(fd, 0, size, unix.PROT_NONE, unix.MAP_SHARED|unix.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("shm: mmap of %d bytes: %w", size, err)
	}
	_ = unix.Munlock(mem)
	for _, advice := range []int{
		unix.MADV_DONTFORK,   // a forked child must not keep the pages
		unix.MADV_DONTDUMP,   // a core dump would read all of it, which allocates what is read
		unix.MADV_NOHUGEPAGE, // a huge page is larger than what a nearly empty ring takes
	} {
		_ = unix.Madvise(mem, advice) // fails if the kernel does not do what the advice would prevent
	}
	if err := unix.Mprotect(mem, prot); err != nil {
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
	a.space.Return(a.user, size)
	a.mappings.Return(a.user, 1)
}
