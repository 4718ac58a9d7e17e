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

// No memory of a final half can be given back while anybody has the half: the peer, a process to which
// the peer has passed the descriptor, or a message in flight. So after the link's end it still counts
// as the peer's user's, until nobody has it. A watch reports that: as the file has no name, the kernel
// ends the watch with the file's last descriptor or mapping in any process (dentry_unlink_inode in
// Linux's fs/dcache.c).

// keptHalves watches halves by one inotify instance, which exists, with a goroutine that reads it, only
// while there are any: a user of the host may have few instances.
type keptHalves struct {
	try sync.Once
	may bool // see mayWatch

	mu   sync.Mutex       // guards the fields below
	in   int              // the instance
	gone map[int32]func() // by watch: called when nobody has the half any more; nil: no instance exists
}

var kept keptHalves

// mostKept bounds the halves that are watched. Each causes two events, of which the kernel queues
// 16,384 by default (fs.inotify.max_queued_events).
const mostKept = 8 << 10

// unmapKept unmaps a half of this end. Up to written bytes of its rings may have memory.
func (m mapping) unmapKept(memory ring.Share, written uint64) {
	if m.mem == nil || m.file < 0 {
		m.unmap()
		return
	}
	n := int64(written + ring.Start) // Start: for what is beside the rings
	memory.Charge(n)
	m.unmap()
	kept.await(m, func() { memory.Charge(-n) })
}

// await closes a half's file, and calls gone when nobody has the half any more. If a watch cannot be
// had, await tries again, as other processes may use up the user's watches for a time. That is in vain
// if this process may not read the file, because its user has changed since it made the file, or the
// peer has changed the file's owner. Then the half counts for good.
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
		if err := f.SetReadDeadline(time.Time{}); err != nil { // epoll has no room
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

// read reads the instance until no half has been watched for a tick: closing the instance takes
// milliseconds.
func (k *keptHalves) read(in *os.File) {
	defer in.Close()
	var events [64 * unix.SizeofInotifyEvent]byte // of files, so the events have no names
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

// endLocked handles the end of a watch. It may be called several times.
func (k *keptHalves) endLocked(watch int32) {
	if gone := k.gone[watch]; gone != nil {
		delete(k.gone, watch)
		gone()
	}
}

// lookLocked finds the watches that have ended after events were lost, for lack of memory or otherwise.
func (k *keptHalves) lookLocked() {
	there, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", k.in))
	for watch := range k.gone {
		if err == nil && !bytes.Contains(there, fmt.Appendf(nil, "inotify wd:%x ", watch)) {
			k.endLocked(watch)
		}
	}
}

// watchFile watches for the end of a file of this process's user.
func watchFile(in, file int) (watch int, err error) {
	_ = unix.Fchmod(file, 0o400) // a watch needs the right to read
	return unix.InotifyAddWatch(in, fmt.Sprintf("/proc/self/fd/%d", file), unix.IN_DELETE_SELF)
}

// mayWatch reports whether this process may watch its own files. It tries once, with the first file. A
// kernel may have no inotify, and a security module may forbid it.
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
