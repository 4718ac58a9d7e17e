package san

import (
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/provider/shm"
)

const (
	// dumpedMost is how much more memory a connection that has moved may take in a core dump than
	// one by TCP, in bytes: of Go's, which the race detector makes several times as much.
	dumpedMost = 256 << 10

	// dumpsDiffer is by how many bytes the dumps of two processes differ that do the same.
	dumpsDiffer = 4 << 20

	// grownMost is how much memory a dump may give the segments for a connection.
	grownMost = 4 << 10
)

// A core dump leaves out the memory that connections share: it takes hardly more than where they
// are on TCP, and what nobody has touched gets no memory by it.
func TestCoreDumpWithoutSegments(t *testing.T) {
	if inGuest != "" {
		return // the same, and slower
	}
	testenv.NeedRoot(t) // to look into what is mapped
	pattern, err := os.ReadFile("/proc/sys/kernel/core_pattern")
	if err != nil {
		t.Fatal(err)
	}
	if name := strings.TrimSpace(string(pattern)); strings.ContainsAny(name, "|/") {
		testenv.Missing(t, fmt.Sprintf("core dumps in a process's own directory (core_pattern is %q)", name))
	}
	for _, n := range []int{4, 40} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			onTCP := dumpWith(t, n, &Dialer{Policy: Never}, providerTCP)
			onShm := dumpWith(t, n, &Dialer{Policy: Require}, shm.Name)
			t.Logf("%+v on TCP, %+v on shm", onTCP, onShm)
			most := int64(n*dumpedMost + dumpsDiffer)
			if more := onShm.memory - onTCP.memory; more > most {
				t.Errorf("it takes %d bytes more, at most %d", more, most)
			}
			if onShm.shared != 0 {
				t.Errorf("it has %d bytes of segments", onShm.shared)
			}
			if onShm.grown > int64(n*grownMost) {
				t.Errorf("it has given the segments %d bytes", onShm.grown)
			}
		})
	}
}

// dump is what a core dump takes, has of segments, and has had them get, in bytes.
type dump struct{ memory, shared, grown int64 }

// dumpWith has a process dump core that has accepted so many connections.
func dumpWith(t *testing.T, n int, d *Dialer, provider string) (of dump) {
	t.Helper()
	tcp := plainListen(t, "127.0.0.1:0")
	dir := t.TempDir()
	p := startServer(t, tcp, 7, func(c *exec.Cmd) {
		c.Path, c.Dir = "/proc/self/exe", dir
		c.Stderr = nil // where it writes its goroutines
		c.Env = append(c.Env, "GOTRACEBACK=crash")
	})
	limit := unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}
	if err := unix.Prlimit(p.Process.Pid, unix.RLIMIT_CORE, &limit, nil); err != nil {
		t.Fatal(err)
	}
	// As by default: what is shared is dumped, unless it is left out on purpose.
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/coredump_filter", p.Process.Pid), []byte("0x33"), 0); err != nil {
		t.Fatal(err)
	}
	for range n {
		c := mustDial(t, d, tcp.Addr().String())
		if name, err := ask(c); name != 7 || err != nil {
			t.Fatal(name, err)
		}
		wantProvider(t, c, provider)
	}
	segments := segmentsOf(t, p)
	if (len(segments) > 0) != (provider == shm.Name) {
		t.Fatalf("by %s there are %d halves of segments", provider, len(segments))
	}
	of.grown = -memoryOf(t, segments...)
	if err := p.Process.Signal(syscall.SIGABRT); err != nil {
		t.Fatal(err)
	}
	var exit *exec.ExitError
	if err := p.ended(t); !errors.As(err, &exit) || !exit.Sys().(syscall.WaitStatus).CoreDump() {
		t.Fatalf("it has dumped no core: %v", err)
	}
	of.grown += memoryOf(t, segments...)
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || len(files) != 1 {
		t.Fatalf("%q, %v", files, err)
	}
	core, err := os.Open(files[0])
	if err != nil {
		t.Fatal(err)
	}
	defer core.Close()
	of.memory = memoryOf(t, core)
	parts, err := elf.NewFile(core)
	if err != nil {
		t.Fatal(err)
	}
	for _, half := range segments {
		var from, to uint64
		if _, err := fmt.Sscanf(filepath.Base(half.Name()), "%x-%x", &from, &to); err != nil {
			t.Fatal(half.Name(), err)
		}
		for _, p := range parts.Progs {
			if p.Type == elf.PT_LOAD && from <= p.Vaddr && p.Vaddr < to {
				of.shared += int64(p.Filesz)
			}
		}
	}
	return of
}

// segmentsOf opens the halves of segments that a process has mapped, its own and its peers', so
// that they outlive it.
func segmentsOf(t *testing.T, p *process) (halves []*os.File) {
	t.Helper()
	dir := fmt.Sprintf("/proc/%d/map_files", p.Process.Pid)
	mapped, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range mapped {
		path := filepath.Join(dir, m.Name())
		if name, _ := os.Readlink(path); !strings.Contains(name, "memfd:san-shm") {
			continue
		}
		half, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { half.Close() })
		halves = append(halves, half)
	}
	return halves
}

// memoryOf is what files take, of memory or of a disk.
func memoryOf(t *testing.T, files ...*os.File) (bytes int64) {
	t.Helper()
	for _, f := range files {
		info, err := f.Stat()
		if err != nil {
			t.Fatal(err)
		}
		bytes += info.Sys().(*syscall.Stat_t).Blocks * 512
	}
	return bytes
}
