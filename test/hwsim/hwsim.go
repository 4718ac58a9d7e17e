// Package hwsim builds the simulated RDMA device (src, README.md), and runs tests on it in processes of
// their own, which load it in place of rdma-core's libraries. Only tests and benchmarks import it.
package hwsim

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/sanconn/san/internal/rdmalink"
	"github.com/sanconn/san/internal/testenv"
)

//go:embed src
var sources embed.FS

// Device is the name of the simulated device. Lane is the name of the tests' lane (testenv.Device) in
// processes that have it.
const (
	Device = "hwsim0"
	Lane   = "hwsim"
)

// variable configures the libraries: PATH?KEY=VALUE,… (README.md).
const variable = "HWSIM"

// names are the names of the libraries' one file, under which the dynamic loader finds it. perftest's
// programs are also linked with the last two (src/vendors.c).
var names = []string{"libibverbs.so.1", "librdmacm.so.1", "libefa.so.1", "libmlx5.so.1"}

var flags = []string{"-O2", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter",
	"-Wno-missing-field-initializers", "-Wno-sign-compare", "-shared", "-fPIC"}

var built struct {
	once    sync.Once
	dir     string
	err     error
	missing bool
}

// Libraries returns the directory of the libraries, for LD_LIBRARY_PATH. They are built if their sources
// have changed, and kept in the user's cache. Without a C compiler or rdma-core's headers,
// testenv.Missing is called.
func Libraries(t testing.TB) string {
	t.Helper()
	built.once.Do(func() { built.dir, built.missing, built.err = build() })
	if built.missing {
		testenv.Missing(t, fmt.Sprintf("a C compiler, libibverbs-dev and librdmacm-dev: %v", built.err))
	}
	if built.err != nil {
		t.Fatal(built.err)
	}
	return built.dir
}

func build() (dir string, missing bool, err error) {
	cc := os.Getenv("CC")
	if cc == "" {
		cc = "cc"
	}
	entries, err := sources.ReadDir("src")
	if err != nil {
		return "", false, err
	}
	sum := sha256.New()
	fmt.Fprintln(sum, cc, flags)
	for _, e := range entries {
		b, _ := sources.ReadFile("src/" + e.Name())
		fmt.Fprintln(sum, e.Name(), len(b))
		sum.Write(b)
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		cache = os.TempDir()
	}
	dir = filepath.Join(cache, "san-hwsim", hex.EncodeToString(sum.Sum(nil)[:8]))
	if _, err := os.Stat(dir); err == nil {
		return dir, false, nil
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return "", false, err
	}
	missing, err = compile(cc, dir, entries)
	return dir, missing, err
}

// compile makes all names of the library in one step, because other processes may do so at the same
// time. If two names led to different files, a process would have the library twice.
func compile(cc, dir string, entries []os.DirEntry) (missing bool, err error) {
	work, err := os.MkdirTemp(filepath.Dir(dir), "build")
	if err != nil {
		return false, err
	}
	defer os.RemoveAll(work)
	made := filepath.Join(work, "libraries")
	if err := os.Mkdir(made, 0o700); err != nil {
		return false, err
	}
	library := filepath.Join(work, "library.so")
	args := append([]string{"-o", library}, flags...)
	for _, e := range entries {
		b, _ := sources.ReadFile("src/" + e.Name())
		name := filepath.Join(work, e.Name())
		if err := os.WriteFile(name, b, 0o600); err != nil {
			return false, err
		}
		if strings.HasSuffix(name, ".c") {
			args = append(args, name)
		}
	}
	args = append(args, "-Wl,--version-script="+filepath.Join(work, "hwsim.map"), "-lpthread")
	cmd := exec.Command(cc, args...)
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	out, err := cmd.CombinedOutput()
	if err != nil {
		missing = errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist) || bytes.Contains(out, []byte(".h: No such file"))
		return missing, fmt.Errorf("%s: %w\n%s", cc, err, out)
	}
	for _, name := range names {
		if err := os.Link(library, filepath.Join(made, name)); err != nil {
			return false, err
		}
	}
	if err := os.Rename(made, dir); err != nil && !errors.Is(err, fs.ErrExist) {
		return false, err
	}
	return false, nil
}

// Fabric is a simulated network, which several processes share.
type Fabric struct {
	libraries, file, settings string
}

// Profiles returns the device families that the setting "profile" knows.
func Profiles() (names []string) {
	source, _ := sources.ReadFile("src/profile.c")
	for _, found := range profileName.FindAllSubmatch(source, -1) {
		names = append(names, string(found[1]))
	}
	return names
}

var profileName = regexp.MustCompile(`\.name = "([^"]+)"`)

// Settings returns the settings of the fabric that this process is on, or "" if it is on none.
func Settings() string {
	_, settings, _ := strings.Cut(os.Getenv(variable), "?")
	return settings
}

// In makes a fabric in a directory, for programs that are not tests. The settings are KEY=VALUE,….
func In(dir, settings string) (Fabric, error) {
	libraries, missing, err := build()
	if missing {
		err = fmt.Errorf("the simulated device needs a C compiler and rdma-core's headers (Debian and Ubuntu: apt install gcc libc6-dev libibverbs-dev librdmacm-dev; Fedora: dnf install gcc rdma-core-devel): %w", err)
	}
	return Fabric{libraries, filepath.Join(dir, "fabric"), settings}, err
}

// New makes a fabric that exists until the test ends. The settings are KEY=VALUE,….
func New(t testing.TB, settings string) Fabric {
	t.Helper()
	return Fabric{Libraries(t), filepath.Join(t.TempDir(), "fabric"), settings}
}

// Env returns the environment for a process on the fabric that runs the lane's tests.
func (f Fabric) Env() []string {
	return append(f.Programs(), "SAN_TEST_RDMA="+Lane)
}

// Programs returns the environment for other programs on the fabric.
func (f Fabric) Programs() []string {
	return append(os.Environ(), "LD_LIBRARY_PATH="+f.libraries, variable+"="+f.file+"?"+f.settings)
}

// Use makes package san find the device, if this process is on a fabric. The device then serves the
// loopback addresses, and is the only one. A program has to call Use before it uses package san.
func Use() {
	if os.Getenv(variable) != "" {
		rdmalink.Simulated = map[string]string{"lo": Device}
	}
}

// Work counts what the devices of a fabric have executed so far, in all processes.
type Work struct {
	Sends, Inline, Writes, Reads, Binds int64 // work requests; of those, how many were inline
	Invalidates                         int64 // likewise; those by the peer's message are not counted
}

// Work returns what was executed.
func (f Fabric) Work() (w Work, err error) {
	for word, to := range map[int]*int64{sends: &w.Sends, inline: &w.Inline, writes: &w.Writes, reads: &w.Reads,
		binds: &w.Binds, invalidates: &w.Invalidates} {
		if *to, err = f.sum(word); err != nil {
			return w, err
		}
	}
	return w, nil
}

// The counters of a process, as src/shared.h has them.
const (
	procs       = 8
	words       = 32
	objects     = 10
	complaints  = 16
	attached    = 17
	sends       = 18
	writes      = 19
	reads       = 20
	binds       = 21
	invalidates = 22
	inline      = 27
	relaxed     = 28
	resets      = procs * words * 8 // their offset
)

var kinds = [objects]string{"contexts", "protection domains", Regions, "memory windows", "completion channels",
	"completion queues", "queue pairs", "shared receive queues", "event channels", "ids"}

// Regions and Relaxed are two of the kinds of objects that Objects counts.
const Regions, Relaxed = "memory regions", "memory regions with relaxed ordering"

func (f Fabric) sum(word int) (n int64, err error) {
	file, err := os.Open(f.file)
	if err != nil {
		return 0, err
	}
	defer file.Close()
	b := make([]byte, procs*words*8)
	if _, err := file.ReadAt(b, 0); err != nil {
		return 0, err
	}
	for p := range procs {
		n += int64(binary.NativeEndian.Uint64(b[(p*words+word)*8:]))
	}
	return n, nil
}

// Used fails the test if no process has used the fabric.
func (f Fabric) Used(t testing.TB) {
	t.Helper()
	if n, err := f.sum(attached); err != nil || n == 0 {
		t.Errorf("no process used the simulated device (%v)", err)
	}
}

// Check fails the test if no process has used the fabric, or if a process broke a rule that devices need
// not enforce.
func (f Fabric) Check(t testing.TB) {
	t.Helper()
	f.Used(t)
	if n, _ := f.sum(complaints); n != 0 {
		t.Errorf("the simulated device has %d complaints", n)
	}
}

// Reset resets the devices of the fabric that this process is on, in all processes: their connections
// end, and new ones can be made.
func Reset(t testing.TB) {
	t.Helper()
	path, _, _ := strings.Cut(os.Getenv(variable), "?")
	file, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	var word [4]byte
	if _, err := file.ReadAt(word[:], resets); err != nil {
		t.Fatal(err)
	}
	binary.NativeEndian.PutUint32(word[:], binary.NativeEndian.Uint32(word[:])+1)
	if _, err := file.WriteAt(word[:], resets); err != nil {
		t.Fatal(err)
	}
}

// here returns the fabric that this process is on.
func here() Fabric {
	path, settings, _ := strings.Cut(os.Getenv(variable), "?")
	return Fabric{file: path, settings: settings}
}

// WorkHere returns Work of the fabric that this process is on.
func WorkHere(t testing.TB) Work {
	t.Helper()
	w, err := here().Work()
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// Objects returns how many objects of each kind exist on the fabric that this process is on, without
// contexts, because librdmacm keeps its own. Memory regions with relaxed ordering are also counted
// separately.
func Objects(t testing.TB) map[string]int {
	t.Helper()
	counts := make(map[string]int)
	words := map[string]int{Relaxed: relaxed}
	for i, kind := range kinds[1:] {
		words[kind] = i + 1
	}
	for kind, word := range words {
		n, err := here().sum(word)
		if err != nil {
			t.Fatal(err)
		}
		counts[kind] = int(n)
	}
	return counts
}
