package shm

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/provider/shm/internal/ring"
)

// No memory of a final half can be given back while anybody has it: the peer, another process that the
// peer has passed its descriptor to, or a message on its way. So behind the link's end it counts as the
// peer's user's until nobody has. A watch tells that: as the file has no name, the kernel ends the watch
// with the last descriptor or mapping, whosever it is (dentry_unlink_inode in Linux's fs/dcache.c).

// keptHalves are watched by one inotify instance, which there is, with a goroutine that reads it, only
// while it is needed: a user of the host has few.
type keptHalves struct {
	try sync.Once
	may bool // see mayWatch

	mu   sync.Mutex       // guards what follows
	in   int              // the instance
	gone map[int32]func() // by watch: called when nobody has the half any more; nil: there is no instance
}

var kept keptHalves

// mostKept are watched at a time: each leaves two events, of which the kernel queues 16,384 by default
// (fs.inotify.max_queued_events).
const mostKept = 8 << 10

// unmapKept unmaps a half of this end. Of its rings, written bytes may have memory.
func (m mapping) unmapKept(memory ring.Share, written uint64) {
	if m.mem == nil || m.file < 0 {
		m.unmap()
		return
	}
	n := int64(written + ring.Start) // for what is beside the rings
	memory.Charge(n)
	m.unmap()
	kept.await(m, func() { memory.Charge(-n) })
}

// await has gone called when nobody has a half any more, and closes its file. What keeps it from that
// may pass, as others use up the user's watches, but for who may read the file: this process has another
// user since it made that, or the peer has given it away. Then the half counts for good.
func (k *keptHalves) await(m mapping, gone func()) {
	k.mu.Lock()
	err := k.watchLocked(m.file, gone)
	k.mu.Unlock()
	if err != nil && !is(err, unix.EACCES, unix.EPERM) {
		time.AfterFunc(tick, func() { k.await(m, gone) })
		return
	}
	unix.Close(m.file)
	m.payer.descriptors.Return(m.payer.user, 1)
}

func (k *keptHalves) watchLocked(file int, gone func()) error {
	if len(k.gone) == mostKept {
		return unix.ENOSPC
	}
	if k.gone == nil {
		in, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
		if err != nil {
			return err
		}
		f := os.NewFile(uintptr(in), "inotify")
		if err := f.SetReadDeadline(time.Time{}); err != nil { // no room in epoll's instance
			f.Close()
			return err
		}
		k.in, k.gone = in, make(map[int32]func())
		go k.read(f)
	}
	watch, err := watchFile(k.in, file)
	if err == nil {
		k.gone[int32(watch)] = gone
	}
	return err
}

// read reads the instance until nothing has been kept for a tick: to close it takes milliseconds.
func (k *keptHalves) read(in *os.File) {
	defer in.Close()
	var events [64 * unix.SizeofInotifyEvent]byte // of files, which have no names
	var err error
	for n := 0; ; n, err = in.Read(events[:]) {
		k.mu.Lock()
		for e := events[:n]; len(e) > 0; e = e[unix.SizeofInotifyEvent:] {
			if watch := int32(binary.NativeEndian.Uint32(e)); watch >= 0 {
				k.endLocked(watch)
			} else { // IN_Q_OVERFLOW
				k.lookLocked()
			}
		}
		switch {
		case len(k.gone) > 0:
			in.SetReadDeadline(time.Time{})
		case err == nil:
			in.SetReadDeadline(time.Now().Add(tick))
		default:
			k.gone = nil
			k.mu.Unlock()
			return
		}
		k.mu.Unlock()
	}
}

// endLocked is called for a watch that has ended, at least once.
func (k *keptHalves) endLocked(watch int32) {
	if gone := k.gone[watch]; gone != nil {
		delete(k.gone, watch)
		gone()
	}
}

// lookLocked looks which watches have ended, as events were lost, for want of memory, say.
func (k *keptHalves) lookLocked() {
	there, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", k.in))
	for watch := range k.gone {
		if err == nil && !bytes.Contains(there, fmt.Appendf(nil, "inotify wd:%x ", watch)) {
			k.endLocked(watch)
		}
	}
}

// watchFile watches the end of a file of this process's user.
func watchFile(in, file int) (watch int, err error) {
	_ = unix.Fchmod(file, 0o400) // a watch takes the right to read
	return unix.InotifyAddWatch(in, fmt.Sprintf("/proc/self/fd/%d", file), unix.IN_DELETE_SELF)
}

// mayWatch reports whether this process may watch files of its own, which it tries with the first one:
// not where the kernel has no inotify, or a security module forbids it.
func (k *keptHalves) mayWatch(file int) bool {
	k.try.Do(func() {
		in, err := unix.InotifyInit1(unix.IN_CLOEXEC)
		if err == nil {
			defer unix.Close(in)
			_, err = watchFile(in, file)
		}
		k.may = !is(err, unix.ENOSYS, unix.EACCES, unix.EPERM)
	})
	return k.may
}
