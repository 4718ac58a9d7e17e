package shm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/provider/shm/internal/ring"
	"github.com/sanconn/san/session"
)

// doorbell wakes the processes of a link. Counts in shared memory show which slots have news. Each
// process waits at a descriptor of its own, and passes a copy of it to the other process, which rings
// there. Ringing must not block, whatever the peer does with its copy, which shares flags and content.
// So a ring is one of these:
//
//   - a read of an eventfd with RWF_NOWAIT, which takes one from its count. That makes room for writes, which
//     is an event for the process that waits. (Writes have no such flag: the peer could fill the counter and
//     clear O_NONBLOCK.)
//   - before Linux 5.8, a send to a unix socket with MSG_DONTWAIT. With the read of it that costs ten times
//     as much.
type doorbell struct {
	own, peers *bell      // in the first segment
	rung       ring.Rung  // what this side has rung for, of peers.asleep
	seen       seenCounts // of peers

	at     *os.File        // where this process waits, and the peer rings
	wait   syscall.RawConn // of at
	toPass int             // the peer's copy, or its end, of at; -1: passed
	peer   int             // where this process rings; -1: not known yet
	socket bool            // peer is a socket
	drains bool            // at is a socket
}

var errDoorbell = errors.New("shm: not a doorbell")

// openEventfd is newEventfd, except in tests that make it fail as before Linux 5.8.
var openEventfd = newEventfd

func (d *doorbell) create() (err error) {
	at, pass, err := openEventfd()
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS) {
		d.drains = true
		at, pass, err = newSocketpair()
	}
	if err != nil {
		return err
	}
	d.at, d.toPass = os.NewFile(uintptr(at), "doorbell"), pass
	// NewFile does not report that epoll has no room for the descriptor, and nothing would wake this
	// process then. SetReadDeadline fails in that case.
	if err := d.at.SetReadDeadline(time.Time{}); err != nil {
		return fmt.Errorf("shm: doorbell: %w: %w", err, unix.ENOMEM)
	}
	d.wait, err = d.at.SyscallConn()
	return err
}

// newEventfd returns an eventfd and a copy. It has tried the read by which the peer rings.
func newEventfd() (at, pass int, err error) {
	at, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK|unix.EFD_SEMAPHORE)
	if err != nil {
		return -1, -1, fmt.Errorf("shm: eventfd: %w", err)
	}
	var endless [8]byte
	binary.NativeEndian.PutUint64(endless[:], 1<<63)
	pass = -1
	if _, err = unix.Write(at, endless[:]); err == nil {
		err = readOne(at)
	}
	if err == nil {
		pass, err = unix.FcntlInt(uintptr(at), unix.F_DUPFD_CLOEXEC, 0)
	}
	if err != nil {
		unix.Close(at)
		return -1, -1, fmt.Errorf("shm: eventfd: %w", err)
	}
	return at, pass, nil
}

func newSocketpair() (at, pass int, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, -1, fmt.Errorf("shm: socketpair: %w", err)
	}
	return fds[0], fds[1], nil
}

// passed closes this process's copy of the descriptor that the peer has now.
func (d *doorbell) passed() {
	if d.toPass >= 0 {
		unix.Close(d.toPass)
	}
	d.toPass = -1
}

// setPeer takes the descriptor that the peer has passed, if ringing there cannot block. A TCP socket
// could block, as it is locked while another process's send copies from memory that is not available;
// so could a pipe. All eventfds have one inode. Other files with that inode either refuse RWF_NOWAIT or
// obey it.
func (d *doorbell) setPeer(fd int) error {
	domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	if err == nil {
		kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
		if err != nil || domain != unix.AF_UNIX || kind != unix.SOCK_STREAM {
			return fmt.Errorf("%w: a socket of domain %d, type %d, %v", errDoorbell, domain, kind, err)
		}
		d.peer, d.socket = fd, true
		return nil
	}
	ours, err := unix.Eventfd(0, unix.EFD_CLOEXEC) // this process's own doorbell may be a socket
	if err != nil {
		return fmt.Errorf("shm: eventfd: %w", err)
	}
	defer unix.Close(ours)
	if want, err := inodeOf(ours); err != nil {
		return err
	} else if got, err := inodeOf(fd); err != nil || got != want {
		return fmt.Errorf("%w: inode %v, %v", errDoorbell, got, err)
	}
	if err := readOne(fd); err != nil {
		return fmt.Errorf("%w: %w", errDoorbell, err)
	}
	d.peer = fd
	return nil
}

type inode struct {
	major, minor uint32
	number       uint64
}

// inodeOf identifies a file without waiting for its file system, which the peer may serve.
func inodeOf(fd int) (inode, error) {
	var st unix.Statx_t
	err := unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_INO, &st)
	if err != nil {
		return inode{}, fmt.Errorf("shm: statx: %w", err)
	}
	return inode{st.Dev_major, st.Dev_minor, st.Ino}, nil
}

// The memory that a ring reads or writes. Its content means nothing.
var (
	one    [8]byte
	oneVec = func() (v [1]unix.Iovec) { v[0].Base = &one[0]; v[0].SetLen(len(one)); return v }()
)

// readOne takes one from an eventfd's count, without blocking.
func readOne(fd int) error {
	const none = ^uintptr(0) // an offset of -1: no position
	_, _, errno := unix.RawSyscall6(unix.SYS_PREADV2, uintptr(fd), uintptr(unsafe.Pointer(&oneVec)), 1, none, none, unix.RWF_NOWAIT)
	if errno != 0 {
		return errno
	}
	return nil
}

// sendOne sends a byte to a socket, without blocking.
func sendOne(fd int) {
	// It fails for good if the peer has gone, or if the queue is full; then the peer has a byte to
	// read, and looks for news afterwards. A lack of memory for one byte is brief.
	const tries = 100
	for range tries {
		_, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(&one[0])), 1,
			unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0, 0)
		if errno != unix.EINTR && errno != unix.ENOBUFS && errno != unix.ENOMEM {
			return
		}
	}
}

// ring counts news about a slot, and wakes the peer if it sleeps.
func (d *doorbell) ring(slot int, ev session.Events) {
	d.own.tell(slot, ev)
	switch {
	case !d.rung.Ring(&d.peers.asleep):
	case d.socket:
		sendOne(d.peer)
	default:
		_ = readOne(d.peer) // it fails only if the peer has spoiled its own eventfd: the kernel needs no memory, and nothing interrupts it
	}
}

// drain reads bytes from a socket, but no message with descriptors, which the kernel would close here.
// A queue in which the peer has put descriptors stays as it is until close.
func drain(fd int) {
	var b [64]byte
	n, _, flags, _, err := unix.Recvmsg(fd, b[:], nil, unix.MSG_PEEK|unix.MSG_DONTWAIT)
	if err == nil && n > 0 && flags&unix.MSG_CTRUNC == 0 {
		unix.Read(fd, b[:n])
	}
}

// close closes the descriptors. Those that can be slow to close, because they or their queues are from
// the peer, are closed on the account of the peer's user. Nobody may wait or ring any more.
func (d *doorbell) close(peerUser account) {
	if d.drains {
		peerUser.closeLater(func() { d.at.Close() })
	} else {
		d.at.Close()
	}
	d.passed()
	if d.peer >= 0 {
		peerUser.closeUntrusted(d.peer)
	}
}
