//go:build linux

package overlay

import (
	"net"
	"os"
	"os/exec"
	"testing"
)

// asker is a running client of handed.
type asker struct{ process }

// told is what a server of handed has answered, and what the client has dialed.
type told struct {
	PID int
	counters
}

// moved requests a page on a connection until all connections have moved, this one included, and returns
// the id of the answering process.
func (a asker) moved(t *testing.T, connection string, all int) (pid int) {
	t.Helper()
	var last told
	if !eventually(func() bool {
		last = told{}
		a.tell(t, connection+" /", &last)
		return last.Dialed["shm"] == all && last.Accepted["shm"] > 0
	}) {
		t.Fatalf("connection %s: the client has dialed %v, the server has accepted %v", connection, last.Dialed, last.Accepted)
	}
	return last.PID
}

// ask starts a client, once a server answers.
func ask(t *testing.T, file, address string) (a asker) {
	t.Helper()
	until(t, "http://"+address)
	a.in, a.out = start(t, file, "client", address)
	return a
}

// TestHanded tests listeners made from descriptors that a process has inherited (net.FileListener).
func TestHanded(t *testing.T) {
	handed := own(t, san, "handed")

	// Each connection stays with the process that has accepted it, before and after the upgrade.
	t.Run("tableflip", func(t *testing.T) {
		address := freeAddress(t)
		in, _ := start(t, handed, "tableflip", address)
		t.Cleanup(func() { in.(*os.File).Close() }) // all processes that stem from it wait for that
		client := ask(t, handed, address)
		old := client.moved(t, "a", 1)
		client.tell(t, "c /", new(told)) // too little use for it to move yet
		client.tell(t, "a /upgrade", new(told))
		if newer := client.moved(t, "b", 2); newer == old {
			t.Error("what is dialed after the upgrade goes to the old process")
		}
		if pid := client.moved(t, "c", 3); pid != old {
			t.Errorf("a connection of process %d has moved to process %d", old, pid)
		}
	})

	for _, way := range []string{"prefork", "reuseport"} {
		t.Run(way, func(t *testing.T) {
			address := freeAddress(t)
			start(t, handed, way, address)
			client := ask(t, handed, address)
			for n, connection := range []string{"a", "b", "c", "d"} {
				t.Logf("process %d", client.moved(t, connection, n+1))
			}
		})
	}

	t.Run("systemd", func(t *testing.T) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		f, err := l.(*net.TCPListener).File()
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		cmd := exec.Command("sh", "-c", `LISTEN_PID=$$ LISTEN_FDS=1 exec "$@"`, "sh", handed, "systemd", "")
		cmd.ExtraFiles = []*os.File{f}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		defer func() { cmd.Process.Kill(); cmd.Wait() }()
		ask(t, handed, l.Addr().String()).moved(t, "a", 1)
	})
}
