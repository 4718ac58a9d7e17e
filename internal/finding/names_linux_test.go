package finding

import (
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/reason"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/provider/shm"
	"github.com/sanconn/san/session"
)

// A name that could not be taken in the network namespace of a thread must not be taken later in the
// process's namespace, in which timers run. It is taken in that thread's namespace when the thread next
// uses it.
func TestANameIsTriedAgainInItsNamespace(t *testing.T) {
	testenv.NeedRoot(t)
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	port := uint16(tcp.Addr().(*net.TCPAddr).Port)
	open := func() (*Names, error) {
		return Open(Here(0, port), "", session.Config{}, func(ep session.Endpoint, _ bool, _ session.Config) { drop(ep) })
	}
	used, toTry := make(chan *Names, 1), make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer close(used)
		runtime.LockOSThread() // for good: the thread ends with the goroutine
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			t.Error(err)
			return
		}
		own.listen = usedUp
		n, err := open()
		own.listen = shm.Listen
		if err != nil {
			t.Error(err)
			return
		}
		used <- n
		<-toTry
		again, err := open()
		if err != nil {
			t.Error(err)
			return
		}
		defer again.Close()
		if why, _ := again.Lacks(); why != nil {
			t.Error(why)
		}
	}()
	n := <-used
	if n == nil {
		return
	}
	defer n.Close()
	defer func() { <-done }()
	defer close(toTry)
	timeToTry := func() {
		own.mu.Lock()
		defer own.mu.Unlock()
		n.here.tried = time.Now().Add(-againIn)
	}
	timeToTry()
	here, err := open() // on a thread of the process's namespace, as a timer does
	if err != nil {
		t.Fatal(err)
	}
	defer here.Close()
	if why, all := here.Lacks(); why == nil || !all {
		t.Error("the name has been taken in another namespace")
	}
	timeToTry()
}

// usedUp is shm.Listen in a process without free descriptors.
func usedUp(uint16, shm.Config, func(session.Endpoint)) (*shm.Listener, error) {
	return nil, &session.Unavailable{Reason: session.ReasonResources, Err: unix.EMFILE}
}

// A name that could not be taken, for lack of descriptors or because the directory's file system failed,
// is taken once that is possible, even if nothing uses it again.
func TestANameIsTriedAgain(t *testing.T) {
	for _, why := range []session.Reason{session.ReasonUnreachable, session.ReasonTimeout} {
		synctest.Test(t, func(t *testing.T) {
			tries := 0
			set := nameSet{names: make(map[Place]*name), listen: func(uint16, shm.Config, func(session.Endpoint)) (*shm.Listener, error) {
				tries++
				return nil, &session.Unavailable{Reason: why}
			}}
			x := set.use(Place{Dir: "/run"}, session.Config{}, nil)
			time.Sleep(againIn)
			synctest.Wait()
			set.release(x)
			time.Sleep(againIn)
			if tries != 2 { // a name without users is not tried again
				t.Errorf("%v: %d tries", why, tries)
			}
		})
	}
	port := unusedPort(t)
	own.listen = usedUp
	n, err := Open(Here(0, port), "", session.Config{}, func(ep session.Endpoint, _ bool, _ session.Config) { drop(ep) })
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	if why, all := n.Lacks(); !reason.Is(why, session.ReasonResources) || !all || own.has(Here(0, port)) {
		t.Errorf("%v, all: %v", why, all)
	}
	own.mu.Lock() // the timer reads it after taking the lock
	own.listen = shm.Listen
	own.mu.Unlock()
	testenv.Eventually(t, 20*time.Second, func() error {
		why, _ := n.Lacks()
		return why
	})
	names, err := shm.Names(t.Context(), port, uint32(os.Geteuid()), shm.Config{})
	if err != nil || len(names) != 1 {
		t.Errorf("names %q, %v", names, err)
	}
}

// A name in a directory is tried by one user at a time, and no more often than every againIn, and stays until
// the last one has gone.
func TestANameOfSeveralInADirectory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		goOn := make(chan struct{})
		tries := 0
		set := nameSet{names: make(map[Place]*name), listen: func(uint16, shm.Config, func(session.Endpoint)) (*shm.Listener, error) {
			tries++
			<-goOn
			return nil, &session.Unavailable{Reason: session.ReasonPermission}
		}}
		use := func() *name { return set.use(Place{Dir: "/run"}, session.Config{}, nil) }
		want := func(n int, when string) {
			t.Helper()
			if synctest.Wait(); tries != n {
				t.Errorf("%d tries %s", tries, when)
			}
		}
		go use()
		synctest.Wait()
		x := use()
		want(1, "while the first goes on")
		close(goOn)
		synctest.Wait()
		use()
		want(1, "right behind it")
		time.Sleep(againIn)
		want(1, "by itself, for a user who may not")
		set.release(x)
		if use() != x {
			t.Error("there is another name, though it has users")
		}
		want(2, "by the next user")
	})
}

// If several calls take a port's name at the same time, each of them learns whether it exists.
func TestANameThatSeveralTake(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		goOn := make(chan struct{})
		set := nameSet{names: make(map[Place]*name), listen: func(uint16, shm.Config, func(session.Endpoint)) (*shm.Listener, error) {
			<-goOn
			return nil, &session.Unavailable{Reason: session.ReasonPermission, Err: unix.EPERM}
		}}
		const several = 3
		var uses sync.WaitGroup
		for range several {
			uses.Go(func() {
				x := set.use(Here(0, 1), session.Config{}, nil)
				set.mu.Lock()
				defer set.mu.Unlock()
				if !errors.Is(x.lack, unix.EPERM) {
					t.Errorf("it is known that %v", x.lack)
				}
			})
		}
		synctest.Wait()
		close(goOn)
		uses.Wait()
	})
}

// A directory whose file system hangs delays only the Listen that begins there, but neither connections
// that are accepted meanwhile, nor other ports.
func TestADirectoryThatHangs(t *testing.T) {
	dir := t.TempDir()
	const port, other = 1, 2 // TCP lets only root use them, so no test has them
	at := Place{Dir: dir, Peer: Here(0, port).Peer}
	hangs, goOn, made := make(chan struct{}), make(chan struct{}), make(chan struct{}, 2)
	full := false // the directory is full, and does not hang
	own.listen = func(port uint16, cfg shm.Config, take func(session.Endpoint)) (*shm.Listener, error) {
		if cfg.Dir != "" && full {
			return nil, &session.Unavailable{Reason: session.ReasonResources, Err: unix.ENOSPC}
		}
		if cfg.Dir != "" {
			hangs <- struct{}{}
			<-goOn
			defer func() { made <- struct{}{} }()
		}
		return shm.Listen(port, cfg, take)
	}
	defer func() { own.listen = shm.Listen }()
	open := func(port uint16, dir string) *Names {
		n, err := Open(Here(0, port), dir, session.Config{}, func(ep session.Endpoint, _ bool, _ session.Config) { drop(ep) })
		if err != nil {
			t.Error(err)
		}
		return n
	}
	opened := make(chan *Names, 1)
	go func() { opened <- open(port, dir) }()
	<-hangs
	accepted, plain := open(port, dir), open(other, "")
	if why, _ := plain.Lacks(); why != nil || own.has(at) {
		t.Errorf("%v; there is a name in the directory: %v", why, own.has(at))
	}
	plain.Close()
	goOn <- struct{}{}
	<-made
	n := <-opened
	if why, _ := n.Lacks(); why != nil || !own.has(at) {
		t.Error("there is no name:", why)
	}
	n.Close()
	accepted.Close()

	full = true
	n = open(port, dir)
	if why, all := n.Lacks(); all || !reason.Is(why, session.ReasonResources) {
		t.Error(why, all)
	}
	own.mu.Lock()
	full, n.there.tried = false, time.Time{}
	own.mu.Unlock()
	accepted = open(port, dir) // makes it try again
	<-hangs
	accepted.Close()
	n.Close()
	goOn <- struct{}{} // the name has no user any more
	<-made
	testenv.Eventually(t, 20*time.Second, func() error {
		files, err := os.ReadDir(dir)
		if err == nil && len(files) != 0 {
			err = fmt.Errorf("%v in the directory", files)
		}
		return err
	})
}
