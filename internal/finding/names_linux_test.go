package finding

import (
	"net"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/provider/shm"
	"github.com/sanconn/san/session"
)

// A name that was used up in the network namespace of a thread is not taken in the process's, by
// whose threads timers run, but in that one, when its thread uses it next.
func TestANameIsTriedAgainInItsNamespace(t *testing.T) {
	testenv.NeedRoot(t)
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	port := uint16(tcp.Addr().(*net.TCPAddr).Port)
	open := func() (*Names, error) {
		return Open(port, "", session.Config{}, func(ep Taken, _ session.Config) { drop(ep.Endpoint) })
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
		var others []*shm.Listener
		for range shm.Numbers {
			other, err := shm.Listen(port, shm.Config{}, drop)
			if err != nil {
				t.Error(err)
				return
			}
			others = append(others, other)
		}
		n, err := open()
		for _, other := range others {
			other.Close()
		}
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
	here, err := open() // as a timer does, on a thread of the process's
	if err != nil {
		t.Fatal(err)
	}
	defer here.Close()
	if why, all := here.Lacks(); why == nil || !all {
		t.Error("the name has been taken in another namespace")
	}
	timeToTry()
}
