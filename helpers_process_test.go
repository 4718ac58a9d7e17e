package san

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/test/hwsim"
)

// Tests with two processes run this binary again, in a role.
const (
	envRole = "SAN_TEST_ROLE"
	envLane = "SAN_TEST_LANE"
	envAddr = "SAN_TEST_ADDR"
	// envBytes is how much the stream role sends.
	envBytes = "SAN_TEST_BYTES"
)

// roleTime bounds how long a test waits for a role, which may itself wait for testTimeout.
const roleTime = 2 * testTimeout

// roles are what the second process can do. A role reports to its test by lines on standard output, and
// ends when its standard input does.
var roles = map[string]func(l lane) error{
	"stream": roleStream,
	"write":  roleWrite,
	"read":   roleRead,
	"idle":   roleIdle,
	"leave":  roleLeave,
	"drop":   roleDrop,
	"many":   roleMany,
	"listen": roleListen,
	"plain":  rolePlain,
}

// roleLanes are lanes that only roles use.
var roleLanes = []lane{tcpInConn, plainTCP}

func TestMain(m *testing.M) {
	hwsim.Use() // when test/hwsim runs these tests
	testenv.SlowCopies()
	if role := roles[os.Getenv(envRole)]; role != nil {
		go func() {
			io.Copy(io.Discard, os.Stdin)
			os.Exit(3) // the test's process has ended
		}()
		for _, l := range append(lanes, roleLanes...) {
			if l.name == os.Getenv(envLane) {
				if err := role(l); err != nil {
					fmt.Println("error:", err)
					os.Exit(1)
				}
				os.Exit(0)
			}
		}
		fmt.Println("error: no such lane")
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// process is the test's side of a role.
type process struct {
	*exec.Cmd
	role  string
	lines *bufio.Scanner
	stdin io.Closer
}

// startRole starts this binary in a role. by is a command by which to start it, if any.
func startRole(t testing.TB, role string, l lane, addr string, by ...string) *process {
	t.Helper()
	return startRoleWith(t, nil, role, l, addr, by...)
}

// startRoleWith also passes files to the role, as descriptors from 3 on.
func startRoleWith(t testing.TB, files []*os.File, role string, l lane, addr string, by ...string) *process {
	t.Helper()
	args := append(by[:len(by):len(by)], os.Args[0])
	return startProcess(t, role, l, addr, func(c *exec.Cmd) {
		c.Path, c.Args = args[0], args
		if path, err := exec.LookPath(args[0]); err == nil {
			c.Path = path
		}
		c.ExtraFiles = files
	})
}

// startProcess starts this binary in a role. change may change the command before.
func startProcess(t testing.TB, role string, l lane, addr string, change func(*exec.Cmd)) *process {
	t.Helper()
	p := &process{Cmd: exec.Command(os.Args[0]), role: role}
	p.Env = append(os.Environ(), envRole+"="+role, envLane+"="+l.name, envAddr+"="+addr)
	p.Stderr = os.Stderr
	change(p.Cmd)
	stdin, err := p.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.stdin = stdin
	stdout, err := p.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.lines = bufio.NewScanner(stdout)
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stdin.Close()
		p.Process.Kill()
		p.Wait()
	})
	return p
}

// line reads the next line that the role prints.
func (p *process) line(t testing.TB) string {
	t.Helper()
	scanned := make(chan bool, 1)
	go func() { scanned <- p.lines.Scan() }()
	select {
	case ok := <-scanned:
		if !ok {
			t.Fatalf("the other process, %q, ended: %v", p.role, p.lines.Err())
		}
	case <-time.After(roleTime):
		testenv.Hung(t, p.role, p.Cmd, "print a line")
	}
	if s, bad := strings.CutPrefix(p.lines.Text(), "error:"); bad {
		t.Fatalf("the other process, %q:%s", p.role, s)
	}
	return p.lines.Text()
}

// ended waits for the role's end.
func (p *process) ended(t testing.TB) error {
	t.Helper()
	return testenv.Ended(t, p.role, p.Cmd, roleTime)
}

func (l lane) dialRole() (net.Conn, error) {
	c, err := l.dialer().Dial("tcp", os.Getenv(envAddr))
	if err != nil {
		return nil, err
	}
	if got := InfoOf(c); !l.moving && got.Provider != l.provider {
		return nil, fmt.Errorf("provider %s, reason %v: %v", got.Provider, got.Fallback, got.Cause)
	}
	l.begin(c)
	return c, nil
}

// rolePlain is a TCP server without SANs.
func rolePlain(lane) error {
	ln, err := net.Listen("tcp", os.Getenv(envAddr))
	if err != nil {
		return err
	}
	fmt.Println(ln.Addr())
	for {
		c, err := ln.Accept()
		if err != nil {
			return err
		}
		go io.Copy(c, c)
	}
}

// roleListen accepts and never reads.
func roleListen(l lane) error {
	lc := ListenConfig{Policy: l.policy, Providers: l.providers, Options: l.options}
	ln, err := lc.Listen(context.Background(), "tcp", l.here())
	if err != nil {
		return err
	}
	fmt.Println(ln.Addr())
	for {
		switch c, err := ln.Accept(); {
		case errors.Is(err, syscall.EMFILE): // a server would go on as well, after a pause
			runtime.Gosched()
		case err != nil:
			return err
		default:
			defer c.Close()
			fmt.Println("accepted")
		}
	}
}
