package regcache

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
)

const memlockVariable = "SAN_TEST_MEMLOCK" // the limit, in the child

// The same work is done under three limits, in a process to which they apply. The kernel counts
// io_uring's buffers as it counts those of ibv_reg_mr.
func TestTheCacheWorksUnderEachMemlockLimit(t *testing.T) {
	newNIC(t) // skips the test if there is none
	work := func() *exec.Cmd { return exec.Command(os.Args[0], "-test.run=^TestWorkUnderMemlock$", "-test.v") }
	for name, limit := range map[string]uint64{
		"64 KiB": 64 << 10, "8 MiB": 8 << 20, "unlimited": unix.RLIM_INFINITY,
	} {
		t.Run(name, func(t *testing.T) {
			c := work()
			c.Env = append(os.Environ(), fmt.Sprintf("%s=%d", memlockVariable, limit))
			run := withoutIPCLock
			if limit == unix.RLIM_INFINITY { // the capability has the same effect
				run = (*exec.Cmd).CombinedOutput
			}
			out, err := run(c)
			t.Logf("%s", out)
			if err != nil {
				t.Error(err)
			}
			if !strings.Contains(string(out), "uses,") {
				t.Error("the child did not do its work")
			}
		})
	}
}

// Root in an unprivileged container has CAP_IPC_LOCK in the container's user namespace,
// which the kernel does not count here.
func TestACapabilityInAUserNamespaceLiftsNoLimit(t *testing.T) {
	ring, err := newRing()
	if err != nil {
		testenv.Missing(t, fmt.Sprintf("io_uring: %v", err))
	}
	ring.close()
	c := exec.Command(os.Args[0], "-test.run=^TestTheKernelCounts$", "-test.v")
	c.Env = append(os.Environ(), fmt.Sprintf("%s=%d", memlockVariable, 8<<20))
	c.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}},
	}
	out, err := c.CombinedOutput()
	if errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.ENOSPC) {
		testenv.Missing(t, fmt.Sprintf("user namespaces: %v", err))
	}
	t.Logf("%s", out)
	if err != nil {
		t.Error(err)
	}
	if !strings.Contains(string(out), "refused: ") {
		t.Error("the child did not do its work")
	}
}

// TestTheKernelCounts runs in the child.
func TestTheKernelCounts(t *testing.T) {
	limit := memlockOfChild(t)
	if limit == 0 {
		return
	}
	if have, limited := MemlockLimit(); !limited || uint64(have) != limit {
		t.Errorf("MemlockLimit: %d, %v; want %d, true", have, limited, limit)
	}
	ring, err := newRing()
	if err != nil {
		t.Fatal(err)
	}
	defer ring.close()
	b := make([]byte, 2*limit)
	_, err = ring.register(addressOf(b), len(b))
	t.Logf("refused: %v", err)
	if !errors.Is(err, syscall.ENOMEM) {
		t.Errorf("%d bytes under a limit of %d: %v, want ENOMEM", len(b), limit, err)
	}
	runtime.KeepAlive(b)
}

// memlockOfChild sets and returns the child's limit, or returns 0 if this process is not a child.
func memlockOfChild(t *testing.T) uint64 {
	t.Helper()
	value, child := os.LookupEnv(memlockVariable)
	if !child {
		return 0
	}
	limit, err := strconv.ParseUint(value, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	if limit != unix.RLIM_INFINITY {
		rlimit := unix.Rlimit{Cur: limit, Max: limit}
		if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &rlimit); err != nil {
			t.Fatal(err)
		}
	}
	return limit
}

// withoutIPCLock runs a command that cannot get CAP_IPC_LOCK.
func withoutIPCLock(c *exec.Cmd) (out []byte, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		// The bounding set belongs to the thread, and a child inherits that of the thread which starts
		// it. This thread ends with its goroutine.
		runtime.LockOSThread()
		if err = unix.Prctl(unix.PR_CAPBSET_DROP, unix.CAP_IPC_LOCK, 0, 0, 0); err == nil {
			out, err = c.CombinedOutput()
		}
	}()
	<-done
	return out, err
}

// TestWorkUnderMemlock runs in the child. All of the work is done: with the device, or through the arena
// when the device accepts no more.
func TestWorkUnderMemlock(t *testing.T) {
	limit := memlockOfChild(t)
	if limit == 0 {
		return
	}
	nic := newNIC(t)
	c := New(nic, Config{})
	var buffers [][]byte
	for _, size := range []int{4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20} {
		buffers = append(buffers, make([]byte, size), make([]byte, size), make([]byte, size), make([]byte, size))
	}
	direct, copied := 0, 0
	use := func(b []byte, access Access) {
		r, err := c.Acquire(b, access)
		if err == nil {
			direct++
			b[0]++
			if err := nic.Stale(r, b); err != nil {
				t.Error(err)
			}
			release(t, r)
			return
		}
		if !errors.Is(err, syscall.ENOBUFS) {
			t.Fatal(err)
		}
		if !strings.Contains(err.Error(), "RLIMIT_MEMLOCK") || !strings.Contains(err.Error(), "ulimit -l") {
			t.Fatalf("error %q does not say what to do", err)
		}
		copied++
		bounce, err := DefaultArena().Get(4 << 10)
		if err != nil {
			t.Fatal(err)
		}
		release(t, acquire(t, c, bounce.Bytes(), LocalRead))
		bounce.Put()
	}
	for round := range 10 {
		for i, b := range buffers {
			use(b, []Access{LocalRead, LocalWrite, RemoteRead}[(round+i)%3])
			use(buffers[0], LocalRead) // this one is used all the time
		}
	}
	s := c.Stats()
	t.Logf("%d uses, %d copied, %d hits; %v", direct+copied, copied, s.Hits, DefaultBudget())
	wantCopies := limit < 1<<20+4096
	if (copied != 0) != wantCopies {
		t.Errorf("%d copied under a limit of %d", copied, limit)
	}
	if s.Hits == 0 {
		t.Error("nothing was cached")
	}
	if _, bytes := nic.registered(); limit != unix.RLIM_INFINITY && uint64(bytes) > limit/memlockShare {
		t.Errorf("%d bytes are cached under a limit of %d", bytes, limit)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
}
