package san

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/provider/shm"
)

// Tests of a service that systemd gives its socket, and runs as another user (User=). The listener was
// made by root, who keeps it, and the process that accepts has no more than that user's rights.

// serviceUser stands for the user of User=. It is neither the dialers' user nor nobody.
const serviceUser = 65533

// serviceSocket stands for the name of FileDescriptorName=.
const serviceSocket = "san"

func init() { roles["service"] = roleService }

// served is what a service reports about a connection that it has served.
type served struct {
	PID, UID      int
	Provider      string
	Local, Remote string
}

// roleService takes its listener from the environment as sd_listen_fds(3) does. It sends back what comes
// on a connection and, after the end of the stream, a report. SIGTERM closes the listener.
func roleService(lane) error {
	for name, want := range map[string]string{"LISTEN_PID": strconv.Itoa(os.Getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": serviceSocket} {
		if got := os.Getenv(name); got != want {
			return fmt.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	inherited, err := net.FileListener(os.NewFile(3, serviceSocket))
	if err != nil {
		return err
	}
	ln, err := new(ListenConfig).Adopt(inherited.(*net.TCPListener))
	if err != nil {
		return err
	}
	terminate := make(chan os.Signal, 1)
	signal.Notify(terminate, syscall.SIGTERM)
	go func() {
		<-terminate
		ln.Close()
	}()
	fmt.Println("serves", ln.Addr())
	var serving sync.WaitGroup
	for {
		c, err := ln.Accept()
		if err != nil {
			break
		}
		serving.Go(func() {
			defer c.Close()
			c.SetDeadline(time.Now().Add(testTimeout))
			if _, err := io.Copy(c, c); err != nil {
				return // the dialer gets no answer
			}
			json.NewEncoder(c).Encode(served{
				PID: os.Getpid(), UID: os.Getuid(), Provider: InfoOf(c).Provider,
				Local: c.LocalAddr().String(), Remote: c.RemoteAddr().String(),
			})
		})
	}
	fmt.Println("closed")
	serving.Wait()
	return nil
}

// way is how a service is dialed, and which provider then carries the connection.
type way struct {
	name     string
	provider string
	dialer   interface {
		DialContext(ctx context.Context, network, address string) (net.Conn, error)
	}
}

func ways() []way {
	required := &Dialer{Policy: Require}
	required.Options.AttemptTimeout = testTimeout // it includes the time to start the service
	return []way{
		{"net", providerTCP, new(net.Dialer)},
		{"by default", shm.Name, new(Dialer)},
		{"with Require", shm.Name, required},
	}
}

// dial dials, and repeats that until somebody listens.
func (w way) dial(t testing.TB, address string) (c net.Conn) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	testenv.Eventually(t, testTimeout, func() (err error) {
		if c, err = w.dialer.DialContext(ctx, "tcp", address); err != nil && !errors.Is(err, syscall.ECONNREFUSED) {
			t.Fatalf("%s: %v", w.name, err)
		}
		return err
	})
	t.Cleanup(func() { c.Close() })
	return c
}

// wantServed uses a connection until the way's provider carries it, and then reads to its end. Both ends
// must be carried by that provider, and must have the addresses of net's connections. It returns which
// process has served the connection.
func (w way) wantServed(t testing.TB, c net.Conn, address string) (pid int) {
	t.Helper()
	c.SetDeadline(time.Now().Add(testTimeout))
	for n := 100_000; ; n++ { // other bytes in each round
		w.wantEcho(t, c, randomBytes(n))
		if InfoOf(c).Provider == w.provider {
			break
		}
	}
	w.wantEcho(t, c, randomBytes(amount(1_000_000, 100_000)))
	if err := c.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		t.Fatalf("%s: %v", w.name, err)
	}
	text, err := io.ReadAll(c)
	if err != nil {
		t.Fatalf("%s: %v", w.name, err)
	}
	var got served
	if err := json.Unmarshal(text, &got); err != nil {
		t.Fatalf("%s: %q: %v", w.name, text, err)
	}
	wantProvider(t, c, w.provider)
	want := served{got.PID, serviceUser, w.provider, c.RemoteAddr().String(), c.LocalAddr().String()}
	if got != want {
		t.Errorf("%s: the service has %+v, want %+v", w.name, got, want)
	}
	p, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	local := *p.LocalAddr().(*net.TCPAddr)
	local.Port = c.LocalAddr().(*net.TCPAddr).Port
	if !reflect.DeepEqual(c.RemoteAddr(), p.RemoteAddr()) || !reflect.DeepEqual(c.LocalAddr(), &local) {
		t.Errorf("%s: from %#v to %#v, and net from %#v to %#v", w.name, c.LocalAddr(), c.RemoteAddr(), p.LocalAddr(), p.RemoteAddr())
	}
	return got.PID
}

func (w way) wantEcho(t testing.TB, c net.Conn, data []byte) {
	t.Helper()
	wrote := make(chan error, 1)
	go func() {
		_, err := c.Write(data)
		wrote <- err
	}()
	got := make([]byte, len(data))
	n, err := io.ReadFull(c, got)
	if err := errors.Join(<-wrote, err); err != nil || !bytes.Equal(got, data) {
		t.Fatalf("%s: %d of %d bytes came back, equal: %v, by %+v: %v", w.name, n, len(data), bytes.Equal(got, data), InfoOf(c), err)
	}
}

// activatedAddress is where systemd listens, in the test's own network namespace.
const activatedAddress = "127.0.0.1:7000"

// inActivation runs the rest of a test in a network namespace in which nobody else uses that address.
func inActivation(t *testing.T) (inside bool, done func()) {
	t.Helper()
	needTool(t, "systemd-socket-activate")
	needTool(t, "setpriv")
	inside, done = inNetwork(t, "ip link set lo up")
	if inside {
		onlyShm(t)
	}
	return inside, done
}

// systemd's own socket activation: systemd listens as root, and the first connection starts the service,
// which then gets the listener. With Require, the Dial of the first connection waits for the service.
func TestSocketActivation(t *testing.T) {
	inside, done := inActivation(t)
	if !inside {
		return
	}
	defer done()
	p := startActivated(t, asService)
	for _, w := range slices.Backward(ways()) {
		if pid := w.wantServed(t, w.dial(t, activatedAddress), activatedAddress); pid != p.Process.Pid { // systemd's process has become the service
			t.Errorf("%s: %d has served it, want %d", w.name, pid, p.Process.Pid)
		}
	}
	p.line(t) // it serves
	p.closeService(t, p.Process.Pid)
	if err := p.ended(t); err != nil {
		t.Error(err)
	}
}

// The service is started again after it has ended. Once the first connection has come, a shell acts as
// systemd here: it keeps the socket.
func TestSocketActivationAfterARestart(t *testing.T) {
	inside, done := inActivation(t)
	if !inside {
		return
	}
	defer done()
	p := startActivated(t, `for run in first second; do (export LISTEN_PID=$BASHPID; `+asService+`); done`)
	old := 0
	for _, run := range []string{"first", "second"} {
		for i, w := range ways() {
			pid := w.wantServed(t, w.dial(t, activatedAddress), activatedAddress)
			if i == 0 && pid == old || i > 0 && pid != old {
				t.Errorf("%s process, %s: %d has served it, and %d the one before", run, w.name, pid, old)
			}
			old = pid
		}
		p.line(t) // it serves
		p.closeService(t, old)
	}
	if err := p.ended(t); err != nil {
		t.Error(err)
	}
}

// asService makes a shell execute the service, whose program is $0, as another user, as User= does.
const asService = `exec 4<"$0"; exec setpriv --reuid 65533 --regid 65533 --clear-groups /proc/self/fd/4`

// startActivated starts systemd's program that listens, so that the first connection starts a script.
func startActivated(t testing.TB, script string) *process {
	t.Helper()
	return startProcess(t, "service", moves, "", func(c *exec.Cmd) {
		args := []string{"systemd-socket-activate", "--listen=" + activatedAddress, "--fdname=" + serviceSocket}
		for _, v := range c.Env { // it passes on no other variables
			if strings.HasPrefix(v, "SAN_") || strings.HasPrefix(v, "GO") {
				args = append(args, "--setenv="+v)
			}
		}
		path, err := exec.LookPath(args[0])
		if err != nil {
			t.Fatal(err)
		}
		c.Path, c.Args = path, append(args, "bash", "-ec", script, os.Args[0])
	})
}

// closeService makes a process of the service stop accepting. It ends once its connections have ended.
func (p *process) closeService(t testing.TB, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if got := p.line(t); got != "closed" {
		t.Errorf("the service says %q", got)
	}
}

// The same without systemd: the test has the socket. It outlives the service's first process, whose
// connections go on. A client that connects before there is a second process waits for that.
func TestSocketOutlivesItsService(t *testing.T) {
	testenv.NeedRoot(t)
	onlyShm(t)
	tcp := plainListen(t, "127.0.0.1:0")
	address := tcp.Addr().String()
	first := startService(t, tcp)
	for _, w := range ways() {
		if pid := w.wantServed(t, w.dial(t, address), address); pid != first.Process.Pid {
			t.Errorf("%s: %d has served it, want %d", w.name, pid, first.Process.Pid)
		}
	}
	kept := make([]net.Conn, len(ways()))
	for i, w := range ways() {
		kept[i] = w.dial(t, address)
		kept[i].SetDeadline(time.Now().Add(testTimeout))
		w.wantEcho(t, kept[i], []byte("accepted by the first process"))
	}
	first.closeService(t, first.Process.Pid)

	between := make([]net.Conn, len(ways()))
	var dialing sync.WaitGroup
	for i, w := range ways() {
		dialing.Go(func() {
			var err error
			if between[i], err = w.dialer.DialContext(t.Context(), "tcp", address); err != nil {
				t.Errorf("%s, while there is no process: %v", w.name, err)
			}
		})
	}
	waitFor(t, "dialers while there is no process", func() bool { return waiting(t, tcp) == len(ways()) })
	second := startService(t, tcp)
	dialing.Wait()
	for i, w := range ways() {
		if between[i] == nil {
			continue
		}
		defer between[i].Close()
		if pid := w.wantServed(t, between[i], address); pid != second.Process.Pid {
			t.Errorf("%s, between: %d has served it, want %d", w.name, pid, second.Process.Pid)
		}
		if pid := w.wantServed(t, kept[i], address); pid != first.Process.Pid {
			t.Errorf("%s, kept: %d has served it, want %d", w.name, pid, first.Process.Pid)
		}
		if pid := w.wantServed(t, w.dial(t, address), address); pid != second.Process.Pid {
			t.Errorf("%s, after: %d has served it, want %d", w.name, pid, second.Process.Pid)
		}
	}
	if err := first.ended(t); err != nil {
		t.Error(err)
	}
}

// waiting returns how many connections of a listener nobody has accepted yet.
func waiting(t testing.TB, tcp *net.TCPListener) (n int) {
	t.Helper()
	raw, err := tcp.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	err = errors.Join(raw.Control(func(fd uintptr) {
		var info *unix.TCPInfo
		if info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			n = int(info.Unacked) // for a listener this is the length of its queue
		}
	}), err)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// startService starts a service as systemd does: with its socket, and as its user.
func startService(t testing.TB, tcp *net.TCPListener) *process {
	t.Helper()
	var files []*os.File
	for _, open := range []func() (*os.File, error){tcp.File, func() (*os.File, error) { return os.Open(os.Args[0]) }} {
		f, err := open()
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		files = append(files, f)
	}
	p := startProcess(t, "service", moves, "", func(c *exec.Cmd) {
		c.Path, c.Dir = "/bin/sh", "/"
		c.Args = []string{"sh", "-ec", "export LISTEN_PID=$$; exec /proc/self/fd/4"} // the service's user may not enter the folder of the binary
		c.Env = append(c.Env, "LISTEN_FDS=1", "LISTEN_FDNAMES="+serviceSocket)
		c.ExtraFiles = files
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: serviceUser, Gid: serviceUser}}
	})
	if got, want := p.line(t), "serves "+tcp.Addr().String(); got != want {
		t.Fatalf("the service says %q, want %q", got, want)
	}
	return p
}
