package interop

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cloudflare/tableflip"

	"github.com/sanconn/san"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/provider/shm"
	"github.com/sanconn/san/sanconn"
)

// flipVar makes this binary a server that tableflip upgrades. Its value is the address to serve.
const flipVar = "INTEROP_FLIP"

// serveUpgradable serves until a newer process is ready, or standard input ends.
func serveUpgradable() error {
	upgrader, err := tableflip.New(tableflip.Options{})
	if err != nil {
		return err
	}
	defer upgrader.Stop()
	inherited, err := upgrader.Listen("tcp", os.Getenv(flipVar))
	if err != nil {
		return err
	}
	l, err := new(san.ListenConfig).Adopt(inherited.(*net.TCPListener))
	if err != nil {
		return err
	}
	if !upgrader.HasParent() {
		fmt.Println(l.Addr())
	}
	stop := serveEach(l, func(c net.Conn) error {
		line, err := bufio.NewReader(c).ReadString('\n')
		if err != nil {
			return err
		}
		if line == "upgrade\n" {
			if err := upgrader.Upgrade(); err != nil {
				_, err = fmt.Fprintln(c, err)
				return err
			}
		}
		_, err = fmt.Fprintln(c, os.Getpid(), san.InfoOf(c).Provider)
		return err
	})
	if err := upgrader.Ready(); err != nil {
		return err
	}
	go func() {
		io.Copy(io.Discard, os.Stdin)
		upgrader.Stop()
	}()
	<-upgrader.Exit()
	return stop()
}

// tableflip upgrades a server over shared memory while it is used. Each connection must be made and
// answered, by the old process or the new one, and moved to shared memory at both ends.
func TestTableflip(t *testing.T) {
	address := startUpgradable(t)
	var pids sync.Map // of the processes that have answered
	var processes atomic.Int64
	var done atomic.Bool
	var asking sync.WaitGroup
	t.Cleanup(func() {
		done.Store(true)
		asking.Wait()
	})
	for range 4 {
		asking.Go(func() {
			for !done.Load() {
				pid, err := ask(address, "pid")
				if err != nil {
					t.Error(err)
					return
				}
				if _, known := pids.LoadOrStore(pid, true); !known {
					processes.Add(1)
				}
			}
		})
	}
	for n := range int64(4) { // new connections go to the new process once the old one accepts no more
		testenv.Eventually(t, patience, func() error {
			if got := processes.Load(); got <= n && !t.Failed() {
				return fmt.Errorf("%d processes have answered", got)
			}
			return nil
		})
		testenv.Eventually(t, patience, func() error { // not before the old process has ended
			_, err := ask(address, "upgrade")
			return err
		})
	}
}

// ask sends a request, which is answered with the process's id.
func ask(address, what string) (pid int, err error) {
	d := &san.Dialer{Policy: san.Require, Options: sanconn.Options{AttemptTimeout: patience}}
	c, err := d.Dial("tcp", address)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(patience))
	if _, err := fmt.Fprintln(c, what); err != nil {
		return 0, err
	}
	answer, err := io.ReadAll(c)
	if err != nil {
		return 0, err
	}
	var provider string
	if _, err := fmt.Sscan(string(answer), &pid, &provider); err != nil {
		return 0, fmt.Errorf("the server answers %q", answer)
	}
	if own := san.InfoOf(c); own.Provider != shm.Name || provider != shm.Name {
		return 0, fmt.Errorf("by %+v, and at the server by %s", own, provider)
	}
	return pid, nil
}

// startUpgradable starts the first process. At the end of the test it ends the last one, and waits for
// all.
func startUpgradable(t *testing.T) (address string) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), flipVar+"=127.0.0.1:0")
	cmd.Stderr = os.Stderr
	in, toServer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdin = in // a file, which newer processes inherit
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	in.Close()
	t.Cleanup(func() {
		toServer.Close()
		if rest, err := io.ReadAll(out); err != nil || len(rest) != 0 { // it ends when no process has it open any more
			t.Errorf("the servers print %q, %v", rest, err)
		}
		if err := cmd.Wait(); err != nil {
			t.Errorf("the first process: %v", err)
		}
	})
	lines := bufio.NewReader(out)
	address, err = lines.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(address)
}
