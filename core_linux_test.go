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
	// dumpedMost is how much more memory, in bytes, a connection that has moved may take in a core dump
	// than one on TCP. It is memory of Go, of which the race detector takes several times as much.
	dumpedMost = 256 << 10

	// dumpsDiffer is by how many bytes the dumps of two processes that do the same may differ.
	dumpsDiffer = 4 << 20

	// grownMost is how much memory the segments may get for each connection because of a dump.
	grownMost = 4 << 10
)

// A core dump leaves out the memory that connections share. It is hardly larger than with connections on
// TCP, and pages of segments that nobody has touched get no memory because of it.
func TestCoreDumpWithoutSegments(t *testing.T) {
	if inGuest != "" {
		return // the same, but slower
	}
	testenv.NeedRoot(t) // to open the mapped files
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

// dump is the size of a core dump, how much of it are segments, and how much the segments have grown
// because of it, in bytes.
type dump struct{ memory, shared, grown int64 }

// dumpWith makes a process that has accepted n connections dump core.
func dumpWith(t *testing.T, n int, d *Dialer, provider string) (of dump) {
	t.Helper()
	tcp := plainListen(t, "127.0.0.1:0")
	dir := t.TempDir()
	p := startServer(t, tcp, 7, func(c *exec.Cmd) {
		c.Path, c.Dir = "/proc/self/exe", dir
		c.Stderr = nil // there it would write its goroutines' stacks
		c.Env = append(c.Env, "GOTRACEBACK=crash")
	})
	limit := unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}
	if err := unix.Prlimit(p.Process.Pid, unix.RLIMIT_CORE, &limit, nil); err != nil {
		t.Fatal(err)
	}
	// The kernel's default: shared memory is dumped unless it is excluded on purpose.
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

// segmentsOf opens the halves of segments that a process has mapped, its own and its peers', so that
// they outlive the process.
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

// memoryOf returns how much memory, or space on a disk, files take.
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
