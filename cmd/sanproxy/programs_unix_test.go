//go:build unix

package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/testenv"
)

// find returns the path of a program, also if it is in one of Debian's directories that are not in PATH.
func find(t *testing.T, name string) string {
	t.Helper()
	if path, err := exec.LookPath(name); err == nil {
		return path
	}
	if found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/" + name); len(found) > 0 {
		return found[len(found)-1]
	}
	testenv.Missing(t, name)
	return ""
}

// programTimeout bounds one program: initdb writes 40 MB.
const programTimeout = 2 * time.Minute

// command runs a program to its end, and returns what it prints.
func command(t *testing.T, as *syscall.Credential, stdin io.Reader, name string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), programTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, find(t, name), args...)
	cmd.Stdin = stdin
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: as}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// daemon runs a program until the end of the test, and waits until address answers.
func daemon(t *testing.T, as *syscall.Credential, answers address, name string, args ...string) {
	t.Helper()
	cmd := exec.Command(find(t, name), args...)
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: as}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Signal(os.Interrupt)
		late := time.AfterFunc(testTimeout, func() { cmd.Process.Kill() })
		defer late.Stop()
		cmd.Wait()
		if t.Failed() {
			t.Logf("%s:\n%s", name, out.String())
		}
	})
	testenv.Eventually(t, testTimeout, func() error {
		c, err := net.Dial(answers.network, answers.address)
		if err == nil {
			c.Close()
		}
		return err
	})
}

func TestRedis(t *testing.T) {
	dir := t.TempDir()
	server := address{unixNetwork, filepath.Join(dir, "redis.sock")}
	daemon(t, nil, server, "redis-server", "--port", "0", "--unixsocket", server.address, "--save", "", "--dir", dir)
	s := startPair(t, anyPort, server)
	_, port, _ := net.SplitHostPort(s.first.listen[0].address)
	cli := func(stdin io.Reader, args ...string) string {
		return strings.TrimSuffix(command(t, nil, stdin, "redis-cli", append([]string{"-p", port}, args...)...), "\n")
	}
	value := strings.Repeat("0123456789abcdef", 3<<20/16) // more than any buffer on the way holds
	if got := cli(strings.NewReader(value), "-x", "set", "key"); got != "OK" {
		t.Errorf("set: %q", got)
	}
	if got := cli(nil, "get", "key"); got != value {
		t.Errorf("get: %d bytes of %d, or wrong ones", len(got), len(value))
	}
	const requests = 3000
	for _, test := range []string{"set", "get", "lrange_100"} {
		command(t, nil, nil, "redis-benchmark", "-p", port, "-q", "-t", test, "-n", strconv.Itoa(requests), "-c", "20", "-P", "4", "-d", "1000")
	}
	s.wantSAN(t)
	s.first.wantReport(t, "more than 3 benchmarks' connections, and all ended", func(r routeReport) bool {
		return r.Accepted > 60 && r.Open == 0 && r.Failed == 0
	})
}

func TestPostgreSQL(t *testing.T) {
	as, dir := unprivileged(t)
	command(t, as, nil, "initdb", "-D", dir+"/data", "-U", "postgres", "-A", "trust", "--no-sync")
	server := address{unixNetwork, filepath.Join(dir, ".s.PGSQL.5432")}
	daemon(t, as, server, "postgres", "-D", dir+"/data", "-k", dir, "-c", "listen_addresses=", "-c", "fsync=off")
	s := startPair(t, anyPort, server)
	host, port, _ := net.SplitHostPort(s.first.listen[0].address)
	flags := []string{"-h", host, "-p", port, "-U", "postgres"}
	testenv.Eventually(t, testTimeout, func() error { // it accepts connections before it serves them
		return exec.Command(find(t, "pg_isready"), flags...).Run()
	})
	sql := func(text string) string {
		return command(t, as, strings.NewReader(text), "psql", append(flags, "-XAtq", "-v", "ON_ERROR_STOP=1", "postgres")...)
	}
	// A result and a COPY that are larger than any buffer on the way.
	if got := sql("select repeat('x', 3000000);"); got != strings.Repeat("x", 3000000)+"\n" {
		t.Errorf("the large result has %d bytes", len(got))
	}
	var rows strings.Builder
	for i := range 300_000 {
		fmt.Fprintln(&rows, i)
	}
	if got := sql("create table t (n int); copy t from stdin;\n" + rows.String() + "\\.\nselect count(*), sum(n) from t;"); got != "300000|44999850000\n" {
		t.Errorf("after COPY: %q", got)
	}
	command(t, as, nil, "pgbench", append(flags, "-i", "-q", "postgres")...)
	out := command(t, as, nil, "pgbench", append(flags, "-c", "8", "-j", "2", "-t", "50", "postgres")...)
	if !strings.Contains(out, "number of transactions actually processed: 400/400") {
		t.Errorf("pgbench:\n%s", out)
	}
	s.wantSAN(t)
	s.first.wantReport(t, "all ended in order", func(r routeReport) bool { return r.Open == 0 && r.Failed == 0 })
}

// unprivileged returns a user that PostgreSQL can run as, as it refuses root, and a folder that this
// user owns. A nil user is the test's own.
func unprivileged(t *testing.T) (*syscall.Credential, string) {
	t.Helper()
	// Not t.TempDir: the path of a socket has at most 107 bytes, and other users may not enter it.
	dir, err := os.MkdirTemp("", "sanproxy-pg-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if os.Getuid() != 0 {
		return nil, dir
	}
	u, err := user.Lookup("nobody")
	if err != nil {
		t.Fatal(err)
	}
	uid, _ := strconv.Atoi(u.Uid)
	gid, _ := strconv.Atoi(u.Gid)
	if err := os.Chown(dir, uid, gid); err != nil {
		t.Fatal(err)
	}
	return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, dir
}

func TestCurl(t *testing.T) {
	find(t, "curl")
	body := make([]byte, 5<<20)
	rand.NewChaCha8([32]byte{1}).Read(body)
	l, to := listenTCP(t)
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPut {
			h := sha256.New()
			n, err := io.Copy(h, r.Body)
			fmt.Fprintf(w, "%d %x %v", n, h.Sum(nil), err)
			return
		}
		w.Write(body)
	})}
	go server.Serve(l)
	t.Cleanup(func() { server.Close() })
	s := startPair(t, anyPort, to)
	url := "http://" + s.first.listen[0].address + "/"
	for _, version := range []string{"--http1.0", "--http1.1"} { // with 1.0 the body ends with the stream
		if got := command(t, nil, nil, "curl", version, "-sSf", "--max-time", "110", url); got != string(body) {
			t.Errorf("%s: %d bytes of %d, or wrong ones", version, len(got), len(body))
		}
	}
	got := command(t, nil, bytes.NewReader(body), "curl", "-sSf", "--max-time", "110", "-T", "-", url)
	if want := fmt.Sprintf("%d %x <nil>", len(body), sha256.Sum256(body)); got != want {
		t.Errorf("put: %s, want %s", got, want)
	}
	s.wantSAN(t)
}
