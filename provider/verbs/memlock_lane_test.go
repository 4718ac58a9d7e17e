//go:build linux

package verbs

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/session"
)

const memlockVariable = "SAN_TEST_MEMLOCK" // the limit, in the child

// Streams move over verbs with any RLIMIT_MEMLOCK. The test runs in a process of a user to whom the
// limit applies, because root is exempt.
func TestMemlockLimits(t *testing.T) {
	cable(t)
	for name, limit := range map[string]uint64{
		"64 KiB": MinMemlock, "8 MiB": 8 << 20, "unlimited": unix.RLIM_INFINITY,
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(context.Background(), 6*patience)
			defer cancel()
			// Through /proc: only root may be able to enter the folder of the binary.
			child := exec.CommandContext(ctx, "/proc/self/exe", "-test.run=^TestWorkUnderMemlock$", "-test.v")
			child.Env = append(os.Environ(), fmt.Sprintf("%s=%d", memlockVariable, limit))
			child.Dir = "/"
			const nobody = 65534
			child.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
			out, err := child.CombinedOutput()
			t.Logf("%s", out)
			if err != nil {
				t.Error(err)
			}
			if !bytes.Contains(out, []byte("--- PASS: TestWorkUnderMemlock")) {
				t.Error("the child did not do its work")
			}
		})
	}
}

// TestWorkUnderMemlock is the child's part.
func TestWorkUnderMemlock(t *testing.T) {
	value, child := os.LookupEnv(memlockVariable)
	if !child {
		return
	}
	limit, err := strconv.ParseUint(value, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: limit, Max: limit}); err != nil {
		t.Fatal(err)
	}
	got, limited := regcache.MemlockLimit()
	if limited != (limit != unix.RLIM_INFINITY) || limited && uint64(got) != limit {
		t.Fatalf("the limit is %d, %v; want %d", got, limited, limit)
	}

	l := listen(t, Config{})
	a, b := sessions(t, l, session.Config{})
	began := time.Now()
	total := 3 << 20 // bytes in each direction
	if limited && limit < lowMemlock {
		total = 500_000 // all of them in small messages
	}
	streams(t, a, b, total)
	sent := a.Stats()
	t.Logf("%d bytes each way in %v, %d by RDMA, in %d messages; %d kB pinned; %+v",
		total, time.Since(began).Round(time.Millisecond), sent.OfferedBytesSent, sent.MessagesSent, pinned(t), regcache.DefaultBudget().Stats())
	if byRDMA, want := sent.OfferedBytesSent > 0, !limited || limit >= lowMemlock; byRDMA != want {
		t.Errorf("bytes moved by RDMA: %v, want %v", byRDMA, want)
	}
	if limited {
		refusedForWantOfMemory(t, l, func() {
			was := a.Stats()
			streams(t, a, b, 200_000) // existing connections go on, by messages
			now := a.Stats()
			t.Logf("with nothing left: %d bytes, %d of them by RDMA", now.BytesSent-was.BytesSent, now.OfferedBytesSent-was.OfferedBytesSent)
		})
		streams(t, a, b, 200_000)
	}

	a.Close()
	b.Close()
	l.Close()
	<-a.Closed()
	<-b.Closed()
	expectNothingPinned(t)
}

// refusedForWantOfMemory connects until there is no room, at either end: the dialer gets that reason, at
// once. Then it calls then, while no memory is left.
func refusedForWantOfMemory(t *testing.T, l *listener, then func()) {
	t.Helper()
	var open []*Endpoint
	defer func() {
		for _, e := range open {
			e.discard()
		}
	}()
	for {
		x, y, err := connect(l, Config{})
		if err == nil {
			open = append(open, x, y)
			continue
		}
		t.Logf("after %d more connections: %v", len(open)/2, err)
		if reasonOf(err) != session.ReasonResources {
			t.Errorf("%v (%v), want %v", err, reasonOf(err), session.ReasonResources)
		}
		break
	}

	before := regcache.DefaultBudget().Stats()
	regcache.DefaultBudget().Flush() // what is in use stays, such as bytes in the sessions' send buffers
	if s := regcache.DefaultBudget().Stats(); s.Entries < before.Entries {
		t.Errorf("refused though %d bytes were cached and not in use", before.Bytes-s.Bytes)
	}

	// Uses up the rest, so that it is this end that finds no room.
	devices.mu.Lock()
	var dev *device
	for _, dev = range devices.m {
	}
	devices.mu.Unlock()
	dom, err := dev.newDomain(Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer dom.close()
	for end := time.Now().Add(patience); ; {
		for {
			r, err := newMessageMemory(peerBudget{arena: controlArena()}, 1)
			if err == nil {
				_, err = r.register(dom.pd, r.mem, 0)
			}
			defer r.close()
			if err != nil {
				break
			}
		}
		// The other end of a failed attempt returns its memory a little later, which may be enough for
		// one more connection.
		x, y, e := connect(l, Config{})
		if e == nil {
			open = append(open, x, y)
			continue
		}
		if err = e; errors.Is(err, syscall.ENOMEM) || time.Now().After(end) {
			break
		}
	}
	t.Logf("with nothing left: %v", err)
	if reasonOf(err) != session.ReasonResources || !errors.Is(err, syscall.ENOMEM) ||
		!strings.Contains(err.Error(), "RLIMIT_MEMLOCK") || !strings.Contains(err.Error(), "ulimit -l") {
		t.Errorf("%v (%v): it does not say what is missing", err, reasonOf(err))
	}
	then()
}

// streams sends n random bytes in each direction, in pieces of many sizes, and compares them.
func streams(t *testing.T, a, b *session.Session, n int) {
	t.Helper()
	var all sync.WaitGroup
	way := func(from, to *session.Session, seed byte) {
		data := make([]byte, n)
		rand.NewChaCha8([32]byte{seed}).Read(data)
		all.Go(func() {
			for sizes, rest := []int{1, 700, 5000, 64 << 10, 300_000, 1 << 20}, data; len(rest) > 0; {
				k := min(sizes[0], len(rest))
				if _, err := from.Write(rest[:k]); err != nil {
					t.Errorf("Write: %v", err)
					return
				}
				rest = rest[k:]
				sizes = append(sizes[1:], sizes[0])
			}
		})
		all.Go(func() {
			got := sha256.New()
			if _, err := io.CopyBuffer(struct{ io.Writer }{got}, io.LimitReader(to, int64(n)), make([]byte, 128<<10)); err != nil {
				t.Errorf("Read: %v", err)
			}
			if want := sha256.Sum256(data); !bytes.Equal(got.Sum(nil), want[:]) {
				t.Error("other bytes arrived")
			}
		})
	}
	way(a, b, 1)
	way(b, a, 2)
	done := make(chan struct{})
	go func() { all.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(4 * patience):
		t.Fatalf("a hang: %+v, %+v", a.Stats(), b.Stats())
	}
}

// pinned returns how much memory the kernel counts as pinned for this process, in kB (VmPin).
func pinned(t testing.TB) int {
	t.Helper()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(string(status), "\n") {
		if rest, ok := strings.CutPrefix(line, "VmPin:"); ok {
			n, err := strconv.Atoi(strings.Fields(rest)[0])
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatal("no VmPin in /proc/self/status")
	return 0
}

// expectNothingPinned fails the test unless all registrations have gone, by the counts of the kernel and
// of the cache.
func expectNothingPinned(t testing.TB) {
	t.Helper()
	if err := stillPinned(t); err != nil {
		t.Error(err)
	}
}

func stillPinned(t testing.TB) error {
	if n := pinned(t); n != 0 {
		return fmt.Errorf("%d kB are still pinned", n)
	}
	s := regcache.DefaultBudget().Stats()
	if s.Entries != 0 || s.Bytes != 0 || s.PinnedEntries != 0 || s.PinnedBytes != 0 {
		return fmt.Errorf("still registered: %+v", s)
	}
	return nil
}
