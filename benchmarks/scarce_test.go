package benchmarks

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"
)

// serveEcho sends back what it reads.
func serveEcho(l net.Listener, _ string) error {
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			io.Copy(struct{ io.Writer }{c}, struct{ io.Reader }{c})
			c.Close()
		}()
	}
}

// busyProcess is the name of a process that only uses processor time.
const busyProcess = "busy"

// runBusy keeps each processor busy until standard input ends.
func runBusy() {
	for range runtime.NumCPU() {
		go func() {
			for n := 0; ; n++ { // staticcheck reports an empty loop
			}
		}()
	}
	io.Copy(io.Discard, os.Stdin)
	os.Exit(0)
}

// startBusy runs a process that competes for all processors until the benchmark ends.
func startBusy(b *testing.B) {
	cmd := exec.Command(os.Args[0], busyProcess)
	// One more thread than processors, to notice the end of the input.
	cmd.Env = append(os.Environ(), serverVar+"=1", fmt.Sprint("GOMAXPROCS=", runtime.NumCPU()+1))
	in, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		in.Close()
		cmd.Process.Kill()
		cmd.Wait()
	})
}

// setQuota limits this process, and those that it starts, to half of the processors' time until the
// benchmark ends, as a container's CPU limit does.
func setQuota(b *testing.B) {
	const period = 100_000 // µs, the default of container runtimes
	quota := strconv.Itoa(period * runtime.NumCPU() / 2)
	base, limits := "/sys/fs/cgroup", [][2]string{{"cpu.max", fmt.Sprint(quota, " ", period)}}
	if _, err := os.Stat(base + "/cpu/cgroup.procs"); err == nil { // cgroups version 1
		base, limits = base+"/cpu", [][2]string{{"cpu.cfs_period_us", strconv.Itoa(period)}, {"cpu.cfs_quota_us", quota}}
	}
	group := filepath.Join(base, fmt.Sprint("san-bench-", os.Getpid()))
	if err := os.Mkdir(group, 0o755); err != nil {
		b.Skip("no control group: ", err)
	}
	b.Cleanup(func() { os.Remove(group) })
	set := func(dir, file, value string) {
		if err := os.WriteFile(filepath.Join(dir, file), []byte(value), 0); err != nil {
			b.Skip("no CPU quota: ", err)
		}
	}
	for _, l := range limits {
		set(group, l[0], l[1])
	}
	set(group, "cgroup.procs", strconv.Itoa(os.Getpid()))
	b.Cleanup(func() { set(base, "cgroup.procs", strconv.Itoa(os.Getpid())) })
}

// BenchmarkScarce measures where processors are scarce: beside one busy loop for each processor, and
// with a quota of half their time. ns/op is of all callers together; p50 and p99 are of each call.
// Compare the transports round by round (-count), because the machine's speed changes.
func BenchmarkScarce(b *testing.B) {
	for _, scarce := range []struct {
		name string
		make func(*testing.B)
	}{{"idle", func(*testing.B) {}}, {"busy", startBusy}, {"quota", setQuota}} {
		for _, work := range []struct {
			name    string
			callers int
			idle    time.Duration // before each call
			start   func(b *testing.B, tr transport, callers int) func(caller int) error
		}{
			{"64B", 1, 0, startEcho(64)},
			{"64B_after_1ms", 1, time.Millisecond, startEcho(64)},
			{"1KiB", 8, 0, startEcho(1 << 10)},
			{"1KiB", 64, 0, startEcho(1 << 10)},
			{"1KiB", 256, 0, startEcho(1 << 10)},
			{"HTTP", 8, 0, startHTTP},
		} {
			for _, tr := range transports {
				if tr.name == "unix" {
					continue // the server process gets no directory for the socket
				}
				b.Run(fmt.Sprintf("%s/%s/%d/%s", scarce.name, work.name, work.callers, tr.name), func(b *testing.B) {
					scarce.make(b)
					timeCalls(b, work.callers, work.idle, work.start(b, tr, work.callers))
				})
			}
		}
	}
}

// startEcho makes calls that send so many bytes and read them back, each caller on its own connection.
func startEcho(size int) func(b *testing.B, tr transport, callers int) func(int) error {
	return func(b *testing.B, tr transport, callers int) func(int) error {
		server := startServer(b, "echo", tr, "")
		conns, bufs := make([]net.Conn, callers), make([][]byte, callers)
		for i := range conns {
			c := tr.mustConnect(b, server.addr)
			b.Cleanup(func() { c.Close() })
			conns[i], bufs[i] = c, make([]byte, size)
		}
		return func(caller int) error {
			if _, err := conns[caller].Write(bufs[caller]); err != nil {
				return err
			}
			_, err := io.ReadFull(conns[caller], bufs[caller])
			return err
		}
	}
}

// startHTTP makes calls that request 100 bytes from a net/http server.
func startHTTP(b *testing.B, tr transport, callers int) func(int) error {
	server := startServer(b, "http", tr, "")
	url := fmt.Sprintf("http://%s/%d", server.addr, 100)
	clients := make([]*http.Client, callers)
	for i := range clients {
		clients[i] = httpClient(b, tr, server.addr, 1)
	}
	return func(caller int) error {
		_, err := get(clients[caller], url, io.Discard)
		return err
	}
}

// timeCalls lets each caller call b.N times, after some calls that do not count.
func timeCalls(b *testing.B, callers int, idle time.Duration, call func(caller int) error) {
	took := make([][]time.Duration, callers)
	calls := func(n int) {
		var all sync.WaitGroup
		for i := range callers {
			took[i] = make([]time.Duration, 0, n)
			all.Go(func() {
				for range n {
					time.Sleep(idle) // simulates the caller's own pauses, which the latency depends on
					began := time.Now()
					if err := call(i); err != nil {
						b.Error(err)
						return
					}
					took[i] = append(took[i], time.Since(began))
				}
			})
		}
		all.Wait()
	}
	calls(50)
	b.ResetTimer()
	calls(b.N)
	b.StopTimer()
	sorted := slices.Sorted(slices.Values(slices.Concat(took...)))
	if len(sorted) == 0 {
		return
	}
	for _, q := range []int{50, 99} {
		b.ReportMetric(float64(sorted[len(sorted)*q/100].Nanoseconds())/1e3, fmt.Sprintf("p%d-µs", q))
	}
}
