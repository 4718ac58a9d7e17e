//go:build linux

package overlay

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sanconn/san/test/overlay/internal/build"
)

// counters are the counters of a process that the command san has built. A plain process has none.
type counters struct{ Dialed, Accepted map[string]int }

// san is the file of the command, sources the directory of other people's programs.
var san, sources string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "overlay")
	if err != nil {
		panic(err)
	}
	san, sources = filepath.Join(dir, "san"), filepath.Join(dir, "sources")
	if err := build.San(san); err != nil {
		panic(err)
	}
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

// own builds a program of this module with a command, and returns its file.
func own(t *testing.T, command, pkg string) string {
	t.Helper()
	return built(t, command, pkg, func(file string) error { return build.Own(command, "./"+pkg, file) })
}

// others builds one of other people's programs with a command, and returns its file.
func others(t *testing.T, command, program string) string {
	t.Helper()
	return built(t, command, program, func(file string) error { return build.Others(command, program, sources, file) })
}

func built(t *testing.T, command, program string, build func(file string) error) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), program)
	start := time.Now()
	if err := build(file); err != nil {
		t.Fatal(err)
	}
	t.Logf("%s build %s: %v", filepath.Base(command), program, time.Since(start).Round(time.Second))
	return file
}

// client runs a client, and returns its counters.
func client(t *testing.T, file string, args ...string) (c counters) {
	t.Helper()
	cmd := exec.Command(file, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, stderr.Bytes())
	}
	parse(t, out, &c)
	return c
}

// parse parses the value of expvar's "sanbuild".
func parse(t *testing.T, out []byte, c *counters) {
	t.Helper()
	if out = bytes.TrimSpace(out); string(out) != "<nil>" {
		if err := json.Unmarshal(out, c); err != nil {
			t.Fatalf("%v in %q", err, out)
		}
	}
}

// start starts a server, which is stopped when the test ends.
func start(t *testing.T, file string, args ...string) (in io.Writer, out *bufio.Reader) {
	t.Helper()
	cmd := exec.Command(file, args...)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		if t.Failed() {
			t.Logf("%s", stderr.Bytes())
		}
	})
	return in, bufio.NewReader(stdout)
}

// report logs what carried the connections, and compares that with what is wanted.
func report(t *testing.T, what string, dialed, accepted map[string]int, wantDialed, wantAccepted int) {
	t.Helper()
	t.Logf("%s: the client has dialed %v, the server has accepted %v", what, dialed, accepted)
	if dialed["shm"] != wantDialed || accepted["shm"] != wantAccepted {
		t.Errorf("%s: %d and %d moved to shm, want %d and %d", what, dialed["shm"], accepted["shm"], wantDialed, wantAccepted)
	}
}

func TestGRPC(t *testing.T) {
	server := own(t, san, "grpc")
	plain := own(t, "go", "grpc")
	const pooledReads = "GRPC_GO_EXPERIMENTAL_HTTP_FRAMER_READ_BUFFER_POOLING" // set to false, gRPC reads by the connection's Read
	for _, c := range []struct {
		what, server, client, pooled string
		args                         []string
		moved                        int
	}{
		{"gRPC's health checks", server, server, "true", nil, 1}, // gRPC reads by RawConn.Read
		{"gRPC with plain reads", server, server, "false", nil, 1},
		{"gRPC by TLS", server, server, "true", []string{"-tls"}, 1},
		{"gRPC, a plain client", server, plain, "false", nil, 0},
		{"gRPC, a plain server", plain, server, "false", nil, 0},
	} {
		t.Run(c.what, func(t *testing.T) {
			t.Setenv(pooledReads, c.pooled)
			in, out := start(t, c.server, c.args...)
			address, err := out.ReadString('\n')
			if err != nil {
				t.Fatal(err)
			}
			dialed := client(t, c.client, append(c.args, "-move", fmt.Sprint(c.moved), strings.TrimSpace(address))...).Dialed
			fmt.Fprintln(in)
			line, err := out.ReadBytes('\n')
			if err != nil {
				t.Fatal(err)
			}
			var accepted counters
			parse(t, line, &accepted)
			report(t, c.what, dialed, accepted.Accepted, c.moved, c.moved)
			// Where the library is beneath, they are its connections, although they stay on TCP.
			if got := dialed["tcp"] > 0; got != (c.client == server) {
				t.Errorf("%s: the client has the library: %v", c.what, got)
			}
			if got := accepted.Accepted["tcp"] > 0; got != (c.server == server) {
				t.Errorf("%s: the server has the library: %v", c.what, got)
			}
		})
	}
}

func TestNATS(t *testing.T) {
	server := others(t, san, "nats-server")
	sanClient := own(t, san, "nats")
	plain := own(t, "go", "nats")
	for _, c := range []struct {
		what, client string
		carried      int
	}{
		{"nats-server, nats.go", sanClient, 2},
		{"nats-server, a plain nats.go", plain, 0},
	} {
		address, monitor := freeAddress(t), freeAddress(t)
		_, port, _ := net.SplitHostPort(address)
		_, monitorPort, _ := net.SplitHostPort(monitor)
		start(t, server, "-a", "127.0.0.1", "-p", port, "-m", monitorPort)
		url := "http://" + monitor
		until(t, url+"/healthz")
		dialed := client(t, c.client, "nats://"+address, fmt.Sprint(c.carried)).Dialed
		accepted := moved(c.carried, func() counters { return vars(t, url+"/debug/vars") })
		report(t, c.what, dialed, accepted, c.carried, c.carried)
	}
}

// process is a server or a load of this module, with lines in both directions.
type process struct {
	in  io.Writer
	out *bufio.Reader
}

// begin starts a process, and returns the first line of a server: its address.
func begin(t *testing.T, file string) (p process, address string) {
	t.Helper()
	p.in, p.out = start(t, file)
	address, err := p.out.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return p, strings.TrimSpace(address)
}

// tell sends a line to p, and decodes the JSON that p answers into v.
func (p process) tell(t *testing.T, line string, v any) {
	t.Helper()
	fmt.Fprintln(p.in, line)
	out, err := p.out.ReadBytes('\n')
	if err != nil {
		t.Fatal(err)
	}
	if string(out) == "<nil>\n" { // what expvar prints in a plain process
		return
	}
	if err := json.Unmarshal(out, v); err != nil {
		t.Fatalf("%v in %q", err, out)
	}
}

// loads makes a program of load call a server, until so many of its connections are on shm. It returns
// what carries all of them.
func loads(t *testing.T, file, what, address string, callers, carried int) map[string]int {
	t.Helper()
	var p process
	p.in, p.out = start(t, file, what, address, fmt.Sprint(callers))
	for end := time.Now().Add(30 * time.Second); ; {
		var r struct {
			Calls  int
			Dialed map[string]int
		}
		p.tell(t, "200ms", &r)
		if r.Calls == 0 {
			t.Fatalf("%s: no call", what)
		}
		if r.Dialed["shm"] >= carried || time.Now().After(end) {
			return r.Dialed
		}
	}
}

// vars returns the counters on a page of package expvar.
func vars(t *testing.T, url string) counters {
	t.Helper()
	var v struct{ Sanbuild counters }
	if err := json.Unmarshal(until(t, url), &v); err != nil {
		t.Fatal(err)
	}
	return v.Sanbuild
}

// moved returns what a server has accepted, once so many connections are on shm: the server's end may
// move later than the client's.
func moved(carried int, look func() counters) (accepted map[string]int) {
	eventually(func() bool {
		accepted = look().Accepted
		return accepted["shm"] >= carried
	})
	return accepted
}

// eventually calls ask until it returns true, and reports whether it did so in time. It is for states of
// other people's programs, which no event reports. (This module must not depend on the library, to which
// testenv.Eventually belongs.)
func eventually(ask func() bool) bool {
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if ask() {
			return true
		}
		if time.Now().After(end) {
			return false
		}
	}
}

// TestPostgres runs pgx, a database driver, with its own package for servers.
func TestPostgres(t *testing.T) {
	servers := [2]string{own(t, "go", "postgres"), own(t, san, "postgres")}
	loaders := [2]string{own(t, "go", "load"), own(t, san, "load")}
	for _, c := range []struct {
		what           string
		server, client int
		carried        int
	}{
		{"pgproto3, pgx", 1, 1, 2},
		{"pgproto3, a plain pgx", 1, 0, 0},
		{"a plain pgproto3, pgx", 0, 1, 0},
	} {
		server, address := begin(t, servers[c.server])
		dialed := loads(t, loaders[c.client], "postgres", address, 2, c.carried)
		report(t, c.what, dialed, moved(c.carried, func() (accepted counters) {
			server.tell(t, "", &accepted)
			return accepted
		}), c.carried, c.carried)
	}
}

// TestHTTP runs net/http, and the page of client_golang that prometheus would scrape.
func TestHTTP(t *testing.T) {
	servers := [2]string{own(t, "go", "web"), own(t, san, "web")}
	loaders := [2]string{own(t, "go", "load"), own(t, san, "load")}
	for _, c := range []struct {
		what           string
		server, client int
		carried        int
	}{
		{"net/http, its client", 1, 1, 2},
		{"net/http, a plain client", 1, 0, 0},
		{"a plain net/http, its client", 0, 1, 0},
	} {
		_, address := begin(t, servers[c.server])
		dialed := loads(t, loaders[c.client], "http", "http://"+address+"/metrics", 2, c.carried)
		report(t, c.what, dialed, moved(c.carried, func() counters {
			return vars(t, "http://"+address+"/debug/vars")
		}), c.carried, c.carried)
	}
}

// freeAddress returns an address whose port nobody uses at the moment. The port is below those that
// systems assign, for instance to the dialing end of a connection, before the server has it.
func freeAddress(t *testing.T) string {
	t.Helper()
	for range 100 {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", 20_000+rand.IntN(10_000)))
		if err == nil {
			l.Close()
			return l.Addr().String()
		}
	}
	t.Fatal("no address is free")
	return ""
}

// until gets a page, once it exists.
func until(t *testing.T, url string) (body []byte) {
	t.Helper()
	var failed error
	if !eventually(func() bool {
		r, err := http.Get(url)
		if err == nil {
			body, err = io.ReadAll(r.Body)
			r.Body.Close()
			if err == nil && r.StatusCode != http.StatusOK {
				err = errors.New(r.Status)
			}
		}
		failed = err
		return err == nil
	}) {
		t.Fatal(url, failed)
	}
	return body
}
