package shm

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
)

// files are the names of what is in a directory.
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

// meetIn makes a connection to a listener with a name in a directory, and takes a message there.
func meetIn(t testing.TB, dir string, l *served) {
	t.Helper()
	x, err := dial(place{port: l.at.port, number: l.at.number}, Config{Dir: dir})
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

// Names in a directory have nothing to do with those in the network namespace; they have the
// mode that lets the directory's group connect; and nothing is left of them.
func TestNamesInADirectory(t *testing.T) {
	leaks(t)
	dir := t.TempDir()
	here := listen(t, Config{})
	first := listenAt(t, here.at.port, Config{Dir: dir})
	second := listenAt(t, here.at.port, Config{Dir: dir})
	if first.number != 0 || second.number != 1 {
		t.Errorf("numbers %d and %d", first.number, second.number)
	}
	for _, l := range []*served{first, second} {
		meetIn(t, dir, l)
		st, err := os.Stat(filepath.Join(dir, fileOf(l.at.port, l.at.number)))
		if err != nil || st.Mode() != os.ModeSocket|socketMode {
			t.Errorf("mode %v, %v", st.Mode(), err)
		}
	}
	end2(meet(t, here))
	if got := files(t, dir); len(got) != 4 {
		t.Errorf("there are %q", got)
	}
	first.Close()
	_, err := dial(place{port: here.at.port}, Config{Dir: dir})
	wantReason(t, err, session.ReasonNoListener)
	if third := listenAt(t, here.at.port, Config{Dir: dir}); third.number != 0 {
		t.Errorf("number %d, though 0 is free", third.number)
	} else {
		meetIn(t, dir, third)
		third.Close()
	}
	second.Close()
	if got := files(t, dir); len(got) != 0 {
		t.Errorf("left behind: %q", got)
	}
}

func end2(a, b session.Endpoint) { end(a); end(b) }

// What the directory has to be is checked whenever it is used.
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

// The names of a process that was killed stay, and are those of the next; the name of one that
// lives is nobody else's, whatever it does.
func TestNameOfAKilledProcess(t *testing.T) {
	leaks(t)
	dir, port := t.TempDir(), freePort(t)
	c := spawn(t, "echo", nil, "DIR="+dir, fmt.Sprint("PORT=", port))
	c.line(t, "listening")
	if l := listenAt(t, port, Config{Dir: dir}); l.number != 1 {
		t.Errorf("number %d of a process beside one that lives", l.number)
	} else {
		l.Close()
	}
	c.kill()
	if got := files(t, dir); len(got) != 2 {
		t.Errorf("a killed process has left %q", got)
	}
	_, err := dial(place{port: port}, Config{Dir: dir})
	wantReason(t, err, session.ReasonNoListener)
	l := listenAt(t, port, Config{Dir: dir})
	if l.number != 0 {
		t.Errorf("number %d, though 0 was a killed process's", l.number)
	}
	meetIn(t, dir, l)
}

// Many that come and go at once never have the same name, and each is found by its own.
func TestNamesOfMany(t *testing.T) {
	leaks(t)
	dir, port := t.TempDir(), freePort(t)
	const many, turns = 16, 20
	var mu sync.Mutex
	var has [Numbers]bool
	var work sync.WaitGroup
	for range many {
		work.Go(func() {
			for range turns {
				l, err := Listen(port, Config{Dir: dir}, end)
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				if has[l.number] {
					t.Errorf("two have number %d", l.number)
				}
				has[l.number] = true
				mu.Unlock()
				if c, err := connectFile(dir, port, l.number); err != nil {
					t.Errorf("number %d is not found: %v", l.number, err)
				} else {
					c.Close()
				}
				mu.Lock()
				has[l.number] = false
				mu.Unlock()
				l.Close()
			}
		})
	}
	work.Wait()
	if got := files(t, dir); len(got) != 0 {
		t.Errorf("left behind: %q", got)
	}
}

// What others have put into the directory costs its name, and nothing else: a listener takes the
// next, and a dialer is told.
func TestOthersFilesInTheDirectory(t *testing.T) {
	leaks(t)
	dir, port := t.TempDir(), freePort(t)
	victim := filepath.Join(t.TempDir(), "victim")
	if err := os.WriteFile(victim, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	squat := []struct {
		make    func(name string) error
		stays   bool // it costs the listener the number
		connect session.Reason
	}{
		{func(name string) error { return os.Mkdir(name, 0o700) }, true, session.ReasonNoListener},
		{func(name string) error { return unix.Mkfifo(name, 0o600) }, false, session.ReasonNoListener},
		{func(name string) error { return os.Symlink(victim, name) }, false, session.ReasonNoListener},
		{func(name string) error { return unix.Mkfifo(name+".lock", 0o600) }, false, session.ReasonNoListener},
		{func(name string) error { return os.Symlink(victim, name+".lock") }, true, session.ReasonNoListener},
		{func(name string) error { return os.Mkdir(name+".lock", 0o700) }, true, session.ReasonNoListener},
	}
	for n, s := range squat {
		if err := s.make(filepath.Join(dir, fileOf(port, n))); err != nil {
			t.Fatal(err)
		}
		_, err := dial(place{port: port, number: n}, Config{Dir: dir})
		if wantReason(t, err, s.connect); t.Failed() {
			t.Fatalf("squatter %d: %v", n, err)
		}
	}
	for n, s := range squat {
		if s.stays {
			continue
		}
		if l := listenAt(t, port, Config{Dir: dir}); l.number != n {
			t.Errorf("number %d, want %d", l.number, n)
		} else {
			meetIn(t, dir, l)
		}
	}
	l := listenAt(t, port, Config{Dir: dir})
	if l.number != len(squat) {
		t.Errorf("number %d, want %d", l.number, len(squat))
	}
	meetIn(t, dir, l)
	if st, err := os.Lstat(victim); err != nil || st.Mode() != 0o600 {
		t.Errorf("the file that links led to has mode %v, %v", st.Mode(), err)
	}
}

// A directory into which this process may not write gives it no name, and the reason; there it
// can dial all the same, as from a mount that is read-only.
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
	if n := testing.AllocsPerRun(10, func() { Listen(l.at.port, Config{Dir: target}, end) }); n > Numbers {
		t.Errorf("%v allocations: it has tried all numbers, as it would for each connection accepted", n)
	}
	meetIn(t, target, l)
}

// A directory without room for a file is one without resources.
func TestDirectoryThatIsFull(t *testing.T) {
	testenv.NeedRoot(t)
	dir := t.TempDir()
	const inodes = "mode=700,nr_inodes=2" // of the directory, and one more
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

// All numbers of a port may be taken.
func TestNumbersInADirectoryAreBounded(t *testing.T) {
	leaks(t)
	dir, port := t.TempDir(), freePort(t)
	for number := range Numbers {
		l, err := Listen(port, Config{Dir: dir}, end)
		if err != nil || l.number != number {
			t.Fatalf("the listener before which there were %d: %v", number, err)
		}
		defer l.Close()
	}
	_, err := Listen(port, Config{Dir: dir}, end)
	wantReason(t, err, session.ReasonResources)
	if names := files(t, dir); slices.ContainsFunc(names, func(n string) bool { return strings.Count(n, ".") > 1 }) {
		t.Errorf("left behind: %q", names)
	}
}
