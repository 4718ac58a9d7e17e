package regcache

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// From include/uapi/linux/userfaultfd.h.
const (
	uffdAPI               = 0xaa
	uffdUserModeOnly      = 1
	uffdioAPI             = 0xc018aa3f
	uffdioRegister        = 0xc020aa00
	uffdioUnregister      = 0x8010aa01
	uffdioWriteProtect    = 0xc018aa06
	uffdRegisterModeWP    = 1 << 1
	uffdFeatureEventRemap = 1 << 2
	uffdFeatureRemove     = 1 << 3
	uffdFeatureUnmap      = 1 << 6
	uffdMessageSize       = 32
)

// A watcher has a userfaultfd for one range. The range is registered for write protection, but nothing
// is ever protected. So no page faults are reported, only munmap, mremap, MAP_FIXED and madvise. The
// kernel delays the caller of such a change until the event is read. The first event ends the range:
// what its owner maps there next is another range.
type watcher struct {
	file *os.File
	fd   uintptr
	// busy is set before an event is read, and stays set. quiet needs it, because reading the event
	// lets the caller of the change continue.
	busy atomic.Bool
	done chan struct{} // closed when the reader has ended
}

// Watch lets b be cached as long as the kernel reports no change of its mapping. munmap, mmap with
// MAP_FIXED, mremap, MADV_DONTNEED and MADV_FREE take it out of all caches at once; from then on it is
// memory of unknown kind. Watch may be called concurrently.
//
// b must be private anonymous memory that the program has mapped, in whole pages, and not of
// MAP_HUGETLB: a holder of its descriptor could change the pages of a file or of shared memory unseen.
// Until Withdraw, each Range has a file descriptor and a goroutine, and each hit in it costs a system
// call. Declare costs none of these.
//
// The kernel does not report MADV_GUARD_INSTALL, nor shmat with SHM_REMAP: withdraw the range before
// those. It reports MADV_DONTNEED and MADV_FREE before they take effect: to watch the same memory
// again, wait until they have returned, and withdraw the range that they have ended. Until then the
// error matches syscall.EBUSY or EEXIST.
//
// The error matches ENOSYS, EPERM or EINVAL if the kernel cannot watch that memory. Watch needs Linux
// 5.11.
func Watch(b []byte) (*Range, error) {
	if len(b) == 0 || addressOf(b)%pageSize != 0 || uintptr(len(b))%pageSize != 0 {
		return nil, fmt.Errorf("regcache: watch: not whole pages: %w", unix.EINVAL)
	}
	if k := KindOf(b); k != Unknown {
		return nil, fmt.Errorf("regcache: watch: %v memory is not the program's to remap: %w", k, unix.EINVAL)
	}
	if private, err := privateAnonymous(b); err != nil || !private {
		return nil, errors.Join(fmt.Errorf("regcache: watch: memory that is not private and anonymous: %w", unix.EINVAL), err)
	}
	w, err := newWatcher(b)
	if err != nil {
		return nil, fmt.Errorf("regcache: watch %d bytes: %w", len(b), err)
	}
	r, err := ranges.add(&Range{memory: b, kind: Watched, watch: w})
	if err != nil {
		w.file.Close()
		return nil, err
	}
	go w.read(r)
	return r, nil
}

// privateAnonymous reports, from /proc/self/maps, whether all of b is private anonymous memory.
// The lines are "start-end perms offset device inode name", ordered by address. Shared
// memory and files have an inode.
func privateAnonymous(b []byte) (bool, error) {
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return false, err
	}
	at, last := addressOf(b), addressOf(b)+uintptr(len(b))
	for line := range strings.Lines(string(maps)) {
		var start, end uintptr
		var offset, inode uint64 // 64 bits for any file
		var perms, device string
		if _, err := fmt.Sscanf(line, "%x-%x %s %x %s %d", &start, &end, &perms, &offset, &device, &inode); err != nil {
			return false, fmt.Errorf("/proc/self/maps: %q: %w", line, err)
		}
		if end <= at {
			continue
		}
		if start > at || inode != 0 {
			return false, nil
		}
		if at = end; at >= last {
			return true, nil
		}
	}
	return false, nil
}

func newWatcher(b []byte) (*watcher, error) {
	fd, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|unix.O_NONBLOCK|uffdUserModeOnly, 0, 0)
	if errno != 0 {
		return nil, os.NewSyscallError("userfaultfd", errno)
	}
	fail := func(what string, errno error) (*watcher, error) {
		unix.Close(int(fd))
		return nil, os.NewSyscallError(what, errno)
	}
	api := struct{ api, features, ioctls uint64 }{
		api:      uffdAPI,
		features: uffdFeatureEventRemap | uffdFeatureRemove | uffdFeatureUnmap,
	}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, uffdioAPI, uintptr(unsafe.Pointer(&api))); errno != 0 {
		return fail("UFFDIO_API", errno)
	}
	register := struct{ start, length, mode, ioctls uint64 }{
		start: uint64(addressOf(b)), length: uint64(len(b)), mode: uffdRegisterModeWP,
	}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, uffdioRegister, uintptr(unsafe.Pointer(&register))); errno != 0 {
		return fail("UFFDIO_REGISTER", errno)
	}
	// Non-blocking, for the runtime's poller, and not earlier: until UFFDIO_API the descriptor polls as
	// an error.
	file := os.NewFile(fd, "userfaultfd")
	return &watcher{file: file, fd: fd, done: make(chan struct{})}, nil
}

// read waits for the range's first event, or for close, and ends the range.
func (w *watcher) read(r *Range) {
	defer close(w.done)
	if conn, err := w.file.SyscallConn(); err == nil {
		conn.Read(func(fd uintptr) bool {
			ready := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			if n, err := unix.Poll(ready, 0); err != nil || n == 0 {
				return false // wait in the runtime's poller
			}
			w.busy.Store(true)
			var message [uffdMessageSize]byte
			unix.Read(int(fd), message[:])
			return true
		})
	}
	w.busy.Store(true)
	w.file.Close() // releases threads that further events delay
	r.invalidate(MappingChanged)
}

// zeroWriteProtect is an invalid argument of UFFDIO_WRITEPROTECT.
var zeroWriteProtect struct{ start, length, mode uint64 }

// quiet reports whether the mapping is as it was when the watch began. The event of an munmap arrives
// only after the mapping has changed, when another thread may have mapped something there. But the
// kernel increments mmap_changing before it changes anything, and decrements it after the event was
// read. UFFDIO_WRITEPROTECT checks it first: it returns EAGAIN while mmap_changing is not 0, else
// EINVAL for the other arguments (fs/userfaultfd.c). busy, set before the read, covers the time after
// it. The call never blocks, so RawSyscall may be used.
func (w *watcher) quiet() bool {
	if w.busy.Load() {
		return false
	}
	_, _, errno := unix.RawSyscall(unix.SYS_IOCTL, w.fd, uffdioWriteProtect, uintptr(unsafe.Pointer(&zeroWriteProtect)))
	return errno == unix.EINVAL && !w.busy.Load()
}

// close ends the watch of memory. If the mapping is unchanged, the memory is unregistered first: a
// forked child shares the descriptor until it calls exec, so that closing it here would not keep an
// munmap from waiting. If the mapping has changed, the memory may belong to another owner.
func (w *watcher) close(memory []byte) {
	if conn, err := w.file.SyscallConn(); err == nil && w.quiet() {
		conn.Control(func(fd uintptr) {
			span := struct{ start, length uint64 }{uint64(addressOf(memory)), uint64(len(memory))}
			unix.Syscall(unix.SYS_IOCTL, fd, uffdioUnregister, uintptr(unsafe.Pointer(&span)))
		})
	}
	w.busy.Store(true)
	if err := w.file.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		panic(fmt.Sprintf("regcache: close userfaultfd: %v", err)) // EBADF: other code has closed this descriptor
	}
	<-w.done
}
