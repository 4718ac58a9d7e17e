package examples

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// readmePrograms returns the README's Go programs, which listen on and dial
// one fixed address, made to use another.
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
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	l.Close() // the server's from here on
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
	for start := time.Now(); ; {
		c, err := net.Dial("tcp", address)
		if err == nil {
			c.Close()
			break
		}
		if time.Since(start) > limit {
			t.Fatal(err)
		}
		time.Sleep(time.Millisecond) // it says nothing when it is ready
	}

	stdout, _ := run(t, binaries[1])
	if want := "hello by " + sanProvider() + "\n"; stdout != want {
		t.Errorf("the client prints %q; want %q", stdout, want)
	}
}
