package containers

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san"
	"github.com/sanconn/san/internal/testenv"
)

// patience bounds each wait of a test. A test that reaches it has failed.
const patience = 30 * time.Second

// envRole makes the test binary act as a process of a pod.
const envRole = "SAN_CONTAINERS_ROLE"

func TestMain(m *testing.M) {
	if os.Getenv(envRole) == "" {
		os.Exit(m.Run())
	}
	serveCommands()
}

// process is a process in a pod. It executes commands, one a line, and answers each by one line.
type process struct {
	*exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

// start starts a process. change may change how it is started.
func (p *pod) start(t testing.TB, change func(*exec.Cmd)) *process {
	t.Helper()
	s := &process{Cmd: exec.Command("/proc/self/exe")}
	s.Env = append(os.Environ(), envRole+"=1")
	s.Stderr = os.Stderr
	if change != nil {
		change(s.Cmd)
	}
	in, err := s.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := s.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	s.in, s.out = in, bufio.NewReader(out)
	p.do(func() { err = s.Start() })
	if errors.Is(err, syscall.EPERM) && s.SysProcAttr != nil && s.SysProcAttr.Cloneflags != 0 {
		testenv.Missing(t, fmt.Sprintf("a namespace: %v", err))
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.kill)
	return s
}

// as makes a process run as a user, with groups.
func as(user uint32, groups ...uint32) func(*exec.Cmd) {
	return func(c *exec.Cmd) {
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user, Groups: groups}}
	}
}

func (s *process) kill() {
	s.Process.Kill()
	s.in.Close()
	s.Wait()
}

// tell sends a command.
func (s *process) tell(t testing.TB, command string) {
	t.Helper()
	if _, err := fmt.Fprintln(s.in, command); err != nil {
		t.Fatal(err)
	}
}

// answer waits for the process's answer.
func (s *process) answer(t testing.TB) string {
	t.Helper()
	late := time.AfterFunc(patience, func() { s.Process.Kill() })
	defer late.Stop()
	line, err := s.out.ReadString('\n')
	if err != nil {
		t.Fatalf("no answer: %v", err)
	}
	return strings.TrimSpace(line)
}

// ask sends a command, and returns its answer.
func (s *process) ask(t testing.TB, command string) string {
	t.Helper()
	s.tell(t, command)
	return s.answer(t)
}

// must sends a command, and checks how the answer begins.
func (s *process) must(t testing.TB, command, answer string) {
	t.Helper()
	if got := s.ask(t, command); !strings.HasPrefix(got, answer) {
		t.Fatalf("%s: %s, want: %s", command, got, answer)
	}
}

// serveCommands is the main function of such a process.
func serveCommands() {
	var a agent
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		answer, err := commands[words[0]](&a, words[1:])
		if err != nil {
			answer = "error: " + err.Error()
		}
		fmt.Println(strings.ReplaceAll(answer, "\n", " "))
	}
	os.Exit(0)
}

// agent is the state of such a process.
type agent struct {
	listener net.Listener
	conn     net.Conn // dialed by this process
	stalled  []net.Conn
	ends     [2]net.Conn   // both ends of pair's connection
	poured   atomic.Int64  // bytes that pour has written
	waits    chan struct{} // gets a token for each connection of pour whose Write waits for room
	ended    chan string   // gets the carrier of an accepted connection, and its error
}

var commands = map[string]func(*agent, []string) (string, error){
	"listen": (*agent).listen,
	"dial":   (*agent).dial,
	"echo":   (*agent).echo,
	"read":   (*agent).read,
	"ended":  (*agent).awaitEnd,
	"close":  (*agent).close,
	"full":   (*agent).full,
	"lock":   (*agent).lock,
	"mapped": (*agent).mapped,
	"pair":   (*agent).pair,
	"pour":   (*agent).pour,
	"stall":  (*agent).stall,
	"trade":  (*agent).trade,
}

// listen serves an address, where it echoes. It answers why connections from other pods do not move.
func (a *agent) listen(args []string) (answer string, err error) {
	lc := san.ListenConfig{Providers: []string{"shm"}}
	if len(args) > 1 {
		lc.ShmDir = args[1]
	}
	if a.listener, err = lc.Listen(context.Background(), "tcp", args[0]); err != nil {
		return "", err
	}
	a.ended = make(chan string, 100)
	go func() {
		for {
			c, err := a.listener.Accept()
			if err != nil {
				return
			}
			go func() {
				_, err := io.Copy(c, c)
				by := san.InfoOf(c).Provider
				c.Close()
				a.ended <- fmt.Sprint(by, " ", err)
			}()
		}
	}()
	return fmt.Sprint("lacks ", a.listener.(*san.Listener).Unavailable()["shm"]), nil
}

// close closes the listener.
func (a *agent) close([]string) (string, error) { return "ok", a.listener.Close() }

// awaitEnd waits until an accepted connection has ended.
func (a *agent) awaitEnd([]string) (string, error) {
	select {
	case s := <-a.ended:
		return s, nil
	case <-time.After(patience):
		return "", os.ErrDeadlineExceeded
	}
}

// dial connects, and answers what carries the connection once an attempt to move it has ended.
func (a *agent) dial(args []string) (answer string, err error) {
	d := san.Dialer{Providers: []string{"shm"}}
	d.Options.MoveAtOnce = true
	d.Options.AttemptTimeout = patience / 2 // a process may be stalled for seconds
	if len(args) > 1 {
		d.ShmDir = args[1]
	}
	if a.conn != nil {
		a.conn.Close()
	}
	if a.conn, err = d.Dial("tcp", args[0]); err != nil {
		return "", err
	}
	info, err := tried(a.conn)
	if info.Provider == "tcp" {
		return fmt.Sprintf("tcp: %v: %v", info.Fallback, info.Cause), err
	}
	return info.Provider, err
}

// tried waits until an attempt to move a connection has ended, which no event reports, and returns what
// carries it.
func tried(c net.Conn) (info san.Info, err error) {
	err = testenv.Await(patience, func() error {
		if info = san.InfoOf(c); info.Fallback == san.ReasonUnused {
			return os.ErrDeadlineExceeded
		}
		return nil
	})
	return info, err
}

// echo sends so many bytes, and checks that the same come back.
func (a *agent) echo(args []string) (string, error) {
	var n int64
	if _, err := fmt.Sscan(args[0], &n); err != nil {
		return "", err
	}
	a.conn.SetDeadline(time.Now().Add(patience))
	seed := [32]byte{byte(n)}
	var work sync.WaitGroup
	defer work.Wait()
	sent := make(chan error, 1)
	work.Go(func() {
		_, err := io.CopyN(a.conn, rand.NewChaCha8(seed), n)
		sent <- err
	})
	want := rand.NewChaCha8(seed)
	got, right := make([]byte, 64<<10), make([]byte, 64<<10)
	for left := n; left > 0; {
		m, err := a.conn.Read(got[:min(left, int64(len(got)))])
		if err != nil {
			a.conn.Close() // the other goroutine may be in a Write
			return "", err
		}
		io.ReadFull(want, right[:m])
		if !bytes.Equal(got[:m], right[:m]) {
			return "", fmt.Errorf("wrong bytes in what is left: %d", left)
		}
		left -= int64(m)
	}
	return "ok " + san.InfoOf(a.conn).Provider, <-sent
}

// read answers how the connection's stream ends.
func (a *agent) read([]string) (string, error) {
	a.conn.SetDeadline(time.Now().Add(patience))
	n, err := a.conn.Read(make([]byte, 1))
	switch {
	case n > 0:
		return "", errors.New("a byte has come")
	case errors.Is(err, syscall.ECONNRESET):
		return "reset", nil
	case err == io.EOF:
		return "EOF", nil
	}
	return "", err
}
