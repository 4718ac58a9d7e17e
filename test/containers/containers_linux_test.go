package containers

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// enough is more bytes than all buffers hold, in one direction.
const enough = "30000000"

// sharedDir is a directory for a group, as the recipes of docs/CONTAINERS.md make it.
func sharedDir(t testing.TB, group int) string {
	t.Helper()
	// Not t.TempDir, which other users may not enter.
	dir, err := os.MkdirTemp("/tmp", "san-containers")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chown(dir, 0, group); err != nil {
		t.Fatal(err)
	}
	if err := unix.Chmod(dir, 0o2770); err != nil { // os.Chmod has another bit for set-group-ID
		t.Fatal(err)
	}
	return dir
}

// Processes of two pods move to shared memory through a directory that both have, over IPv4 and IPv6,
// and no byte is wrong. Nothing is left in the directory once the listener and its connections are
// closed.
func TestConnectionsBetweenPodsMove(t *testing.T) {
	a, b := twoPods(t)
	dir := sharedDir(t, 0)
	server, client := b.start(t, nil), a.start(t, nil)
	server.must(t, "listen [::]:80 "+dir, "lacks <nil>")
	for _, at := range []string{"10.0.0.2:80", "[fd00::2]:80", "10.0.0.2:80"} {
		client.must(t, "dial "+at+" "+dir, "shm")
		client.must(t, "echo "+enough, "ok shm")
	}
	client.kill()
	for range 3 {
		server.must(t, "ended", "shm <nil>")
	}
	server.must(t, "close", "ok")
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// Without a directory, or with one at only one end, connections stay on TCP, and the dialer gets the
// reason. The variable has the same effect as the field.
func TestDirectoryIsWhatTheOperatorGives(t *testing.T) {
	a, b := twoPods(t)
	dir := sharedDir(t, 0)
	set := func(c *exec.Cmd) { c.Env = append(c.Env, "SAN_SHM_DIR="+dir) }
	for _, tt := range []struct {
		server, client func(*exec.Cmd)
		want           string
	}{
		{nil, nil, "tcp: not served: shm: tcpid: the other end is not in this network namespace"},
		{set, nil, "tcp: not served"},
		{nil, set, "tcp: not served: shm: tcpid: the other end is not in this network namespace, and no process in " + dir},
		{set, set, "shm"},
	} {
		server, client := b.start(t, tt.server), a.start(t, tt.client)
		server.must(t, "listen 10.0.0.2:80", "lacks <nil>")
		client.must(t, "dial 10.0.0.2:80", tt.want)
		client.must(t, "echo 100000", "ok "+tt.want[:3])
		server.kill()
	}
}

// When a process dies, its connections end at once at their other ends, as with TCP. The next process
// removes the name that a killed process has left.
func TestProcessOfAPodIsKilled(t *testing.T) {
	a, b := twoPods(t)
	dir := sharedDir(t, 0)
	for range 3 {
		server, client := b.start(t, nil), a.start(t, nil)
		server.must(t, "listen :80 "+dir, "lacks <nil>")
		client.must(t, "dial 10.0.0.2:80 "+dir, "shm")
		client.must(t, "echo 1000", "ok shm")
		server.kill()
		client.must(t, "read", "EOF") // nothing was unsent or unread, so the end is in order
		if left, err := filepath.Glob(dir + "/*-80-*"); err != nil || len(left) != 1 {
			t.Errorf("there are %q, %v", left, err)
		}

		server = b.start(t, nil)
		server.must(t, "listen :80 "+dir, "lacks <nil>")
		client.must(t, "dial 10.0.0.2:80 "+dir, "shm")
		client.must(t, "echo 1000", "ok shm")
		client.kill()
		server.must(t, "ended", "shm <nil>")

		client = a.start(t, nil)
		client.must(t, "dial 10.0.0.2:80 "+dir, "shm")
		client.must(t, "echo 1000", "ok shm")
		client.tell(t, fmt.Sprint("echo ", int64(1)<<50))
		server.kill()
		if got := client.answer(t); !strings.HasPrefix(got, "error:") {
			t.Errorf("in the middle of a stream: %s", got)
		}
	}
}

// Several processes accept on one port. Each connection moves to the process that has accepted it.
func TestSeveralProcessesOfAPort(t *testing.T) {
	a, b := twoPods(t)
	dir := sharedDir(t, 0)
	first, second, client := b.start(t, nil), b.start(t, nil), a.start(t, nil)
	first.must(t, "listen 10.0.0.2:80 "+dir, "lacks <nil>")
	second.must(t, "listen 10.0.0.3:80 "+dir, "lacks <nil>")
	for range 3 {
		for _, at := range []string{"10.0.0.3:80", "10.0.0.2:80"} {
			client.must(t, "dial "+at+" "+dir, "shm")
			client.must(t, "echo 1000", "ok shm")
		}
	}
	first.kill()
	client.must(t, "dial 10.0.0.3:80 "+dir, "shm")
}

// A directory to which everybody may write is not used, and both ends report that.
func TestDirectoryOfEverybody(t *testing.T) {
	a, b := twoPods(t)
	dir := sharedDir(t, 0)
	if err := unix.Chmod(dir, 0o1777); err != nil {
		t.Fatal(err)
	}
	server, client := b.start(t, nil), a.start(t, nil)
	if got := server.ask(t, "listen :80 "+dir); !strings.Contains(got, "permission") || !strings.Contains(got, "writable by everybody (mode 1777)") {
		t.Errorf("the listener %s", got)
	}
	if got := client.ask(t, "dial 10.0.0.2:80 "+dir); !strings.HasPrefix(got, "tcp: permission") || !strings.Contains(got, "writable by everybody (mode 1777)") {
		t.Errorf("the dialer: %s", got)
	}
	client.must(t, "echo 100000", "ok tcp")
	// Within its own pod, the listener still serves.
	near := b.start(t, nil)
	near.must(t, "dial 10.0.0.2:80", "shm")
}

// Connections between different users move if both are in the directory's group, and only then.
func TestGroupOfTheDirectory(t *testing.T) {
	a, b := twoPods(t)
	const group, user = 4321, 1234
	dir := sharedDir(t, group)
	server := b.start(t, as(user, group))
	server.must(t, "listen :8080 "+dir, "lacks <nil>")
	for _, change := range []func(*exec.Cmd){as(user, group), as(user+1, group), nil} {
		client := a.start(t, change)
		client.must(t, "dial 10.0.0.2:8080 "+dir, "shm")
		client.must(t, "echo "+enough, "ok shm")
	}
	stranger := a.start(t, as(user))
	stranger.must(t, "dial 10.0.0.2:8080 "+dir, "tcp: permission")
	if got := b.start(t, as(user)).ask(t, "listen :8081 "+dir); !strings.Contains(got, "permission denied") {
		t.Errorf("a listener of no such group %s", got)
	}
}

// A process in a user namespace of its own, in which the peer's user is unknown.
func TestUserNamespace(t *testing.T) {
	a, b := twoPods(t)
	const group, user = 4321, 1234
	dir := sharedDir(t, group)
	inside := func(c *exec.Cmd) {
		c.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags:                 syscall.CLONE_NEWUSER,
			UidMappings:                []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1}},
			GidMappings:                []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1}, {ContainerID: group, HostID: group, Size: 1}},
			GidMappingsEnableSetgroups: true,
			Credential:                 &syscall.Credential{Groups: []uint32{group}},
		}
	}
	outside := as(user, group)
	for i, change := range [][2]func(*exec.Cmd){{inside, outside}, {outside, inside}} {
		server, client := b.start(t, change[0]), a.start(t, change[1])
		port := strconv.Itoa(8080 + i)
		server.must(t, "listen :"+port+" "+dir, "lacks <nil>")
		client.must(t, "dial 10.0.0.2:"+port+" "+dir, "shm")
		client.must(t, "echo "+enough, "ok shm")
		server.kill()
		client.must(t, "read", "EOF")
	}
}

// A process in a PID namespace of its own, in which the peer's process has no id.
func TestPIDNamespace(t *testing.T) {
	a, b := twoPods(t)
	dir := sharedDir(t, 0)
	apart := func(c *exec.Cmd) { c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID} }
	server, client := b.start(t, apart), a.start(t, apart)
	server.must(t, "listen :80 "+dir, "lacks <nil>")
	client.must(t, "dial 10.0.0.2:80 "+dir, "shm")
	client.must(t, "echo 1000", "ok shm")
	server.kill()
	client.must(t, "read", "EOF")
}

// squat takes a name of a port, and calls serve for each process that connects to it.
func squat(t testing.TB, dir string, port int, number, network string, serve func(net.Conn)) {
	t.Helper()
	name := filepath.Join(dir, fmt.Sprintf("san-shm-9-%d-%s", port, number))
	l, err := net.Listen(network, name)
	if err != nil {
		t.Fatal(err)
	}
	var work sync.WaitGroup
	work.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			work.Go(func() {
				defer c.Close()
				serve(c)
			})
		}
	})
	t.Cleanup(func() { l.Close(); work.Wait() })
}

// Other processes have names of the port, and answer with garbage, with another protocol, or not at all.
// Each costs the dialer an attempt, and no connection.
func TestSquattersInTheDirectory(t *testing.T) {
	a, b := twoPods(t)
	dir := sharedDir(t, 0)
	squat(t, dir, 80, "0000000000000000", "unixpacket", func(c net.Conn) { c.Write([]byte("nonsense")) })
	squat(t, dir, 80, "0000000000000001", "unix", func(c net.Conn) {})
	squat(t, dir, 80, "0000000000000002", "unixpacket", func(c net.Conn) { c.Write(make([]byte, 1<<16)) })
	squat(t, dir, 80, "0000000000000003", "unixpacket", func(c net.Conn) { // answers nothing
		c.SetReadDeadline(time.Now().Add(patience))
		for b := make([]byte, 64); ; {
			if _, err := c.Read(b); err != nil {
				return
			}
		}
	})
	server, client := b.start(t, nil), a.start(t, nil)
	server.must(t, "listen :80 "+dir, "lacks <nil>")
	if names, err := filepath.Glob(filepath.Join(dir, "san-shm-9-80-*")); err != nil || len(names) != 5 {
		t.Errorf("the names are %q, %v", names, err)
	}
	for range 3 {
		client.must(t, "dial 10.0.0.2:80 "+dir, "shm")
		client.must(t, "echo 1000", "ok shm")
	}
}

// Without TCP timestamps at either end there is no proof, and so no move.
func TestNoTimestamps(t *testing.T) {
	a, b := twoPods(t)
	dir := sharedDir(t, 0)
	server, client := b.start(t, nil), a.start(t, nil)
	server.must(t, "listen :80 "+dir, "lacks <nil>")
	for i, p := range []*pod{a, b} {
		for _, value := range []string{"0", "2"} {
			p.script(t, "sysctl -qw net.ipv4.tcp_timestamps="+value)
			got := client.ask(t, "dial 10.0.0.2:80 "+dir)
			if i == 1 && value == "2" { // 2 is without a random offset, which matters only at the dialer
				if got != "shm" {
					t.Errorf("the acceptor has tcp_timestamps=2: %s", got)
				}
				continue
			}
			if !strings.HasPrefix(got, "tcp: not served") || !strings.Contains(got, "timestamp") {
				t.Errorf("pod %d has tcp_timestamps=%s: %s", i, value, got)
			}
			client.must(t, "echo 100000", "ok tcp")
		}
		p.script(t, "sysctl -qw net.ipv4.tcp_timestamps=1")
		client.must(t, "dial 10.0.0.2:80 "+dir, "shm")
	}
}

// If an address is translated on the way, it differs at the two ends, and the connection stays on TCP.
func TestTranslatedAddress(t *testing.T) {
	a, b := twoPods(t)
	dir := sharedDir(t, 0)
	server, client := b.start(t, nil), a.start(t, nil)
	server.must(t, "listen 10.0.0.2:8080 "+dir, "lacks <nil>")
	b.script(t, `
		nft add table ip nat
		nft add chain ip nat pre '{ type nat hook prerouting priority -100; }'
		nft add rule ip nat pre ip daddr 10.0.0.3 tcp dport 80 dnat to 10.0.0.2:8080`)
	client.must(t, "dial 10.0.0.3:80 "+dir, "tcp: not served")
	client.must(t, "echo 100000", "ok tcp")
}

// A process has threads in two network namespaces, and accepts on the same port in both. Each connection
// finds the process.
func TestOneProcessInTwoNamespaces(t *testing.T) {
	a, b := twoPods(t)
	var listeners [2]agent
	var clients [2]*process
	for i, p := range []*pod{a, b} {
		var err error
		p.do(func() { _, err = listeners[i].listen([]string{"127.0.0.1:80"}) })
		if err != nil {
			t.Fatal(err)
		}
		defer listeners[i].listener.Close()
		clients[i] = p.start(t, nil)
	}
	for range 3 {
		for _, c := range clients {
			c.must(t, "dial 127.0.0.1:80", "shm")
			c.must(t, "echo 100000", "ok shm")
		}
	}
}
