//go:build linux

package main

import (
	"bufio"
	"bytes"
	"debug/elf"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// program copies a program of testdata, with a go.mod.
func program(t *testing.T, name, gomod string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(filepath.Join("testdata", name))); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "go.mod"), "module example.com/"+name+"\n\n"+gomod+"\n")
	return dir
}

func write(t *testing.T, name, text string) {
	t.Helper()
	if err := os.WriteFile(name, []byte(text), 0o666); err != nil {
		t.Fatal(err)
	}
}

// sanIn runs this command in a directory, and returns what it prints.
func sanIn(t *testing.T, dir string, args ...string) string {
	t.Helper()
	out, code := trySan(t, dir, args...)
	if code != 0 {
		t.Fatalf("san %s: exit code %d\n%s", strings.Join(args, " "), code, out)
	}
	return out
}

func trySan(t *testing.T, dir string, args ...string) (output string, code int) {
	t.Helper()
	t.Chdir(dir)
	t.Setenv("SAN_SOURCE", source)
	var out bytes.Buffer
	code = run(stdio{strings.NewReader(""), &out, &out}, args)
	return out.String(), code
}

// source is the library's directory.
var source = func() string {
	dir, err := filepath.Abs("../..")
	if err != nil {
		panic(err)
	}
	return dir
}()

// runs runs a program, and returns what it prints.
func runs(t *testing.T, env []string, name string, args ...string) string {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Env = append(os.Environ(), env...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v\n%s%s", filepath.Base(name), err, out, stderr.Bytes())
	}
	return string(out)
}

// What echo prints if its connection moves when it has been used enough, and if it cannot move.
const (
	moved = `at first: tcp tcp
used: shm shm
options: shm shm
copied: shm shm
by a function: shm shm
gone back: tcp tcp
with a descriptor: tcp tcp
open at the end: 0
`
	stayed = `at first: tcp tcp
used: tcp tcp
options: tcp tcp
copied: tcp tcp
by a function: tcp tcp
gone back: tcp tcp
with a descriptor: tcp tcp
open at the end: 0
`
)

// moves runs echo, and expects its connection to move.
func moves(t *testing.T, file string, env ...string) {
	t.Helper()
	if out := runs(t, env, file); out != moved {
		t.Errorf("%s\nwant:\n%s", out, moved)
	}
}

func TestBuild(t *testing.T) {
	dir := program(t, "echo", "go 1.26")
	before := snapshot(t, dir)
	file := filepath.Join(t.TempDir(), "echo")
	sanIn(t, dir, "build", "-o", file, ".")
	if after := snapshot(t, dir); after != before {
		t.Errorf("the program's directory has changed: %s; it was %s", after, before)
	}
	moves(t, file)
	_, rest, _ := strings.Cut(runs(t, []string{"SAN_MOVE=now"}, file), "\n") // its first line may be of either carrier
	if _, want, _ := strings.Cut(moved, "\n"); rest != want {
		t.Errorf("SAN_MOVE=now:\n%s", rest)
	}
	for _, e := range []struct{ env, want string }{{"SAN_PROVIDERS=none", stayed}, {"SAN_PROVIDERS=shm", moved}} {
		if out := runs(t, []string{e.env}, file); out != e.want {
			t.Errorf("%s:\n%s", e.env, out)
		}
	}
	if out := sanIn(t, dir, "version", file); !strings.Contains(out, "built by san, library "+source+", package net go1.") {
		t.Error(out)
	}
	this, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if out, code := trySan(t, dir, "version", this); code != exitFailed || !strings.Contains(out, "not built by san") {
		t.Error(code, out)
	}

	t.Run("run", func(t *testing.T) {
		if out := sanIn(t, dir, "run", "."); out != moved {
			t.Error(out)
		}
		if out := sanIn(t, dir, "run", "main.go"); out != moved {
			t.Error("main.go:", out)
		}
	})
	t.Run("test", func(t *testing.T) {
		write(t, filepath.Join(dir, "main_test.go"), "package main\n\nimport \"testing\"\n\nfunc TestMain(*testing.M) { main() }\n")
		if out := sanIn(t, dir, "test", "-count=1", "-v", "."); !strings.HasPrefix(out, moved) {
			t.Error(out)
		}
	})
	t.Run("env", func(t *testing.T) {
		t.Setenv("GOCACHE", strings.TrimSpace(runs(t, nil, "go", "env", "GOCACHE"))) // its default is beside san's cache
		t.Setenv("XDG_CACHE_HOME", filepath.Join(t.TempDir(), "a cache"))
		out := sanIn(t, dir, "env")
		cmd := exec.Command("sh", "-c", out+"go build -o "+file+"2 .")
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		moves(t, file+"2")
	})
	t.Run("install", func(t *testing.T) {
		t.Setenv("GOBIN", t.TempDir())
		sanIn(t, dir, "install", "./...")
		moves(t, filepath.Join(os.Getenv("GOBIN"), "echo"))
	})
}

// TestBubble: connections in a bubble of testing/synctest are plain, also while there is one outside the
// bubble.
func TestBubble(t *testing.T) {
	t.Setenv("SAN_MOVE", "now")
	sanIn(t, program(t, "bubble", "go 1.26"), "test", "-count=1", ".")
}

// TestBeside: a program may use connections of package san, copies of descriptors and other networks
// than TCP together with package net's connections.
func TestBeside(t *testing.T) {
	dir := program(t, "beside", "go 1.26")
	file := filepath.Join(t.TempDir(), "beside")
	sanIn(t, dir, "build", "-o", file, ".")
	const want = `published by san build: true
net.Dial, net.Listen: shm shm
net.Dial, san.Listen: shm shm
san.Dial, net.Listen: shm shm
net.Dial, Adopt: shm shm
net.FileConn: tcp tcp
net.FileListener: shm shm
udp: datagram; localhost: true
`
	if out := runs(t, nil, file); out != want {
		t.Errorf("%s\nwant:\n%s", out, want)
	}
}

// snapshot is what is in a directory.
func snapshot(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err == nil {
			info, _ := d.Info()
			fmt.Fprintf(&b, "%s %d %v\n", path, info.Size(), info.ModTime())
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// TestHTTP runs net/http at both ends, in two processes. Each end is built by san, and plain.
func TestHTTP(t *testing.T) {
	dir := program(t, "pair", "go 1.26")
	built, plain := filepath.Join(dir, "built"), filepath.Join(dir, "plain")
	sanIn(t, dir, "build", "-o", built, ".")
	if out, err := exec.Command("go", "build", "-o", plain, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	type counters struct{ Dialed, Accepted map[string]int }
	pair := func(server, client, env string, moves bool) (s, c counters) {
		cmd := exec.Command(server)
		stdin, _ := cmd.StdinPipe()
		stdout, _ := cmd.StdoutPipe()
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		defer func() { stdin.Close(); cmd.Wait() }()
		url, err := bufio.NewReader(stdout).ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		until := "at once"
		if moves {
			until = "moves" // until it moves, nothing bounds how much is sent
		}
		out := runs(t, []string{env}, client, strings.TrimSpace(url), until)
		first, second, _ := strings.Cut(strings.TrimPrefix(out, "client "), "\nserver ")
		if first != "<nil>" {
			if err := json.Unmarshal([]byte(first), &c); err != nil {
				t.Fatal(err, first)
			}
		}
		var vars struct{ Sanbuild counters }
		if err := json.Unmarshal([]byte(second), &vars); err != nil {
			t.Fatal(err, second)
		}
		return vars.Sanbuild, c
	}
	for _, how := range []struct {
		server, client, env string
		carrier             int
	}{
		{built, built, "SAN_MOVE=", 1},
		{built, built, "SAN_MOVE=now", 1},
		{built, built, "SAN_PROVIDERS=none", 0},
		{built, plain, "SAN_MOVE=now", 0},
		{plain, built, "SAN_MOVE=now", 0},
	} {
		s, c := pair(how.server, how.client, how.env, how.carrier > 0)
		if how.server == built && s.Accepted["shm"] != how.carrier || how.client == built && c.Dialed["shm"] != how.carrier {
			t.Errorf("%+v: the server has accepted %v, the client has dialed %v", how, s.Accepted, c.Dialed)
		}
	}
}

// TestPrograms has other ways to build. Each of them has to give a program whose connections move.
func TestPrograms(t *testing.T) {
	build := func(t *testing.T, dir string, args ...string) {
		t.Helper()
		file := filepath.Join(t.TempDir(), "echo")
		sanIn(t, dir, append([]string{"build", "-o", file}, args...)...)
		moves(t, file)
	}
	t.Run("race", func(t *testing.T) {
		build(t, program(t, "echo", "go 1.26"), "-race", ".")
	})
	t.Run("static", func(t *testing.T) {
		t.Setenv("CGO_ENABLED", "0")
		dir, file := program(t, "echo", "go 1.26"), filepath.Join(t.TempDir(), "echo")
		sanIn(t, dir, "build", "-o", file, "-trimpath", "-ldflags=-s -w", ".")
		moves(t, file)
		f, err := elf.Open(file)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		for _, p := range f.Progs {
			if p.Type == elf.PT_INTERP {
				t.Error("it needs a dynamic linker")
			}
		}
	})
	t.Run("vendor", func(t *testing.T) {
		dir := program(t, "echo", "go 1.24\n\nrequire golang.org/x/text v0.3.0")
		write(t, filepath.Join(dir, "more.go"), "package main\n\nimport _ \"golang.org/x/text\"\n")
		if err := os.MkdirAll(filepath.Join(dir, "vendor/golang.org/x/text"), 0o777); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, "vendor/golang.org/x/text/doc.go"), "package text\n\nfunc init() { println(\"vendored\") }\n")
		write(t, filepath.Join(dir, "vendor/modules.txt"), "# golang.org/x/text v0.3.0\n## explicit; go 1.17\ngolang.org/x/text\n")
		build(t, dir, ".")
		build(t, dir, "-mod=vendor", ".")
	})
	t.Run("workspace", func(t *testing.T) {
		top := t.TempDir()
		dir := filepath.Join(top, "echo")
		if err := os.Rename(program(t, "echo", "go 1.24"), dir); err != nil {
			t.Fatal(err)
		}
		if err := os.Mkdir(filepath.Join(top, "other"), 0o777); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(top, "other/go.mod"), "module example.com/other\n\ngo 1.23\n")
		write(t, filepath.Join(top, "other/other.go"), "package other\n")
		write(t, filepath.Join(dir, "more.go"), "package main\n\nimport _ \"example.com/other\"\n")
		write(t, filepath.Join(top, "go.work"), "go 1.24\n\nuse ./echo\nuse ./other\n")
		build(t, dir, ".")
		build(t, top, "example.com/echo")
		t.Setenv("GOWORK", "off")
		write(t, filepath.Join(top, "go.work"), "go 1.24\n\nuse ./missing\n") // that must not be read
		write(t, filepath.Join(dir, "more.go"), "package main\n")
		build(t, dir, ".")
	})
	for _, line := range []string{"go 1.16", "go 1.21"} { // below 1.17 go.mod does not list all modules that are used
		t.Run(line, func(t *testing.T) {
			dir := program(t, "echo", line)
			write(t, filepath.Join(dir, "more.go"), `package main

import "fmt"

const before = `+fmt.Sprint(line == "go 1.16")+`

func init() {
	var all []func() int
	for i := 0; i < 3; i++ {
		all = append(all, func() int { return i })
	}
	if all[0]() != 3 {
		panic("loops have the meaning of Go 1.22")
	}
	defer func() { // panicnil=0 from Go 1.21 on
		if recovered := recover() == nil; recovered != before {
			fmt.Println("panic(nil) as before Go 1.21:", recovered)
		}
	}()
	panic(nil)
}
`)
			write(t, filepath.Join(dir, "main.go"), strings.NewReplacer("for range 2 {", "for i := 0; i < 2; i++ {", "...any)", "...interface{})").Replace(read(t, filepath.Join(dir, "main.go"))))
			build(t, dir, ".")
			file := filepath.Join(t.TempDir(), "echo")
			sanIn(t, dir, "build", "-o", file, ".")
			if out := runs(t, nil, "go", "version", "-m", file); !strings.Contains(out, "httpmuxgo121=1") {
				t.Errorf("the defaults of GODEBUG are not those of Go 1.21:\n%s", out)
			}
		})
	}
	t.Run("no module", func(t *testing.T) {
		dir := program(t, "echo", "go 1.26")
		if err := os.Remove(filepath.Join(dir, "go.mod")); err != nil {
			t.Fatal(err)
		}
		build(t, dir, "main.go")
		file := filepath.Join(t.TempDir(), "echo")
		sanIn(t, dir, "build", "-o", file, "main.go")
		if out := runs(t, nil, "go", "version", "-m", file); strings.Contains(out, "DefaultGODEBUG") {
			t.Errorf("the defaults of GODEBUG are not those of this Go:\n%s", out)
		}
	})
	t.Run("files", func(t *testing.T) {
		dir := t.TempDir()
		write(t, filepath.Join(dir, "go.mod"), "module example.com/files\n\ngo 1.26\n")
		write(t, filepath.Join(dir, "main.go"), "package main\n\nimport (\n\t\"fmt\"\n\t\"os\"\n)\n\nfunc main() { fmt.Println(os.Args[1:]) }\n")
		if out := sanIn(t, dir, "run", "main.go", "two", "arguments"); out != "[two arguments]\n" {
			t.Errorf("a program of a file, with arguments: %s", out)
		}
		write(t, filepath.Join(dir, "lib.go"), "package lib\n")
		write(t, filepath.Join(dir, "lib_test.go"), "package lib\n\nimport \"testing\"\n\nfunc TestLib(*testing.T) {}\n")
		sanIn(t, dir, "build", "lib.go") // nothing is added to it, as it is no program
		sanIn(t, dir, "test", "lib.go", "lib_test.go")
	})
	for _, version := range otherGos {
		t.Run(version, func(t *testing.T) {
			gorootOf(t, version)
			t.Setenv("GOTOOLCHAIN", version)
			build(t, program(t, "echo", "go 1.25"), ".")
		})
	}
}

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// What is cached is compiled into programs. So, whatever the process's umask, other users must not be
// able to change it, nor to put another file in its place.
func TestCacheIsOnlyOurs(t *testing.T) {
	dir := t.TempDir()
	defer syscall.Umask(syscall.Umask(0))
	if err := writeFile(filepath.Join(dir, "std", "net", "file.go"), nil); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"std", "std/net", "std/net/file.go"} {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Mode().Perm()&0o022 != 0 {
			t.Errorf("%s: %v, %v", name, info.Mode(), err)
		}
	}
}

// TestRefusals: if a program cannot be built so, the error tells why, and what to do.
func TestRefusals(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "go.mod"), "module example.com/none\n\ngo 1.26\n")
	for _, c := range []struct {
		env, want string
		args      []string
	}{
		{"GOOS=darwin", "no SAN on darwin: use go build itself", []string{"build", "."}},
		{"GO111MODULE=off", "needs module mode", []string{"build", "."}},
		{"SAN_SOURCE=/nowhere", "SAN_SOURCE=/nowhere has no go.mod of " + modulePath, []string{"build", "."}},
		{"A=", "clone its repository", []string{"install", "example.com/a/b@v1.0.0"}},
		{"A=", "-modfile does not go together", []string{"build", "-modfile=a.mod", "."}},
		{"A=", "-tags needs a value", []string{"test", "-tags"}},
		{"A=", "-cover: go's cover command reads no overlay", []string{"build", "-cover", "."}},
		{"A=", "-coverpkg: go's cover command reads no overlay", []string{"run", "-coverpkg=./...", "."}},
		{"A=", "unknown command \"vet\"", []string{"vet", "."}},
		{"A=", "no binaries are named", []string{"version"}},
	} {
		t.Run(c.args[0], func(t *testing.T) {
			t.Chdir(dir)
			t.Setenv("SAN_SOURCE", source)
			name, value, _ := strings.Cut(c.env, "=")
			t.Setenv(name, value)
			var out bytes.Buffer
			if code := run(stdio{strings.NewReader(""), &out, &out}, c.args); code == 0 || !strings.Contains(out.String(), c.want) {
				t.Errorf("%s san %s: exit code %d\n%s\nwant: %s", c.env, strings.Join(c.args, " "), code, out.String(), c.want)
			}
		})
	}
}
