package examples

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sanconn/san"
	"github.com/sanconn/san/internal/testenv"
)

// readmePrograms returns the README's Go programs, changed to listen on and dial another address than
// their fixed one.
func readmePrograms(t *testing.T, address string) []string {
	t.Helper()
	text, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	var programs []string
	for i, block := range strings.Split(string(text), "```") {
		program, isGo := strings.CutPrefix(block, "go\npackage main\n")
		if i%2 == 1 && isGo {
			programs = append(programs, "package main\n"+strings.ReplaceAll(program, "localhost:7000", address))
		}
	}
	return programs
}

func TestTheREADMEsServerAndClientWork(t *testing.T) {
	address := testenv.UnusedAddress(t)
	programs := readmePrograms(t, address)
	if len(programs) != 2 {
		t.Fatalf("%d programs in the README; want a server and a client", len(programs))
	}
	var binaries []string
	for _, text := range programs {
		file := filepath.Join(t.TempDir(), "main.go")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		binaries = append(binaries, program(t, file))
	}

	server := exec.Command(binaries[0])
	server.Stderr = os.Stderr
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	defer server.Wait()
	defer server.Process.Kill()
	testenv.Eventually(t, limit, func() error { // it prints nothing when it is ready
		c, err := net.Dial("tcp", address)
		if err == nil {
			c.Close()
		}
		return err
	})

	if !strings.Contains(programs[1], " // hello by tcp, then hello by shm\n") {
		t.Error("the README does not show what the client prints")
	}
	if stdout, _ := run(t, binaries[1]); !strings.HasPrefix(stdout, "hello by tcp\nhello by ") {
		t.Errorf("the client prints %q", stdout)
	}
	c := dial(t, address)
	for _, line := range []string{"one\n", "two\n"} {
		got := make([]byte, len(line))
		if _, err := io.WriteString(c, line); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, got); err != nil || string(got) != line || moved(c) != nil {
			t.Fatalf("the server answers %q with %q, %v, by %+v", line, got, err, san.InfoOf(c))
		}
	}
	c.Close()
	server.Process.Kill()
	server.Wait()

	wait := serveOne(t, listen(t, address), echoHeld)
	defer wait()
	stdout, _ := run(t, binaries[1])
	if want := "hello by tcp\nhello by " + sanProvider() + "\n"; stdout != want {
		t.Errorf("the client prints %q; want %q", stdout, want)
	}
}

// around is what the samples of documents that are no programs need to compile, by a piece of
// each: the function's parameters, and what is left unused.
var around = map[string]struct{ parameters, unused string }{
	"Adopt(":      {"server *http.Server", "err"},
	"san.InfoOf(": {"c net.Conn", "total"},
	"Reserve(":    {"conn net.Conn, parse func([]byte) int", "err"},
}

// The samples of docs/PROGRAMS.md are compiled where those programs are: test/interop.
func TestTheDocumentsSamplesCompile(t *testing.T) {
	var text string
	for _, document := range []string{"README.md", "docs/OPERATING.md", "docs/MEMORY.md", "docs/LIMITS.md"} {
		b, err := os.ReadFile("../" + document)
		if err != nil {
			t.Fatal(err)
		}
		text += string(b)
	}
	source := "package main\n\nimport (\n\"expvar\"; \"fmt\"; \"net\"; \"net/http\"; \"os\"\n" +
		"\"github.com/sanconn/san\"; \"github.com/sanconn/san/sanconn\"\n)\n\nfunc main() {}\n"
	found := 0
	for i, block := range strings.Split(text, "```") {
		code, isGo := strings.CutPrefix(block, "go\n")
		if i%2 == 0 || !isGo || strings.HasPrefix(code, "package main\n") {
			continue
		}
		found++
		for piece, need := range around {
			if strings.Contains(code, piece) {
				source += fmt.Sprintf("\nfunc sample%d(%s) {\n%s\n_ = %s\n}\n", found, need.parameters, code, need.unused)
			}
		}
		if !strings.Contains(source, code) {
			t.Errorf("around has nothing for this sample:\n%s", code)
		}
	}
	if found != len(around) {
		t.Errorf("%d samples; want %d", found, len(around))
	}
	file := filepath.Join(t.TempDir(), "main.go")
	if err := os.WriteFile(file, []byte(source), 0o600); err != nil {
		t.Fatal(err)
	}
	program(t, file)
}
