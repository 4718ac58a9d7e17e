package san

import (
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
)

var memoryConns = flag.Int("memory.conns", 500, "of how many connections TestWhatConnectionsHold measures the memory")

const (
	// Bounds of memory in bytes, at each end: unmovedMost is how much more than one of net's a
	// connection that has not moved may take, and restingMost one that has moved and is idle.
	unmovedMost = 1 << 10
	restingMost = 24 << 10

	// lockedMost is how many bytes a connection that has just moved may take at both ends together, in a
	// process that has locked its memory.
	lockedMost = 128 << 10
)

func init() { roles["hold"] = roleHold }

// roleHold dials connections, prints how much memory they take, and keeps them.
func roleHold(l lane) error {
	var n int
	fmt.Sscan(os.Getenv(envName), &n)
	conns := make([]net.Conn, n)
	before := usage()
	for i := range conns {
		c, err := l.dialRole()
		if err != nil {
			return err
		}
		if _, err := c.Write([]byte{1}); err != nil {
			return err
		}
		if _, err := c.Read(make([]byte, 1)); err != nil {
			return err
		}
		conns[i] = c
	}
	fmt.Println(usage().since(before, n))
	defer runtime.KeepAlive(conns)
	select {} // until the test ends this process
}

// used is what a process uses.
type used struct {
	memory      int // bytes of Go's memory, and of shared memory that it has touched
	descriptors int
}

func usage() used {
	runtime.GC()
	runtime.GC() // frees what the first collection has only finalized
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	status, _ := os.ReadFile("/proc/self/status")
	_, shared, _ := strings.Cut(string(status), "RssShmem:")
	var kB int
	fmt.Sscan(shared, &kB)
	fds, _ := os.ReadDir("/proc/self/fd")
	return used{int(m.HeapAlloc+m.StackInuse) + kB<<10, len(fds)}
}

// since returns what each of n connections has taken since before.
func (u used) since(before used, n int) string {
	return fmt.Sprintf("%d bytes, %d descriptors", (u.memory-before.memory)/n, (u.descriptors-before.descriptors)/n)
}

// A connection that has not moved takes hardly more memory than one of net's, and one that has moved and
// is idle takes a few pages. Neither takes another descriptor. Stacks of goroutines count as memory.
// (These connections are used so little that their rings do not grow; tests of provider/shm show that
// rings shrink again.)
func TestWhatConnectionsHold(t *testing.T) {
	if inGuest != "" {
		return // the same, but slower
	}
	ofNet := make(map[string]int)
	for _, tt := range []struct {
		lane  lane
		most  int // bytes more than net's
		least int // connections: some 100 KiB that other tests have left are freed at the same time
	}{{plainTCP, 0, 2000}, {tcpInConn, unmovedMost, 2000}, {shmLanes[0], restingMost, 1}} {
		l := tt.lane
		t.Run(l.name, func(t *testing.T) {
			n := max(*memoryConns, tt.least)
			ln := l.listen(t, l.here())
			conns := make([]net.Conn, n)
			idle(t)
			before := usage()
			p := startProcess(t, "hold", l, ln.Addr().String(), func(c *exec.Cmd) {
				c.Env = append(c.Env, fmt.Sprintf("%s=%d", envName, n))
			})
			b := make([]byte, 1)
			for i := range conns {
				c := mustAccept(t, ln)
				if _, err := c.Read(b); err != nil {
					t.Fatal(err)
				}
				if _, err := c.Write(b); err != nil {
					t.Fatal(err)
				}
				l.carries(t, c)
				conns[i] = c
			}
			theirs := p.line(t)
			for end, holds := range map[string]string{"dialer": theirs, "acceptor": usage().since(before, n)} {
				t.Logf("%s: %s a connection", end, holds)
				var memory, descriptors int
				if _, err := fmt.Sscanf(holds, "%d bytes, %d descriptors", &memory, &descriptors); err != nil {
					t.Fatal(err)
				}
				if l.name == plainTCP.name {
					ofNet[end] = memory
				}
				if more := memory - ofNet[end]; more > tt.most {
					t.Errorf("%s: %d bytes more than net's, at most %d", end, more, tt.most)
				}
				if descriptors != 1 {
					t.Errorf("%s: %d descriptors", end, descriptors)
				}
			}
			runtime.KeepAlive(conns)
		})
	}
}

// In a process that locks all its memory, present and future, connections take only the memory that they
// have used, not all that is mapped for them.
func TestConnectionsOfAProcessThatLocksItsMemory(t *testing.T) {
	if inGuest != "" {
		return // the same, but slower
	}
	inside, done := inProcess(t, "", func(*exec.Cmd) { testenv.NeedRoot(t) })
	if !inside {
		return
	}
	defer done()
	if err := unix.Mlockall(unix.MCL_CURRENT | unix.MCL_FUTURE); err != nil {
		t.Fatal(err)
	}
	l := shmLanes[0]
	ln := l.listen(t, l.here())
	for _, n := range []int{4, 40} {
		before := usage()
		for range n {
			c := mustDial(t, l.dialer(), ln.Addr().String())
			send(t, c, mustAccept(t, ln), "a use")
			l.carries(t, c)
		}
		if each := (usage().memory - before.memory) / n; each > lockedMost {
			t.Errorf("each of %d connections takes %d bytes, at most %d", n, each, lockedMost)
		} else {
			t.Logf("each of %d connections takes %d bytes", n, each)
		}
	}
}
