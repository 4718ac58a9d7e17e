package shm

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/reason"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
)

// files returns the names of the files in a directory.
func files(t testing.TB, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// meetIn makes a connection to a listener with a name in a directory, and sends a message to it.
func meetIn(t testing.TB, dir string, l *served) {
	t.Helper()
	x, err := dial(place{port: l.at.port, name: l.at.name}, Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	defer end(x)
	y, err := l.accept()
	if err != nil {
		t.Fatal(err)
	}
	defer end(y)
	a, b := newPeer(x), newPeer(y)
	var ev session.Event
	if !a.send([]byte("through a file")) || !b.poll(&ev) || string(ev.Msg) != "through a file" {
		t.Fatalf("%q came, %v", ev.Msg, b.Err())
	}
	b.Drop()
}

// Names in a directory are independent of those in the network namespace. Their mode lets the
// directory's group connect, and they are removed when the listener closes.
func TestNamesInADirectory(t *testing.T) {
	leaks(t)
	dir := t.TempDir()
	here := listen(t, Config{})
	first := listenAt(t, here.at.port, Config{Dir: dir})
	second := listenAt(t, here.at.port, Config{Dir: dir})
	if names := here.at.names(t, dir); !slices.Contains(names, first.name) || !slices.Contains(names, second.name) {
		t.Errorf("%q are listed", names)
	}
	for _, l := range []*served{first, second} {
		meetIn(t, dir, l)
		st, err := os.Stat(filepath.Join(dir, l.name))
		if err != nil || st.Mode() != os.ModeSocket|socketMode {
			t.Errorf("mode %v, %v", st.Mode(), err)
		}
	}
	end2(meet(t, here))
	if got := files(t, dir); len(got) != 2 {
		t.Errorf("there are %q", got)
	}
	first.Close()
	_, err := dial(first.at, Config{Dir: dir})
	wantReason(t, err, session.ReasonNoListener)
	second.Close()
	if got := files(t, dir); len(got) != 0 {
		t.Errorf("left behind: %q", got)
	}
}

// If a name cannot be made, whichever step fails, nothing is left in the directory: the attempt is
// repeated, and would leave something each time.
func TestNothingIsLeftOfANameThatFails(t *testing.T) {
	leaks(t)
	port := freePort(t)
	for name, call := range map[string]uint32{"openat": unix.SYS_OPENAT, "mkdirat": unix.SYS_MKDIRAT, "listen": unix.SYS_LISTEN, "fchmodat": unix.SYS_FCHMODAT, "renameat": unix.SYS_RENAMEAT} {
		dir, failed := t.TempDir(), make(chan error)
		go func() {
			runtime.LockOSThread() // never unlocked: the filter ends with the thread
			if err := failAtThread(call, unix.ENOSPC); err != nil {
				failed <- err
				return
			}
			l, err := Listen(port, Config{Dir: dir}, end)
			if err == nil {
				l.Close()
			}
			failed <- err
		}()
		err := <-failed
		if !errors.Is(err, unix.ENOSPC) {
			t.Errorf("%s: %v", name, err)
		}
		wantReason(t, err, session.ReasonResources) // so that it is tried again soon
		if got := files(t, dir); len(got) != 0 {
			t.Errorf("%s: left behind: %q", name, got)
		}
	}
}

// failAtThread makes a system call fail from now on, in the calling thread.
func failAtThread(call uint32, errno syscall.Errno) error {
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS}, // load the number of the system call
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: call, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(errno)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	return unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&program)), 0, 0)
}

// An error of the file system, in any call, is reported as such, and not as a directory that does not
// meet the conditions.
func TestDirectoryOfAFileSystemThatFails(t *testing.T) {
	leaks(t)
	for errno, want := range map[syscall.Errno]session.Reason{
		unix.EIO: session.ReasonUnreachable, unix.ESTALE: session.ReasonUnreachable, unix.ETIMEDOUT: session.ReasonTimeout,
	} {
		for name, call := range map[string]uint32{"openat": unix.SYS_OPENAT, "fstat": unix.SYS_FSTAT, "getdents": unix.SYS_GETDENTS64} {
			dir, port, failed := t.TempDir(), freePort(t), make(chan []error)
			go func() {
				runtime.LockOSThread() // never unlocked: the filter ends with the thread
				if err := failAtThread(call, errno); err != nil {
					failed <- []error{err}
					return
				}
				_, names := Names(t.Context(), port, uint32(os.Geteuid()), Config{Dir: dir})
				errs := []error{names}
				if call != unix.SYS_GETDENTS64 { // Listen works without it
					_, err := Listen(port, Config{Dir: dir}, end)
					errs = append(errs, err)
				}
				failed <- errs
			}()
			for _, err := range <-failed {
				if !errors.Is(err, ErrDirectory) || !errors.Is(err, errno) || reason.Of(err).Reason != want {
					t.Errorf("%s: %v: %v, not for the reason %v", name, errno, err, want)
				}
			}
		}
	}
}

func end2(a, b session.Endpoint) { end(a); end(b) }

// The conditions on the directory are checked whenever it is used.
func TestDirectoryIsChecked(t *testing.T) {
	leaks(t)
	dir := t.TempDir()
	port := freePort(t)
	fails := func(dir, because string) {
		t.Helper()
		_, err := Listen(port, Config{Dir: dir}, end)
		wantReason(t, err, session.ReasonPermission)
		_, dialed := dial(place{port: port}, Config{Dir: dir})
		wantReason(t, dialed, session.ReasonPermission)
		for _, err := range []error{err, dialed} {
			if !errors.Is(err, ErrDirectory) || !strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), because) {
				t.Errorf("the error is %q, which does not say that it %s", err, because)
			}
		}
	}
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	fails(file, "not a directory")
	fails(filepath.Join(dir, "nothing"), "no such file")
	fails("tmp", "no absolute path")
	for _, mode := range []os.FileMode{0o777, 0o777 | os.ModeSticky, 0o702} {
		if err := os.Chmod(dir, mode); err != nil {
			t.Fatal(err)
		}
		fails(dir, "writable by everybody")
	}
	if err := os.Chmod(dir, 0o770); err != nil {
		t.Fatal(err)
	}
	l := listenAt(t, port, Config{Dir: dir})
	meetIn(t, dir, l)
	l.Close()
	if os.Geteuid() != 0 {
		return
	}
	if err := os.Chown(dir, 4711, 0); err != nil {
		t.Fatal(err)
	}
	fails(dir, "is user 4711's")
}

// The name of a killed process stays until the next listener on the port takes a name. The name of a
// process that lives stays.
func TestNameOfAKilledProcess(t *testing.T) {
	leaks(t)
	dir, port := t.TempDir(), freePort(t)
	c := spawn(t, "echo", nil, "DIR="+dir, fmt.Sprint("PORT=", port))
	at := placeOf(t, c)
	live := listenAt(t, port, Config{Dir: dir})
	wantFiles := func(want ...string) {
		t.Helper()
		if got := files(t, dir); !slices.Equal(got, slices.Sorted(slices.Values(want))) {
			t.Errorf("there are %q, want %q", got, want)
		}
	}
	wantFiles(at.name, live.name)
	c.kill()
	wantFiles(at.name, live.name)
	_, err := dial(at, Config{Dir: dir})
	wantReason(t, err, session.ReasonNoListener)
	l := listenAt(t, port, Config{Dir: dir})
	wantFiles(live.name, l.name)
	meetIn(t, dir, live)
	meetIn(t, dir, l)
}

// Names of killed processes for other ports, on which nobody may ever listen again, are removed as well.
func TestNamesOfKilledProcessesOfOtherPorts(t *testing.T) {
	leaks(t)
	dir, port := t.TempDir(), freePort(t)
	live := listenAt(t, freePort(t), Config{Dir: dir})
	const many = 3 * MostNames
	for i := range many {
		l, err := net.Listen("unixpacket", filepath.Join(dir, fmt.Sprintf("%s%016x", prefixOf(dir, uint16(i)), i)))
		if err != nil {
			t.Fatal(err)
		}
		l.(*net.UnixListener).SetUnlinkOnClose(false)
		l.Close()
	}
	for i := range 20 * many / MostNames {
		l, err := Listen(port, Config{Dir: dir}, end)
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
		if left := len(files(t, dir)) - 1; i == 0 && left < many-MostNames {
			t.Errorf("one process has looked at %d names at least", many-left)
		}
	}
	if got := files(t, dir); !slices.Equal(got, []string{live.name}) {
		t.Errorf("of %d there are %q", many, got)
	}
	meetIn(t, dir, live)
}

// If a process is killed while it makes a name, the next listener on the port removes the unfinished
// file, unless a process may still be making it. If the file is a symbolic link, its target is not
// touched.
func TestUnfinishedNames(t *testing.T) {
	leaks(t)
	dir, elsewhere, port := t.TempDir(), t.TempDir(), freePort(t)
	put := func(in, name string, age time.Duration) {
		t.Helper()
		own := filepath.Join(in, name)
		if err := os.Mkdir(own, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(own, inside), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		then := time.Now().Add(-age)
		if err := os.Chtimes(own, then, then); err != nil {
			t.Fatal(err)
		}
	}
	prefix := "." + prefixOf(dir, port)
	put(dir, prefix+"old", 2*unfinishedFor)
	put(dir, prefix+"new", unfinishedFor/2)
	put(dir, "old", 2*unfinishedFor)
	put(elsewhere, "victim", 2*unfinishedFor)
	if err := os.Symlink(filepath.Join(elsewhere, "victim"), filepath.Join(dir, prefix+"link")); err != nil {
		t.Fatal(err)
	}
	l := listenAt(t, port, Config{Dir: dir})
	if got, want := files(t, dir), []string{prefix + "link", prefix + "new", "old", l.name}; !slices.Equal(got, want) {
		t.Errorf("there are %q, want %q", got, want)
	}
	for _, own := range []string{filepath.Join(dir, prefix+"new"), filepath.Join(elsewhere, "victim")} {
		if got := files(t, own); !slices.Equal(got, []string{inside}) {
			t.Errorf("%s has %q", own, got)
		}
	}
}

// Many listeners begin and end at the same time: none removes another's name, and each is found by its
// own.
func TestNamesOfMany(t *testing.T) {
	leaks(t)
	dir, port := t.TempDir(), freePort(t)
	const many, turns = 16, 20
	var work sync.WaitGroup
	for range many {
		work.Go(func() {
			for range turns {
				l, err := Listen(port, Config{Dir: dir}, end)
				if err != nil {
					t.Error(err)
					return
				}
				at := place{port: port, name: l.name}
				if c, err := at.connect(dir); err != nil || !slices.Contains(at.names(t, dir), l.name) {
					t.Errorf("%s is not found: %v", l.name, err)
				} else {
					c.Close()
				}
				l.Close()
			}
		})
	}
	work.Wait()
	if got := files(t, dir); len(got) != 0 {
		t.Errorf("left behind: %q", got)
	}
}

// Files that others have put into the directory under such names do no harm: a dialer gets a reason, a
// listener removes what it can, and the targets of links are not touched.
func TestOthersFilesInTheDirectory(t *testing.T) {
	leaks(t)
	dir, port := t.TempDir(), freePort(t)
	elsewhere := t.TempDir()
	victim, socket := filepath.Join(elsewhere, "victim"), filepath.Join(elsewhere, "socket")
	if err := os.WriteFile(victim, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	other, err := net.Listen("unixpacket", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	prefix := prefixOf(dir, port)
	put := map[string]func(name string) error{
		"directory":                          func(name string) error { return os.Mkdir(name, 0o700) },
		"pipe":                               func(name string) error { return unix.Mkfifo(name, 0o600) },
		"link":                               func(name string) error { return os.Symlink(victim, name) },
		"live":                               func(name string) error { return os.Symlink(socket, name) },
		strings.Repeat("x", 250-len(prefix)): func(name string) error { return os.WriteFile(name, nil, 0o600) },
	}
	for name, put := range put {
		if err := put(filepath.Join(dir, prefix+name)); err != nil {
			t.Fatal(err)
		}
		if name == "live" {
			continue
		}
		at := place{port: port, name: prefix + name}
		if ep, err := dial(at, Config{Dir: dir}); err == nil {
			end(ep)
			t.Errorf("%s was dialed", name)
		}
	}
	l := listenAt(t, port, Config{Dir: dir})
	meetIn(t, dir, l)
	for _, left := range files(t, dir) {
		switch name := strings.TrimPrefix(left, prefix); {
		case name == "pipe", name == "link":
			t.Errorf("%s is still there", name)
		}
	}
	for _, at := range []string{victim, socket} {
		if st, err := os.Lstat(at); err != nil || st.Mode().Perm()&0o022 != 0 {
			t.Errorf("what links led to: %v, %v", st, err)
		}
	}
}

// A file that has a port's prefix, but not the digits of a Listener's name, is no name, in the directory
// and outside.
func TestNamesHaveTheirDigits(t *testing.T) {
	leaks(t)
	port, me := freePort(t), uint32(os.Geteuid())
	for _, dir := range []string{"", t.TempDir()} {
		prefix, good := prefixOf(dir, port), "0123456789abcdef"
		for _, digits := range []string{good, "", good[1:], good + "0", good[1:] + "\n", good[1:] + "F"} {
			if dir == "" {
				u, err := listenUnix(prefix + digits)
				if err != nil {
					t.Fatal(err)
				}
				defer u.Close()
			} else if err := os.WriteFile(filepath.Join(dir, prefix+digits), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		names, err := Names(t.Context(), port, me, Config{Dir: dir})
		if want := []string{prefix + good}; err != nil || !slices.Equal(names, want) {
			t.Errorf("names in %q: %q, %v, want %q", dir, names, err, want)
		}
	}
}

// In a directory without write permission a listener gets no name, and the reason tells that. A process
// can still dial there, as from a read-only mount.
func TestDirectoryWithoutWritePermission(t *testing.T) {
	testenv.NeedRoot(t)
	leaks(t)
	dir := t.TempDir()
	l := listen(t, Config{Dir: dir})
	target := t.TempDir()
	if err := unix.Mount(dir, target, "", unix.MS_BIND, ""); err != nil {
		testenv.Missing(t, fmt.Sprintf("a mount: %v", err))
	}
	defer unix.Unmount(target, 0)
	if err := unix.Mount("", target, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	_, err := Listen(l.at.port, Config{Dir: target}, end)
	wantReason(t, err, session.ReasonPermission)
	if !errors.Is(err, unix.EROFS) {
		t.Errorf("the error is %v", err)
	}
	meetIn(t, target, l)
}

// If the directory's file system is full, the reason is "resources".
func TestDirectoryThatIsFull(t *testing.T) {
	testenv.NeedRoot(t)
	dir := t.TempDir()
	const inodes = "mode=700,nr_inodes=2" // one inode for the directory, and one more
	if err := unix.Mount("none", dir, "tmpfs", 0, inodes); err != nil {
		testenv.Missing(t, "a file system of its own: "+err.Error())
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	_, err := Listen(freePort(t), Config{Dir: dir}, end)
	wantReason(t, err, session.ReasonResources)
	if got := files(t, dir); len(got) != 0 {
		t.Errorf("left behind: %q", got)
	}
}
