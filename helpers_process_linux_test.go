package san

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/provider/shm"
)

// nobody is a user other than the tests'.
const nobody = 65534

// envName has the name with which a process of the role answers.
const envName = "SAN_TEST_NAME"

func init() {
	roles["serve"] = roleServe
	roles["load"] = roleLoad
	roleLanes = append(roleLanes, moves)
}

// moves is the lane of processes whose connections move as soon as they are accepted.
var moves = lane{name: "moves", provider: shm.Name, policy: Prefer, providers: []string{shm.Name}}

// roleServe answers with its name until SIGTERM. Its listener is descriptor 3, or one that it makes at
// the address. After SIGTERM it goes on with the connections that it has.
func roleServe(l lane) error {
	var ln *Listener
	if address := os.Getenv(envAddr); address != "" {
		made, err := (&ListenConfig{Providers: l.providers, NetListenConfig: reusePort}).Listen(context.Background(), "tcp", address)
		if err != nil {
			return err
		}
		ln = made.(*Listener)
	} else {
		inherited, err := net.FileListener(os.NewFile(3, "listener"))
		if err != nil {
			return err
		}
		if ln, err = (&ListenConfig{Providers: l.providers}).Adopt(inherited.(*net.TCPListener)); err != nil {
			return err
		}
	}
	terminate := make(chan os.Signal, 1)
	signal.Notify(terminate, syscall.SIGTERM)
	go func() {
		<-terminate
		ln.Close()
	}()
	if !slices.Equal(ln.Providers(), l.providers) {
		return fmt.Errorf("it lacks %v", ln.Unavailable())
	}
	fmt.Println(ln.Addr())
	var name byte
	fmt.Sscan(os.Getenv(envName), &name)
	reply(ln, name)
	return nil
}

// startServer starts a process that serves a listener under a name.
func startServer(t testing.TB, tcp *net.TCPListener, name byte, change ...func(*exec.Cmd)) *process {
	t.Helper()
	file, err := tcp.File()
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	p := startProcess(t, "serve", moves, "", func(c *exec.Cmd) {
		c.ExtraFiles = []*os.File{file}
		c.Env = append(c.Env, fmt.Sprintf("%s=%d", envName, name))
		for _, f := range change {
			f(c)
		}
	})
	p.line(t)
	return p
}

// asNobody makes another user run a command. It does so through /proc, as only root may be able to enter
// the folder of the binary.
func asNobody(c *exec.Cmd) {
	c.Path, c.Dir = "/proc/self/exe", "/"
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
}

// loadConns is how many connections roleLoad makes, one after the other.
const loadConns = 40

// roleLoad makes connections, each of which has to move at both ends. It prints how many each name has
// answered, ordered by name.
func roleLoad(l lane) error {
	var byName [4]int
	for range loadConns {
		by, err := exchange(atOnce(), os.Getenv(envAddr))
		if err == nil && by.provider != l.provider {
			err = fmt.Errorf("%d answers by %s", by.name, by.provider)
		}
		if err != nil {
			return err
		}
		byName[by.name]++
	}
	fmt.Println(byName)
	return nil
}

// wantNoneBy checks that no connection of a load was carried by a provider.
func (l *load) wantNoneBy(t testing.TB, provider string) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	for by, n := range l.answered {
		if by.provider == provider {
			t.Errorf("%d answered %d by %s: %v", by.name, n, by.provider, l.stayed)
		}
	}
}

// envInside is set to the name of the test in a process that inProcess has started.
const envInside = "SAN_TEST_INSIDE"

// insideDone is what such a process prints at the end. Without it, a process that ran no test would
// count as a success.
const insideDone = "inside: all was checked"

// inNetwork runs the rest of a test in a new process, in its own network namespace, which a script has
// set up. inside reports whether this is that process; if so, done has to be called at the end.
func inNetwork(t *testing.T, script string) (inside bool, done func()) {
	t.Helper()
	return inProcess(t, script, func(c *exec.Cmd) {
		testenv.NeedRoot(t)
		c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	})
}

// inProcess runs the rest of a test in a new process.
func inProcess(t *testing.T, script string, change func(*exec.Cmd)) (inside bool, done func()) {
	t.Helper()
	if os.Getenv(envInside) == t.Name() {
		if out, err := exec.Command("bash", "-ec", script).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s\n%s", err, script, out)
		}
		return true, func() {
			if !t.Failed() {
				fmt.Println(insideDone)
			}
		}
	}
	if strings.Contains(t.Name(), "/") {
		t.Fatal("only a whole test can be run in a process of its own")
	}
	c := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout="+(4*testTimeout).String()) // each wait may take testTimeout
	c.Env = append(os.Environ(), envInside+"="+t.Name())
	change(c)
	out, err := c.CombinedOutput()
	if err == nil && !strings.Contains(string(out), insideDone) {
		err = errors.New("it did not come to the end of its checks")
	}
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	return false, nil
}

// needTool skips a test if a command is missing. .ci/run installs it.
func needTool(t testing.TB, name string) {
	t.Helper()
	if _, err := exec.LookPath(name); err != nil {
		testenv.Missing(t, name)
	}
}
