// Package examples holds programs that use package san as a user's program would, and the tests that run
// each of them in a process.
package examples

import (
	"bufio"
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/sanconn/san/internal/testenv"
)

// limit bounds how long a test waits for a process.
const limit = 2 * time.Minute

// sanProvider returns the provider to which a connection over loopback has to move here.
func sanProvider() string {
	if runtime.GOOS == "linux" {
		return "shm"
	}
	return "tcp"
}

// program builds a package or a file of this module, and returns the path of the result.
func program(t *testing.T, source string) string {
	t.Helper()
	// go test runs a cached test again only if a file has changed that the test itself has looked at. It
	// does not notice what go build reads, so the test looks at the source here.
	if _, err := os.Stat(filepath.Join(source, "main.go")); err != nil && !strings.HasSuffix(source, ".go") {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "example")
	if runtime.GOOS == "windows" {
		path += ".exe"
	}
	out, err := exec.Command("go", "build", "-o", path, source).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", source, err, out)
	}
	return path
}

// server is a running server example.
type server struct {
	*exec.Cmd
	lines *bufio.Scanner
}

// serve starts a server example on a free port, and returns the first line that it prints. The server
// runs until the test ends, without a timeout, because other programs are built in the meantime.
func serve(t *testing.T, name string) (ready string, s *server) {
	t.Helper()
	s = &server{Cmd: exec.Command(program(t, name), "-l", "127.0.0.1:0")}
	s.Stderr = os.Stderr
	out, err := s.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.Process.Kill()
		s.Wait()
	})
	s.lines = bufio.NewScanner(out)
	return s.line(t), s
}

// line reads the next line that a server prints.
func (s *server) line(t *testing.T) string {
	t.Helper()
	stuck := time.AfterFunc(limit, func() { s.Process.Kill() })
	defer stuck.Stop()
	if !s.lines.Scan() {
		t.Fatalf("%s has ended: %v", s.Path, s.lines.Err())
	}
	return s.lines.Text()
}

// run runs a program, and expects it to exit with 0.
func run(t *testing.T, path string, args ...string) (stdout, stderr string) {
	t.Helper()
	var out, err bytes.Buffer
	cmd := exec.CommandContext(t.Context(), path, args...)
	cmd.Stdout, cmd.Stderr = &out, &err
	stuck := time.AfterFunc(limit, func() { cmd.Process.Kill() })
	defer stuck.Stop()
	if e := cmd.Run(); e != nil {
		t.Fatalf("%s %s: %v\n%s", path, strings.Join(args, " "), e, &err)
	}
	return out.String(), err.String()
}

// A connection that has one request stays on TCP.
func TestHTTP(t *testing.T) {
	url, _ := serve(t, "./http/server")
	client := program(t, "./http/client")

	stdout, stderr := run(t, client, url)
	if want := "hello, you came by tcp\n"; stdout != want {
		t.Errorf("the server says %q; want %q", stdout, want)
	}
	if want := "by tcp\n"; stderr != want {
		t.Errorf("the client says %q; want %q", stderr, want)
	}
	if stdout, _ := run(t, client, "-n", "5000", url); !strings.HasPrefix(stdout, "hello, you came by ") {
		t.Errorf("the server says %q at last", stdout)
	}

	body := strings.Repeat("a SAN moves what TCP moved. ", 3000)
	if stdout, _ := run(t, client, "-d", body, url+"echo"); stdout != body {
		t.Errorf("%d bytes were posted and %d came back", len(body), len(stdout))
	}
}

func TestCurlTalksToTheSamePortByTCP(t *testing.T) {
	curl, err := exec.LookPath("curl")
	if err != nil {
		testenv.Missing(t, err.Error())
	}
	url, _ := serve(t, "./http/server")
	if stdout, _ := run(t, curl, "--silent", "--show-error", "--noproxy", "*", url); stdout != "hello, you came by tcp\n" {
		t.Errorf("the server says %q", stdout)
	}
}

func TestAFileGoesBothWaysUnchanged(t *testing.T) {
	address, server := serve(t, "./copy/server")
	client := program(t, "./copy/client")
	t.Setenv("SAN_MOVE", "now") // a connection moves in the middle of a large request
	for _, size := range []int{0, 1, 64<<10 + 1, 128 << 20} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			name := filepath.Join(t.TempDir(), "file")
			if err := os.WriteFile(name, randomBytes(size), 0o600); err != nil {
				t.Fatal(err)
			}
			stdout, _ := run(t, client, address, name)
			if want := fmt.Sprintf(" %d bytes by ", size); !strings.Contains(stdout, want) {
				t.Errorf("the client says %q; want ...%q", stdout, want)
			}
			sum, _, _ := strings.Cut(stdout, " by ")
			if line := server.line(t); !strings.HasPrefix(line, sum+" by ") {
				t.Errorf("the server says %q and the client %q", line, stdout)
			}
		})
	}
}

func TestTheCopyServerTakesPlainTCP(t *testing.T) {
	address, server := serve(t, "./copy/server")
	c, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(limit))
	if _, err := c.Write([]byte("plain")); err != nil {
		t.Fatal(err)
	}
	if err := c.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	var got bytes.Buffer
	if _, err := got.ReadFrom(c); err != nil || got.String() != "plain" {
		t.Errorf("%q came back, %v", &got, err)
	}
	if line := server.line(t); !strings.HasSuffix(line, " 5 bytes by tcp") {
		t.Errorf("the server says %q", line)
	}
}
