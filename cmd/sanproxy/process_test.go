package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sanconn/san/internal/testenv"
)

// testTimeout bounds each wait of a test.
const testTimeout = 30 * time.Second

// envMain makes the test binary run the command instead of tests.
const envMain = "SANPROXY_TEST_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(envMain) != "" {
		main()
	}
	os.Exit(m.Run())
}

// process is a sanproxy in a process of its own.
type process struct {
	*exec.Cmd
	stats  string // path of the socket that serves the counters
	listen []address
	ended  chan error
}

// start starts sanproxy, and waits until it forwards.
func start(t *testing.T, args ...string) *process {
	t.Helper()
	p := &process{stats: filepath.Join(t.TempDir(), "stats"), ended: make(chan error, 1)}
	p.Cmd = exec.Command(os.Args[0], append(args, "-stats", "unix:"+p.stats)...)
	p.Env = append(os.Environ(), envMain+"=1", "SAN_PROVIDERS="+testProvider())
	p.Stderr = os.Stderr
	out, err := p.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	for range strings.Count(strings.Join(args, " "), "-listen") {
		if !lines.Scan() {
			t.Fatal("sanproxy does not start")
		}
		text, _ := strings.CutPrefix(lines.Text(), "forwarding ")
		text, _, _ = strings.Cut(text, " to ")
		a, err := parseAddress(text)
		if err != nil {
			t.Fatalf("%q: %v", lines.Text(), err)
		}
		p.listen = append(p.listen, a)
	}
	go func() {
		io.Copy(io.Discard, out)
		p.ended <- p.Wait()
	}()
	t.Cleanup(func() {
		p.Process.Kill()
		p.wait(t)
	})
	return p
}

// wait waits for the process's end.
func (p *process) wait(t *testing.T) error {
	t.Helper()
	select {
	case err := <-p.ended:
		p.ended <- err
		return err
	case <-time.After(testTimeout):
		t.Fatal("sanproxy does not end")
		return nil
	}
}

// report gets the counters.
func (p *process) report(t *testing.T) (r report) {
	t.Helper()
	client := http.Client{Timeout: testTimeout, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", p.stats)
		},
	}}
	resp, err := client.Get("http://sanproxy/")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(&r); err != nil {
		t.Fatal(err)
	}
	return r
}

// wantReport waits until the counters of the process's one route are as wanted.
func (p *process) wantReport(t *testing.T, what string, ok func(routeReport) bool) {
	t.Helper()
	testenv.Eventually(t, testTimeout, func() error {
		if r := p.report(t).Routes[0]; !ok(r) {
			return fmt.Errorf("want %s: %+v", what, r)
		}
		return nil
	})
}

// sidecars are two processes: first is on the clients' side, second on the server's.
type sidecars struct{ first, second *process }

// startPair starts both, with a SAN between them. The flags are for the first.
func startPair(t *testing.T, listen, to address, flags ...string) sidecars {
	t.Helper()
	second := start(t, "-listen", "san:"+testHost()+":0", "-to", to.String(), "-require")
	first := start(t, append([]string{"-listen", listen.String(), "-to", second.listen[0].String(), "-require", "-dial-timeout", "30s"}, flags...)...)
	return sidecars{first, second}
}

// testHost is where the second of a pair listens, and testProvider what carries the bytes between the
// two.
func testHost() string {
	switch testenv.Device() {
	case "rxe":
		return "10.8.0.2"
	case "siw":
		return "10.8.1.2"
	}
	return "127.0.0.1"
}

func testProvider() string {
	if testenv.Device() != "" {
		return "verbs"
	}
	return "shm"
}

// wantSAN checks that all connections between the two have moved to the SAN. The dialer counts a move a
// little later than the acceptor.
func (s sidecars) wantSAN(t *testing.T) {
	t.Helper()
	p := testProvider()
	testenv.Eventually(t, testTimeout, func() error {
		first, second := s.first.report(t).SAN, s.second.report(t).SAN
		n := first.Dialed["tcp"] // each begins on it
		if n == 0 || first.Dialed[p] != n || second.Accepted[p] != n || len(first.Fallbacks) != 0 {
			return fmt.Errorf("dialed %v, fallbacks %v; accepted %v", first.Dialed, first.Fallbacks, second.Accepted)
		}
		return nil
	})
}

// listenTCP is a server's listener.
func listenTCP(t *testing.T) (net.Listener, address) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l, address{tcpNetwork, l.Addr().String()}
}

var anyPort = address{tcpNetwork, "127.0.0.1:0"}

// dial is a client of a sanproxy.
func dial(t *testing.T, a address) net.Conn {
	t.Helper()
	c, err := net.DialTimeout(a.network, a.address, testTimeout)
	if err != nil {
		t.Fatal(err)
	}
	return prepared(t, c)
}

func accept(t *testing.T, l net.Listener) net.Conn {
	t.Helper()
	l.(interface{ SetDeadline(time.Time) error }).SetDeadline(time.Now().Add(testTimeout))
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	return prepared(t, c)
}

func prepared(t *testing.T, c net.Conn) net.Conn {
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(testTimeout))
	return c
}

func mustWrite(t *testing.T, c net.Conn, text string) {
	t.Helper()
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
}

func wantNext(t *testing.T, c io.Reader, want string) {
	t.Helper()
	got := make([]byte, len(want))
	if _, err := io.ReadFull(c, got); string(got) != want || err != nil {
		t.Fatalf("read %q, %v; want %q", got, err, want)
	}
}
