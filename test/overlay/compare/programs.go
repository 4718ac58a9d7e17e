package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// A builder builds each program once each way.
type builder struct {
	dir   string
	files map[string]string
}

// modules are the sources of programs that are not this module's.
var modules = map[string]struct{ module, pkg string }{
	"nats-server": {"github.com/nats-io/nats-server/v2@v2.15.2", "."},
}

func (b *builder) run(dir, name string, args ...string) error {
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, out)
	}
	return nil
}

// built returns the file of a program, built by a command.
func (b *builder) built(program, way string) (file string, err error) {
	key := program + "." + way
	if file, ok := b.files[key]; ok {
		return file, nil
	}
	dir, pkg := ".", "./"+program
	if m, ok := modules[program]; ok {
		dir, pkg = filepath.Join(b.dir, "source-"+program), m.pkg
		if err := b.download(dir, m.module); err != nil {
			return "", err
		}
	}
	command := way
	if way == "san" {
		command = filepath.Join(b.dir, "san")
	}
	file = filepath.Join(b.dir, key)
	if err := b.run(dir, command, "build", "-o", file, pkg); err != nil {
		return "", err
	}
	b.files[key] = file
	return file, nil
}

// download copies a module's source to dir, unless it is there.
func (b *builder) download(dir, module string) error {
	if _, err := os.Stat(dir); err == nil {
		return nil
	}
	cmd := exec.Command("go", "mod", "download", "-json", module)
	cmd.Dir = b.dir
	out, err := cmd.Output()
	var m struct{ Dir string }
	if err == nil {
		err = json.Unmarshal(out, &m)
	}
	if err != nil {
		return fmt.Errorf("%s: %w\n%s", module, err, out)
	}
	return os.CopyFS(dir, os.DirFS(m.Dir))
}

// A process is a program that runs, with lines on both sides.
type process struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func start(file string, args ...string) (p process, err error) {
	p.cmd = exec.Command(file, args...)
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return p, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return p, err
	}
	p.out = bufio.NewReader(out)
	return p, p.cmd.Start()
}

func (p process) end() {
	p.cmd.Process.Kill()
	p.cmd.Wait()
}

// A server starts a program, and returns its address.
type server func(file, dir string) (process, string, error)

var servers = map[string]server{
	"web":      printing,
	"grpc":     printing,
	"postgres": printing,
	"nats-server": func(file, _ string) (process, string, error) {
		address := freeAddress()
		_, port, _ := net.SplitHostPort(address)
		p, err := start(file, "-a", "127.0.0.1", "-p", port)
		if err == nil {
			err = accepts(address)
		}
		return p, address, err
	},
}

// printing starts a server that prints its address.
func printing(file, _ string) (process, string, error) {
	p, err := start(file)
	if err != nil {
		return p, "", err
	}
	address, err := p.out.ReadString('\n')
	return p, strings.TrimSpace(address), err
}

// freeAddress returns an address of which nobody has the port just now.
func freeAddress() string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// accepts waits until somebody does at an address.
func accepts(address string) error {
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		c, err := net.Dial("tcp", address)
		if err == nil {
			return c.Close()
		}
		if time.Now().After(end) {
			return err
		}
	}
}
