package shm

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/provider/shm/internal/quota"
	"github.com/sanconn/san/session"
)

// takenHalf makes a link as a peer does, and returns the half that this process has made for the peer.
func takenHalf(t *testing.T, l *served) (s *rawPeer, fd int) {
	t.Helper()
	s = dialRaw(t, l)
	s.send(linkRequest(version, firstSlots), halfToPass(t), doorbellEnd(t))
	var m message
	fds, err := receive(s.conn, &m)
	t.Cleanup(func() { closeAll(fds) })
	if err != nil || m.code != codeOK || len(fds) != 2 {
		t.Fatalf("no link: %+v, %v, %d descriptors", m, err, len(fds))
	}
	return s, fds[0]
}

// Memory that one end writes, the other can read, but not change in any way: neither through its
// descriptor nor through a mapping.
func TestPeersMemoryCannotBeWritten(t *testing.T) {
	leaks(t)
	dir := t.TempDir()
	for name, cfg := range map[string]Config{"by name": {}, "in a directory": {Dir: dir}} {
		t.Run(name, func(t *testing.T) {
			var s *rawPeer
			var fd int
			if cfg.Dir == "" {
				s, fd = takenHalf(t, listen(t, cfg))
				defer s.conn.Close()
			} else {
				m, half, err := newHalf(firstSlots, ownAccount(), true)
				if err != nil {
					t.Fatal(err)
				}
				defer m.unmapKept(budget().Of(quota.Own), 0)
				defer unix.Close(half)
				fd = half
			}
			size := int(halfSize(firstSlots))
			if mem, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
				unix.Munmap(mem)
				t.Error("mapped for writing")
			}
			m, err := mapHalf(fd, firstSlots, ownAccount(), false)
			if err != nil {
				t.Fatal(err)
			}
			defer m.unmap()
			for what, err := range map[string]error{
				"mprotect":  unix.Mprotect(m.mem, unix.PROT_READ|unix.PROT_WRITE),
				"write":     second(unix.Write(fd, make([]byte, 8))),
				"pwrite":    second(unix.Pwrite(fd, make([]byte, 8), 8)),
				"punching":  unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, pageSize),
				"allocate":  unix.Fallocate(fd, 0, 0, pageSize),
				"remove":    unix.Madvise(m.mem, unix.MADV_REMOVE),
				"ftruncate": unix.Ftruncate(fd, 0),
				"seal":      second(unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_WRITE)),
			} {
				if err == nil {
					t.Errorf("%s works", what)
				}
			}
			var st unix.Stat_t
			if err := unix.Fstat(fd, &st); err != nil || st.Mode&0o777 != 0 {
				t.Errorf("mode %o, %v: it can be opened again", st.Mode, err)
			}
			if cfg.Dir == "" {
				return
			}
			// A process that may open it again cannot write either. (It belongs to root, or to this
			// user.)
			again, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), unix.O_RDWR|unix.O_CLOEXEC, 0)
			if err != nil {
				return
			}
			defer unix.Close(again)
			if mem, err := unix.Mmap(again, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
				unix.Munmap(mem)
				t.Error("opened again, and mapped for writing")
			}
			if _, err := unix.Pwrite(again, make([]byte, 8), 8); err == nil {
				t.Error("opened again, and written to")
			}
		})
	}
}

func second[T any](_ T, err error) error { return err }

// In a directory the peer may be anybody. So there a half is only accepted if nobody can take pages out
// of it: a thread that reads there would wait for that in the kernel.
func TestPagesOfAPeerInADirectoryStay(t *testing.T) {
	leaks(t)
	dir := t.TempDir()
	l := listen(t, Config{Dir: dir})
	halves := map[bool]int{}
	for _, final := range []bool{false, true} {
		m, fd, err := newHalf(firstSlots, ownAccount(), final)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		defer m.unmapKept(budget().Of(quota.Own), 0)
		halves[final] = fd
		m.mem[0] = 1
		if err := unix.Madvise(m.mem, unix.MADV_REMOVE); (err != nil) != final {
			t.Errorf("final: %v; pages are taken out: %v", final, err)
		}
	}
	link := func(final bool) (s *rawPeer, reply message) {
		t.Helper()
		c, err := l.at.connect(dir)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		c.SetDeadline(time.Now().Add(patience))
		s = &rawPeer{t, c}
		s.send(linkRequest(version, firstSlots), halves[final], doorbellEnd(t))
		fds, _ := receive(c, &reply)
		closeAll(fds)
		return s, reply
	}
	if _, reply := link(false); reply.kind != 0 {
		t.Errorf("answered %+v", reply)
	}
	s, reply := link(true)
	if reply.kind != msgLinkReply || reply.code != codeOK {
		t.Fatalf("no link: %+v", reply)
	}
	s.send((&message{kind: msgSegment, number: firstSlots}).encode(), halves[false])
	if last := s.awaitHangUp(); last.kind != 0 {
		t.Errorf("answered %+v", last)
	}
}

// Another user who has the descriptor cannot open the file again with more rights.
func TestPeersMemoryCannotBeOpenedByAnotherUser(t *testing.T) {
	testenv.NeedRoot(t)
	m, fd, err := newHalf(firstSlots, ownAccount(), false)
	if err != nil {
		t.Fatal(err)
	}
	defer m.unmap()
	f := os.NewFile(uintptr(fd), "half")
	defer f.Close()
	binary := runnable(t)
	c := spawn(t, "reopen", func(c *exec.Cmd) {
		binary(c)
		asUser(someone)(c)
		c.ExtraFiles = []*os.File{f}
	})
	if got := c.line(t, "reopened"); got != "" {
		t.Errorf("another user can %s", got)
	}
}

func init() {
	// Tries what nobody may do with descriptor 3, and prints what was possible.
	roles["reopen"] = func() error {
		can := []string{"reopened"}
		for _, flags := range []int{unix.O_RDWR, unix.O_WRONLY, unix.O_RDWR | unix.O_TRUNC} {
			if fd, err := unix.Open("/proc/self/fd/3", flags, 0); err == nil {
				unix.Close(fd)
				can = append(can, fmt.Sprintf("open it with %#x", flags))
			}
		}
		if unix.Fchmod(3, 0o666) == nil {
			can = append(can, "change its mode")
		}
		if _, err := unix.Mmap(3, 0, pageSize, unix.PROT_READ, unix.MAP_SHARED); err != nil {
			can = append(can, "not read it")
		}
		fmt.Println(strings.Join(can, " "))
		return nil
	}
}

// When a link ends, the memory that this process has written for it is freed, although the peer keeps
// the descriptor.
func TestDescriptorThatIsKept(t *testing.T) {
	setIdleTicks(t, 1000) // so that the link does not end before its first connection
	leaks(t)
	l := listen(t, Config{})
	s, fd := takenHalf(t, l)
	blocks := func() int64 {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			t.Fatal(err)
		}
		return st.Blocks * 512
	}
	b := newPeer(s.connect(l, 0))
	b.fill(unreadSize)
	if n := blocks(); n < maxRingMax/2 {
		t.Fatalf("%d bytes in a full ring", n)
	}
	end(b)
	s.conn.Close()
	testenv.Eventually(t, patience, func() error {
		if n := blocks(); n > 0 {
			return fmt.Errorf("%d bytes are left behind the link's end", n)
		}
		return nil
	})
}

// A peer that has not ended the link finds how a connection has ended, even if it looks only after this
// process has given up the link.
func TestEndThatIsReadBehindTheLink(t *testing.T) {
	setIdleTicks(t, 1000) // so that the link does not end before its first connection
	leaks(t)
	l := listen(t, Config{})
	s, fd := takenHalf(t, l)
	b := s.connect(l, 0)
	k := b.(*endpoint).link
	end(newPeer(b))
	for !k.over() { // until it has been idle for long
		k.sweep()
	}
	s.awaitHangUp()
	awaitNoLinks(t)
	m, err := mapHalf(fd, firstSlots, ownAccount(), false)
	if err != nil {
		t.Fatal(err)
	}
	defer m.unmap()
	if state := m.part(0).control.state.load(0); state != stateClosed {
		t.Errorf("the connection's state is %d", state)
	}
}

// A link without connections stays, and stays charged, while the peer has not read everything.
func TestIdleLinkWithBytesUnread(t *testing.T) {
	leaks(t)
	l := listen(t, Config{})
	a, b := meet(t, l)
	near, far := newPeer(a), newPeer(b)
	k := b.(*endpoint).link
	far.fill(unreadSize)
	end(b)
	k.mu.Lock()
	k.idle = idleTicks[k.role] // as if the time had passed; with a shorter time from the start, the link could end before the connection
	k.mu.Unlock()
	for range 4 {
		k.sweep()
	}
	if k.over() {
		t.Error("the link has ended")
	}
	if budget().Used() == 0 {
		t.Error("what is unread does not count")
	}
	var ev session.Event
	n := 0
	for ; near.Poll(&ev); n++ {
		near.Drop()
	}
	if n*unreadSize < maxRingMax/2 {
		t.Errorf("%d messages are left: %v", n, near.Err())
	}
	end(a)
}
