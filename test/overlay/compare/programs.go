package main

import (
	"bufio"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/sanconn/san/test/overlay/internal/build"
)

// A builder builds each program once in each way.
type builder struct {
	dir   string
	files map[string]string
}

// built returns the file of a program that a command has built.
func (b *builder) built(program, way string) (file string, err error) {
	key := program + "." + way
	if file, ok := b.files[key]; ok {
		return file, nil
	}
	command := way
	if way == "san" {
		command = filepath.Join(b.dir, "san")
	}
	file = filepath.Join(b.dir, key)
	if _, ok := build.Programs[program]; ok {
		err = build.Others(command, program, filepath.Join(b.dir, "sources"), file)
	} else {
		err = build.Own(command, "./"+program, file)
	}
	if err != nil {
		return "", err
	}
	b.files[key] = file
	return file, nil
}

// A process is a running program with pipes for lines in both directions.
type process struct {
	cmd    *exec.Cmd
	in     io.WriteCloser
	out    *bufio.Reader
	behind *process // another process that ends with it, or nil
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
	if p.behind != nil {
		p.behind.end()
	}
}

// A server starts a program, and returns its address.
type server func(file, dir string) (process, string, error)

var servers = map[string]server{
	"web":         printing,
	"grpc":        printing,
	"postgres":    printing,
	"etcd":        startEtcd,
	"caddy":       startFiles,
	"caddy proxy": startProxy,
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

// startEtcd starts an etcd of one member.
func startEtcd(file, dir string) (process, string, error) {
	address := freeAddress()
	data, err := os.MkdirTemp(dir, "etcd")
	if err != nil {
		return process{}, "", err
	}
	p, err := start(file, build.EtcdArguments(data, address, freeAddress())...)
	if err == nil {
		err = accepts(address)
	}
	return p, address, err
}

// startFiles starts a caddy with files of some sizes.
func startFiles(file, dir string) (process, string, error) {
	dir, err := os.MkdirTemp(dir, "files")
	if err != nil {
		return process{}, "", err
	}
	for name, size := range map[string]int{"10KiB": 10 << 10, "1MiB": 1 << 20} {
		if err := os.WriteFile(filepath.Join(dir, name), make([]byte, size), 0o666); err != nil {
			return process{}, "", err
		}
	}
	return startCaddy(file, dir, "root "+dir+"\n\tfile_server")
}

// startProxy starts a caddy before such a file server.
func startProxy(file, dir string) (process, string, error) {
	files, address, err := startFiles(file, dir)
	if err != nil {
		return process{}, "", err
	}
	p, address, err := startCaddy(file, dir, "reverse_proxy "+address)
	if err != nil {
		files.end()
	}
	p.behind = &files
	return p, address, err
}

func startCaddy(file, dir, site string) (process, string, error) {
	address := freeAddress()
	dir, err := os.MkdirTemp(dir, "caddy")
	if err != nil {
		return process{}, "", err
	}
	args, err := build.CaddyArguments(dir, address, freeAddress(), site)
	if err != nil {
		return process{}, "", err
	}
	os.Setenv("XDG_DATA_HOME", dir) // where it keeps its files
	p, err := start(file, args...)
	if err == nil {
		err = accepts(address)
	}
	return p, address, err
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

// freeAddress returns an address whose port nobody uses at the moment.
func freeAddress() string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// accepts waits until a process accepts connections at an address.
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
