package shm

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/provider/shm/internal/quota"
	"github.com/sanconn/san/provider/shm/internal/ring"
	"github.com/sanconn/san/session"
)

func mayWatch(t *testing.T) bool { return kept.mayWatch(memfd(t, pageSize, 0, 0)) }

// If a process has no descriptors when it first checks whether it may watch a file, it checks again
// later.
func TestMayWatchWithoutDescriptors(t *testing.T) {
	if !mayWatch(t) {
		testenv.MissingKernel(t, "inotify")
	}
	file := memfd(t, pageSize, 0, 0)
	testenv.WithoutDescriptors(t, func() {
		if !new(keptHalves).mayWatch(file) {
			t.Error("it never does")
		}
	})
}

// smallBudget sets the budget for the rings of this process, of which a user may have all, until the end
// of the test.
func smallBudget(t *testing.T, most int64) {
	if !mayWatch(t) {
		testenv.MissingKernel(t, "inotify")
	}
	old, small := budget, ring.NewBudget(most)
	budget = func() *ring.Budget { return small }
	t.Cleanup(func() { budget = old })
	leaks(t)
}

// fillInDirectory makes the accepting end of a new link in a directory fill a ring, and ends the link.
// keep gets the descriptor of that end's half. It returns false if there is no memory for a link.
func fillInDirectory(t *testing.T, l *served, keep func(half int)) bool {
	t.Helper()
	cfg := l.cfg
	cfg.timeout = patience
	x, err := dial(place{port: l.at.port, name: l.at.name}, cfg)
	var u *session.Unavailable
	if errors.As(err, &u) && u.Reason == session.ReasonResources {
		return false
	}
	if err != nil {
		t.Fatal(err)
	}
	y, err := l.accept()
	if err != nil {
		t.Fatal(err)
	}
	newPeer(y).fill(unreadSize)
	keep(y.(*endpoint).link.slots.segments[0].own.file)
	abort(x)
	abort(y)
	x.(*endpoint).link.closeUnused()
	return true
}

// memoryOf returns how much memory a file has.
func memoryOf(t *testing.T, fd int) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512
}

// awaitBudget waits until so much of the budget is in use.
func awaitBudget(t *testing.T, want int64) {
	t.Helper()
	testenv.Eventually(t, patience, func() error {
		if n := budget().Used(); n != want {
			return fmt.Errorf("%d bytes of the budget are taken, want %d", n, want)
		}
		return nil
	})
}

// In a directory, a peer can keep the memory that this process has written for it by a descriptor, even
// by one that it cannot read from. That memory stays charged to the peer's user until it is released: so
// the peer gets no more than its share, however often it hangs up and dials again.
func TestMemoryThatIsKeptInADirectoryCounts(t *testing.T) {
	const most = 32 << 20
	for name, open := range map[string]func(half int) (int, error){
		"a descriptor": unix.Dup,
		"its place": func(half int) (int, error) {
			return unix.Open(fmt.Sprintf("/proc/self/fd/%d", half), unix.O_PATH|unix.O_CLOEXEC, 0)
		},
	} {
		t.Run(name, func(t *testing.T) {
			smallBudget(t, most)
			l := listen(t, Config{Dir: t.TempDir()})
			for range 2 {
				var all []int
				for len(all) < 3*most/maxRingMax && fillInDirectory(t, l, func(half int) {
					fd, err := open(half)
					if err != nil {
						t.Fatal(err)
					}
					all = append(all, fd)
				}) {
				}
				awaitNoLinks(t)
				n := int64(0)
				for _, fd := range all {
					n += memoryOf(t, fd)
				}
				if n < most/4 || n > most+maxRingMax || budget().Used() < n {
					t.Errorf("%d bytes are kept of %d links, and %d count", n, len(all), budget().Used())
				}
				closeAll(all)
				awaitBudget(t, 0)
			}
		})
	}
}

// Memory that a process keeps, by a descriptor that another process may have passed to it, is charged
// until that process ends.
func TestMemoryThatIsKeptCountsUntilTheProcessEnds(t *testing.T) {
	smallBudget(t, 32<<20)
	l := listen(t, Config{Dir: t.TempDir()})
	other := exec.Command("sleep", "1000")
	if !fillInDirectory(t, l, func(half int) {
		fd, err := unix.FcntlInt(uintptr(half), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		f := os.NewFile(uintptr(fd), "half")
		defer f.Close()
		other.ExtraFiles = []*os.File{f}
		if err := other.Start(); err != nil {
			t.Fatal(err)
		}
	}) {
		t.Fatal("no memory for a link")
	}
	defer other.Wait()
	defer other.Process.Kill()
	awaitNoLinks(t)
	testenv.Eventually(t, patience, func() error { // the memory of the other end, whose half nobody keeps
		if n := budget().Used(); n > maxRingMax+ring.Start {
			return fmt.Errorf("%d bytes count", n)
		}
		return nil
	})
	if n := budget().Used(); n != maxRingMax+ring.Start {
		t.Errorf("%d bytes count", n)
	}
	other.Process.Kill()
	awaitBudget(t, 0)
}

// Two processes that end their links, and keep nothing, have memory for the next link each time.
func TestManyLinksInADirectory(t *testing.T) {
	const most, ring = 64 << 20, 1 << 20
	smallBudget(t, most)
	l := listen(t, Config{Dir: t.TempDir(), ringMax: ring})
	for i := range 5 * most / ring {
		if !fillInDirectory(t, l, func(int) {}) {
			t.Fatalf("no memory for link %d: %d bytes count", i, budget().Used())
		}
	}
	awaitBudget(t, 0)
}

// inotify events are lost if the kernel has no memory for them.
func TestMemoryWhoseEventsWereLost(t *testing.T) {
	smallBudget(t, 32<<20)
	m, half, err := newHalf(firstSlots, ownAccount(), true)
	if err != nil {
		t.Fatal(err)
	}
	m.unmapKept(budget().Of(quota.Own), 1<<20)
	lost := false
	kept.mu.Lock()
	kept.gone[1<<30] = func() { lost = true }
	kept.lookLocked()
	kept.mu.Unlock()
	if n := budget().Used(); !lost || n != 1<<20+ring.Start {
		t.Errorf("a watch that has ended was found: %v; %d bytes count of a half that is kept", lost, n)
	}
	unix.Close(half)
	awaitBudget(t, 0)
}

// A user whose share is used up gets no link, because it could keep the link's memory, too.
func TestNoLinkWithoutMemory(t *testing.T) {
	smallBudget(t, 8<<20)
	l := listen(t, Config{Dir: t.TempDir()})
	memory := budget().Of(quota.Holder(os.Geteuid()))
	n := int64(8<<20 - ring.Start)
	memory.Charge(n)
	defer memory.Charge(-n)
	c, err := l.at.connect(l.cfg.Dir)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(patience))
	m, half, err := newHalf(firstSlots, ownAccount(), true)
	if err != nil {
		t.Fatal(err)
	}
	defer m.unmapKept(budget().Of(quota.Own), 0)
	defer unix.Close(half)
	(&rawPeer{t, c}).send(linkRequest(version, firstSlots), half, doorbellEnd(t))
	var reply message
	fds, err := receive(c, &reply)
	closeAll(fds)
	if err != nil || reply.kind != msgLinkReply || reply.code != codeResources {
		t.Errorf("a link: %+v, %v", reply, err)
	}
}

// While this process cannot watch a half, it stays charged.
func TestMemoryThatMayBeKeptCounts(t *testing.T) {
	smallBudget(t, 32<<20)
	testenv.Eventually(t, patience, func() error {
		kept.mu.Lock()
		defer kept.mu.Unlock()
		if kept.gone != nil {
			return errors.New("there is an instance of inotify")
		}
		return nil
	})
	m, fd, err := newHalf(firstSlots, ownAccount(), true)
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(fd)
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: was.Max}); err != nil { // descriptors that are open stay open
		t.Fatal(err)
	}
	m.unmapKept(budget().Of(quota.Own), 1<<20)
	n := budget().Used()
	kept.mu.Lock()
	watched := len(kept.gone) > 0
	kept.mu.Unlock()
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	if n != 1<<20+ring.Start || watched {
		t.Errorf("%d bytes count, and the half is watched: %v", n, watched)
	}
	awaitBudget(t, 0) // the watch is tried again
}
