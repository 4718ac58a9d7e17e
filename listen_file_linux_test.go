package san

import (
	"net"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/sanconn/san/provider/shm"
)

func TestListenerFileAndSyscallConn(t *testing.T) {
	useFake(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	file, err := l.File()
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	child, err := net.FileListener(file)
	if err != nil {
		t.Fatal(err)
	}
	defer child.Close()
	// The one that never called Accept takes nothing from the other.
	for _, d := range []*Dialer{{Policy: Never}, {}} {
		p := mustDial(t, d, l.Addr().String())
		wantProvider(t, p, providerTCP)
		send(t, p, mustAccept(t, child), "to the heir")
	}
	if _, err := (&Dialer{Policy: Require}).Dial("tcp", l.Addr().String()); reasonOf(err) != ReasonNoListener {
		t.Errorf("with a SAN required: %v, want %v", err, ReasonNoListener)
	}

	raw, err := l.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := raw.Control(func(fd uintptr) {
		if ok, err := isListening(fd); !ok || err != nil {
			t.Errorf("the socket does not listen: %v", err)
		}
	}); err != nil {
		t.Error(err)
	}
}

// A process hands its port to another and closes its listener. TCP is there all the time, so
// nobody is refused; connections that wait for Accept at that moment may be reset.
func TestNobodyIsRefusedByAListenerThatWasHandedOn(t *testing.T) {
	for range amount(20, 5) {
		l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
		file, err := l.File()
		if err != nil {
			t.Fatal(err)
		}
		heir, err := net.FileListener(file)
		file.Close()
		if err != nil {
			t.Fatal(err)
		}
		var serving, dialing sync.WaitGroup
		for _, from := range []net.Listener{l, heir} {
			serving.Go(func() {
				for {
					c, err := from.Accept()
					if err != nil {
						return
					}
					c.Close()
				}
			})
		}
		var closed atomic.Bool
		var bySAN atomic.Int32
		for range 4 {
			dialing.Go(func() {
				for last := false; !last; {
					last = closed.Load()
					c, err := (&Dialer{}).Dial("tcp", l.Addr().String())
					if err != nil {
						t.Errorf("last %v: %v", last, err)
						return
					}
					if InfoOf(c).Provider == shm.Name {
						bySAN.Add(1)
					}
					c.Close()
				}
			})
		}
		waitFor(t, "connections by shm", func() bool { return bySAN.Load() > 20 || t.Failed() })
		l.Close()
		closed.Store(true)
		dialing.Wait()
		heir.Close()
		serving.Wait()
	}
}
