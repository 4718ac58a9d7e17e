package containers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san"
	"github.com/sanconn/san/internal/testenv"
)

// memoryGroup is a control group with a memory limit.
type memoryGroup string

func newMemoryGroup(t testing.TB, limit int64) memoryGroup {
	t.Helper()
	testenv.NeedRoot(t)
	for _, v := range []struct{ mount, prepare, limit string }{
		{"/sys/fs/cgroup/memory", "", "memory.limit_in_bytes"}, // cgroups version 1
		{"/sys/fs/cgroup", "+memory", "memory.max"},
	} {
		if v.prepare != "" {
			os.WriteFile(v.mount+"/cgroup.subtree_control", []byte(v.prepare), 0) // fails if it is set already
		}
		dir := fmt.Sprintf("%s/san-test-%d", v.mount, os.Getpid())
		if os.Mkdir(dir, 0o755) != nil {
			continue
		}
		t.Cleanup(func() {
			testenv.Eventually(t, patience, func() error { return os.Remove(dir) }) // the kernel may not be done with its processes
		})
		if err := os.WriteFile(filepath.Join(dir, v.limit), fmt.Append(nil, limit), 0); err == nil {
			return memoryGroup(dir)
		}
	}
	testenv.Missing(t, "a control group that limits memory")
	return ""
}

// take puts a process into the group.
func (g memoryGroup) take(t testing.TB, p *process) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(string(g), "cgroup.procs"), fmt.Append(nil, p.Process.Pid), 0); err != nil {
		t.Fatal(err)
	}
}

// kills returns how many processes of the group were killed for lack of memory.
func (g memoryGroup) kills(t testing.TB) (n int) {
	t.Helper()
	for _, name := range []string{"memory.oom_control", "memory.events"} {
		text, _ := os.ReadFile(filepath.Join(string(g), name))
		for line := range strings.Lines(string(text)) {
			if k, err := fmt.Sscanf(line, "oom_kill %d", &n); k == 1 && err == nil {
				return n
			}
		}
	}
	t.Fatal("the kernel does not count")
	return 0
}

// pour serves an address. It writes to each connection without end, once the client has sent something.
func (a *agent) pour(args []string) (string, error) {
	l, err := san.Listen("tcp", args[0])
	if err != nil {
		return "", err
	}
	a.waits = make(chan struct{}, 100)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				b := make([]byte, 256<<10)
				_, err := c.Read(b)
				for waits := false; err == nil; {
					if !waits {
						c.SetWriteDeadline(time.Now().Add(300 * time.Millisecond))
					}
					var n int
					n, err = c.Write(b)
					a.poured.Add(int64(n))
					if waits || !errors.Is(err, os.ErrDeadlineExceeded) {
						continue
					}
					err = nil
					if n == 0 { // there was no room, rather than no time
						waits, err = true, c.SetWriteDeadline(time.Time{})
						a.waits <- struct{}{}
					}
				}
			}()
		}
	}()
	return "ok", nil
}

// full waits until the Writes of pour on so many connections wait for room.
func (a *agent) full(args []string) (string, error) {
	var n int
	if _, err := fmt.Sscan(args[0], &n); err != nil {
		return "", err
	}
	late := time.After(patience)
	for i := range n {
		select {
		case <-a.waits:
		case <-late:
			return "", fmt.Errorf("%d of %d are full", i, n)
		}
	}
	return fmt.Sprint("full ", a.poured.Load()), nil
}

// stall makes so many connections, and never reads from them. It answers how many have moved.
func (a *agent) stall(args []string) (string, error) {
	var n int
	if _, err := fmt.Sscan(args[1], &n); err != nil {
		return "", err
	}
	var d san.Dialer
	d.Options.MoveAtOnce = true
	d.Options.AttemptTimeout = patience / 2
	var all []net.Conn
	for range n {
		c, err := d.Dial("tcp", args[0])
		if err != nil {
			return "", err
		}
		all = append(all, c)
	}
	moved := 0
	for _, c := range all {
		info, err := tried(c)
		if err != nil {
			return "", err
		}
		if info.Provider == "shm" {
			moved++
		}
		c.Write([]byte{1})
	}
	a.stalled = all
	return fmt.Sprint("stalled ", moved), nil
}

// A server in a container of 128 MiB survives clients that do not read, whichever of the two pays for
// the memory, and serves others.
func TestStalledClientsOfASmallContainer(t *testing.T) {
	const limit = moreMemory * 128 << 20
	const hold = 30 // of the connections that stall, at least so many have rings, in a quarter of the limit; others stay on TCP
	for _, n := range []int{60, 150} {
		for _, tt := range []struct {
			end    string          // the end that is in the container
			client func(*exec.Cmd) // starts the client as another user; nil: the server's
		}{{"server", nil}, {"client", nil}, {"server", as(1234)}} {
			name, least := fmt.Sprintf("%d, the %s's", n, tt.end), min(n/3, hold)
			if tt.client != nil {
				name += ", of another user"
				least = hold / 2 // it gets as much as it leaves free
			}
			t.Run(name, func(t *testing.T) {
				group := newMemoryGroup(t, limit)
				here := newPod(t)
				here.script(t, "ip link set lo up")
				server, client, other := here.start(t, nil), here.start(t, tt.client), here.start(t, nil)
				group.take(t, map[string]*process{"server": server, "client": client}[tt.end])
				server.must(t, "pour 127.0.0.1:81", "ok")
				server.must(t, "listen 127.0.0.1:80", "lacks <nil>")
				var moved int
				if got := client.ask(t, fmt.Sprint("stall 127.0.0.1:81 ", n)); !strings.HasPrefix(got, "stalled ") {
					t.Fatal(got)
				} else if fmt.Sscanf(got, "stalled %d", &moved); moved < least {
					t.Errorf("%d of %d have moved", moved, n)
				}
				full := server.ask(t, fmt.Sprint("full ", n))
				if !strings.HasPrefix(full, "full ") {
					t.Error(full)
				}
				other.must(t, "dial 127.0.0.1:80", "")
				other.must(t, "echo "+enough, "ok ")
				client.must(t, "dial 127.0.0.1:80", "")
				client.must(t, "echo "+enough, "ok ")
				if k := group.kills(t); k != 0 {
					t.Errorf("%d processes were killed for lack of memory", k)
				}
				t.Logf("%d have moved; %s bytes were written", moved, full)
				for _, p := range []*process{server, client, other} {
					p.kill()
				}
			})
		}
	}
}

// keepRings opens the halves of segments that a process has mapped of its peers.
func keepRings(t *testing.T, pid int) (kept []*os.File) {
	t.Helper()
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(maps)) {
		if at, _, _ := strings.Cut(line, " "); strings.Contains(line, " r--s ") && strings.Contains(line, "memfd:san-shm") {
			f, err := os.Open(fmt.Sprintf("/proc/%d/map_files/%s", pid, at))
			if err != nil {
				testenv.Missing(t, fmt.Sprintf("what a process has mapped: %v", err))
			}
			kept = append(kept, f)
		}
	}
	return kept
}

// A server in a container survives clients in another container that do not read, end, and have passed
// on the memory that it has written for them. In the end such clients' connections stay on TCP. Once
// nobody keeps that memory, connections move again.
func TestKeptRingsOfASmallContainer(t *testing.T) {
	const limit = moreMemory * 128 << 20
	const conns, rounds = 20, 16
	a, b := twoPods(t)
	dir := sharedDir(t, 0)
	set := func(c *exec.Cmd) { c.Env = append(c.Env, "SAN_SHM_DIR="+dir) }
	server := b.start(t, set)
	newMemoryGroup(t, limit).take(t, server)
	server.must(t, "pour 10.0.0.2:81", "ok")
	server.must(t, "listen 10.0.0.2:80", "lacks <nil>")
	var kept []*os.File
	most, moved := 0, conns
	for i := 0; i < rounds && moved > 0; i++ {
		client := a.start(t, set)
		if got := client.ask(t, fmt.Sprint("stall 10.0.0.2:81 ", conns)); !strings.HasPrefix(got, "stalled ") {
			t.Fatal(got)
		} else {
			fmt.Sscanf(got, "stalled %d", &moved)
		}
		server.must(t, fmt.Sprint("full ", conns), "full ")
		kept = append(kept, keepRings(t, client.Process.Pid)...)
		client.kill()
		most = max(most, moved)
	}
	var n int64
	for _, f := range kept {
		var st unix.Stat_t
		if err := unix.Fstat(int(f.Fd()), &st); err != nil {
			t.Fatal(err)
		}
		n += st.Blocks * 512
	}
	t.Logf("%d bytes are kept", n)
	if most == 0 || moved > 0 || n > limit/4 {
		t.Errorf("up to %d connections have moved, and %d at last; %d bytes are kept", most, moved, n)
	}
	client := a.start(t, set)
	client.must(t, "dial 10.0.0.2:80", "tcp: resources")
	client.must(t, "echo "+enough, "ok tcp")
	for _, f := range kept {
		f.Close()
	}
	testenv.Eventually(t, patience, func() error {
		if got := client.ask(t, "dial 10.0.0.2:80"); got != "shm" {
			return errors.New(got)
		}
		return nil
	})
	client.must(t, "echo "+enough, "ok shm")
	server.kill() // so that it leaves the group
}

// pair connects the process with itself, with a policy, and answers what carries the two ends. With
// Require no byte goes by TCP, otherwise some do.
func (a *agent) pair(args []string) (string, error) {
	policy := map[string]san.Policy{"prefer": san.Prefer, "require": san.Require}[args[0]]
	l, err := (&san.ListenConfig{Policy: policy}).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	d := san.Dialer{Policy: policy}
	for i, connect := range []func() (net.Conn, error){func() (net.Conn, error) { return d.Dial("tcp", l.Addr().String()) }, l.Accept} {
		if a.ends[i], err = connect(); err != nil {
			return "", err
		}
	}
	err = testenv.Await(patience, func() error {
		for i := range a.ends {
			if _, err := a.ends[i].Write([]byte{1}); err != nil {
				return err
			}
			if _, err := a.ends[1-i].Read(make([]byte, 1)); err != nil {
				return err
			}
		}
		if by := a.endsBy(); by != "shm shm" {
			return errors.New(by)
		}
		return nil
	})
	return a.endsBy(), err
}

func (a *agent) endsBy() string {
	return fmt.Sprint(san.InfoOf(a.ends[0]).Provider, " ", san.InfoOf(a.ends[1]).Provider)
}

// trade makes both ends of pair's connection write 512 KiB, and only then read, within a number of
// seconds. It answers what carries them then, and whether each end has finished.
func (a *agent) trade(args []string) (string, error) {
	within, err := time.ParseDuration(args[0] + "s")
	if err != nil {
		return "", err
	}
	var work sync.WaitGroup
	var errs [2]error
	for i, c := range a.ends {
		c.SetDeadline(time.Now().Add(within))
		work.Go(func() {
			const size = 512 << 10
			if _, errs[i] = c.Write(bytes.Repeat([]byte{byte(i)}, size)); errs[i] != nil {
				return
			}
			got := make([]byte, size)
			if _, errs[i] = io.ReadFull(c, got); errs[i] == nil && !bytes.Equal(got, bytes.Repeat([]byte{byte(1 - i)}, size)) {
				errs[i] = errors.New("wrong bytes")
			}
		})
	}
	work.Wait()
	err = errors.Join(errs[:]...)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return a.endsBy() + " late", nil
	}
	if a, b := san.InfoOf(a.ends[0]), san.InfoOf(a.ends[1]); err == nil && a.Provider == "tcp" && a.Fallback != san.ReasonResources && b.Fallback != san.ReasonResources {
		err = fmt.Errorf("back for lack of memory, the reasons are %v and %v", a.Fallback, b.Fallback)
	}
	return a.endsBy() + " done", err
}

// Clients that do not read have used up a process's memory for streams. Two ends that have moved before,
// and both write before they read, get as far as over TCP, because they go back to TCP. With Require no
// byte goes by TCP.
func TestBothWriteBesideStalledClients(t *testing.T) {
	for _, tt := range []struct {
		policy, seconds, want string
	}{
		{"prefer", "30", "tcp tcp done"},
		{"require", "4", "shm shm late"},
	} {
		t.Run(tt.policy, func(t *testing.T) {
			const times = min(moreMemory, 4) // the larger the limit, the more memory the test has to fill
			group := newMemoryGroup(t, times*128<<20)
			here := newPod(t)
			here.script(t, "ip link set lo up")
			server, client := here.start(t, nil), here.start(t, nil)
			group.take(t, server)
			server.must(t, "pour 127.0.0.1:81", "ok")
			server.must(t, "pair "+tt.policy, "shm shm")
			const stalled = times * 80
			client.must(t, fmt.Sprint("stall 127.0.0.1:81 ", stalled), "stalled ")
			server.must(t, fmt.Sprint("full ", stalled), "full ")
			server.must(t, "trade "+tt.seconds, tt.want)
			server.kill() // so that it leaves the group
		})
	}
}

// lock locks all of the process's memory, present and future, as programs do that must not wait for a
// disk.
func (a *agent) lock([]string) (string, error) {
	return "ok", unix.Mlockall(unix.MCL_CURRENT | unix.MCL_FUTURE)
}

// mapped answers how many KiB of shared memory are mapped, how many have memory, and the mappings'
// flags.
func (a *agent) mapped([]string) (string, error) {
	text, err := os.ReadFile("/proc/self/smaps")
	var size, rss int
	flags := map[string]int{}
	ours := false
	for line := range strings.Lines(string(text)) {
		var n int
		switch key, value, _ := strings.Cut(line, ":"); {
		case strings.Contains(line, "-") && strings.Contains(key, " "): // a line with addresses, permissions and so on
			if ours = strings.Contains(line, "memfd:san-shm"); ours {
				flags["all"]++
			}
		case !ours:
		case key == "VmFlags":
			for _, f := range strings.Fields(value) {
				flags[f]++
			}
		default:
			fmt.Sscan(value, &n)
			switch key {
			case "Size":
				size += n
			case "Rss":
				rss += n
			}
		}
	}
	return fmt.Sprintf("%d %d %d locked %d not dumped %d not huge %d", size, rss, flags["all"], flags["lo"], flags["dd"], flags["nh"]), err
}

// Mapped memory that was not used takes no memory, whatever the program has locked. It gets no huge
// pages, whatever the host prefers, and a core dump, which would read all of it, leaves it out.
func TestOnlyWhatIsUsedHasMemory(t *testing.T) {
	here := newPod(t)
	here.script(t, "ip link set lo up")
	server, client := here.start(t, nil), here.start(t, nil)
	for _, p := range []*process{server, client} {
		p.must(t, "lock", "ok")
	}
	server.must(t, "listen 127.0.0.1:80", "lacks <nil>")
	client.must(t, "dial 127.0.0.1:80", "shm")
	client.must(t, "echo 10000", "ok shm")
	for name, p := range map[string]*process{"server": server, "client": client} {
		var size, rss, all, locked, spared, small int
		answer := p.ask(t, "mapped")
		if _, err := fmt.Sscanf(answer, "%d %d %d locked %d not dumped %d not huge %d", &size, &rss, &all, &locked, &spared, &small); err != nil {
			t.Fatal(answer, err)
		}
		if size < 32<<10 || rss > 1<<10 || locked != 0 || spared != all || small != all {
			t.Errorf("the %s: KiB mapped, KiB with memory, mappings: %s", name, answer)
		}
	}
}
