package san

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/provider/shm"
)

func init() { roles["adopt"] = roleAdopt }

// envName is what a process of the role answers.
const envName = "SAN_TEST_NAME"

// roleAdopt serves the listener that it gets as descriptor 3, as from systemd, until SIGTERM.
func roleAdopt(l lane) error {
	inherited, err := net.FileListener(os.NewFile(3, "listener"))
	if err != nil {
		return err
	}
	lc := ListenConfig{Options: l.options}
	ln, err := lc.Adopt(inherited.(*net.TCPListener))
	if err != nil {
		return err
	}
	terminate := make(chan os.Signal, 1)
	signal.Notify(terminate, syscall.SIGTERM)
	go func() {
		<-terminate
		ln.Close()
	}()
	go reportTurn(ln, l.provider)
	var name byte
	fmt.Sscan(os.Getenv(envName), &name)
	answer(ln, name)
	return nil
}

// reportTurn prints whether the listener has to wait, and when it has not.
func reportTurn(ln *Listener, provider string) {
	const period = 5 * time.Millisecond
	why := ln.Unavailable()[provider]
	if why != nil && errors.Is(why, syscall.EADDRINUSE) {
		fmt.Println("waits")
		for range time.Tick(period) {
			if why = ln.Unavailable()[provider]; why == nil || !errors.Is(why, syscall.EADDRINUSE) {
				break
			}
		}
	}
	if why != nil {
		fmt.Println("error:", why)
	} else {
		fmt.Println("serves")
	}
}

// startHeir starts a process that adopts a listener, and checks what it has at first.
func startHeir(t *testing.T, tcp *net.TCPListener, l lane, name byte, state string) *process {
	t.Helper()
	file, err := tcp.File()
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	t.Setenv(envName, fmt.Sprint(name))
	p := startRoleWith(t, []*os.File{file}, "adopt", l, "")
	if got := p.line(t); got != state {
		t.Fatalf("process %d %s, want: %s", name, got, state)
	}
	return p
}

// Processes take over a listener from each other while it is dialed. Nobody is refused, and
// no connection is lost. By shared memory not even one goes by TCP; over RDMA they may until
// the new process has noticed that the port is free.
func TestProcessTakesOver(t *testing.T) {
	l := systemLanes[0]
	tcp := plainListen(t, l.here())
	d := &Dialer{Options: l.options}
	d.Options.AttemptTimeout = testTimeout
	if l.provider == shm.Name {
		d.Policy = Require
	}
	old := startHeir(t, tcp, l, 0, "serves")
	load := startLoad(t, d, tcp.Addr().String())
	for name := range byte(amount(4, 2)) {
		load.wantMore(t, l.provider, name)
		next := startHeir(t, tcp, l, name+1, "waits")
		load.wantMore(t, l.provider, name)
		if err := old.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		load.wantMore(t, l.provider, name+1)
		if err := old.Wait(); err != nil {
			t.Errorf("process %d: %v", name, err)
		}
		if got := next.line(t); got != "serves" {
			t.Errorf("process %d %s at last", name+1, got)
		}
		old = next
	}
	load.end()
	for by, n := range load.answered {
		t.Logf("%d answered %d by %s", by.name, n, by.provider)
	}
}

// A process that is killed leaves its place to the one behind as well. Connections that it
// had not answered end with it; the next are answered, by a SAN.
func TestKilledProcessIsTakenOverFrom(t *testing.T) {
	l := systemLanes[0]
	tcp := plainListen(t, l.here())
	d := &Dialer{Options: l.options, Policy: Require}
	d.Options.AttemptTimeout = testTimeout
	old := startHeir(t, tcp, l, 0, "serves")
	for name := range byte(amount(4, 2)) {
		next := startHeir(t, tcp, l, name+1, "waits")
		if by, err := exchange(d, tcp.Addr().String()); err != nil || by.name != name {
			t.Errorf("before: %+v, %v", by, err)
		}
		old.Process.Kill()
		old.Wait()
		switch by, err := exchange(d, tcp.Addr().String()); {
		case l.provider == shm.Name && (err != nil || by.name != name+1):
			t.Errorf("afterwards: %+v, %v", by, err)
		case l.provider != shm.Name:
			waitFor(t, "the next process by RDMA", func() bool {
				by, err = exchange(d, tcp.Addr().String())
				return err == nil && by.name == name+1
			})
		}
		if got := next.line(t); got != "serves" {
			t.Errorf("process %d %s at last", name+1, got)
		}
		old = next
	}
}
