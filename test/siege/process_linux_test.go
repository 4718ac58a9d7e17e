package siege

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// patience bounds each wait for a process.
const patience = 30 * time.Second

// Users that no system has. They own nothing but their processes.
const (
	victimUser    = 64101
	attackerUser  = 64102
	bystanderUser = 64103
)

// process is the test's side of a role.
type process struct {
	t     *testing.T
	name  string
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines chan string // closed when the process ends
	once  sync.Once
}

// spec tells how to start a role.
type spec struct {
	role  string
	user  uint32 // 0: this process's user
	args  any
	limit map[int]uint64 // by RLIMIT_…
}

// start starts a role, in the namespaces of the calling thread.
func start(t *testing.T, s spec) *process {
	t.Helper()
	args, err := json.Marshal(s.args)
	if err != nil {
		t.Fatal(err)
	}
	// Other users may not be able to enter the directory of the test's binary.
	cmd := exec.Command("/proc/self/exe")
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), envRole+"="+s.role, envArgs+"="+string(args), "GOTRACEBACK=all")
	if len(s.limit) > 0 {
		limits, err := json.Marshal(s.limit)
		if err != nil {
			t.Fatal(err)
		}
		cmd.Env = append(cmd.Env, envLimits+"="+string(limits))
	}
	cmd.Stderr = os.Stderr
	if s.user != 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: s.user, Gid: s.user}}
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatalf("starting the %s: %v", s.role, err)
	}
	p := &process{t: t, name: s.role, cmd: cmd, in: in, lines: make(chan string, 100)}
	go func() {
		defer close(p.lines)
		for sc := bufio.NewScanner(out); sc.Scan(); {
			p.lines <- sc.Text()
		}
	}()
	t.Cleanup(p.kill)
	p.tell("go")
	return p
}

func (p *process) pid() int { return p.cmd.Process.Pid }

func (p *process) kill() {
	p.once.Do(func() {
		p.cmd.Process.Kill()
		p.in.Close()
		for range p.lines {
		}
		p.cmd.Wait()
	})
}

// yield gives the process the lowest priority from now on.
func (p *process) yield() {
	p.t.Helper()
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", p.pid()))
	if err != nil {
		p.t.Fatal(err)
	}
	for _, task := range tasks {
		if id, err := strconv.Atoi(task.Name()); err == nil {
			unix.Setpriority(unix.PRIO_PROCESS, id, 19) // it fails for a thread that has ended
		}
	}
}

// tell sends a command.
func (p *process) tell(command string) {
	p.t.Helper()
	if _, err := io.WriteString(p.in, command+"\n"); err != nil {
		p.t.Fatalf("the %s does not listen: %v", p.name, err)
	}
}

// hear waits for the line that begins with a word, and decodes the rest of it.
func (p *process) hear(word string, to any) {
	p.t.Helper()
	select {
	case line, ok := <-p.lines:
		first, rest, _ := strings.Cut(line, " ")
		if !ok || first != word {
			p.t.Fatalf("the %s said %q, not %q", p.name, line, word)
		}
		if to == nil {
			return
		}
		if err := json.Unmarshal([]byte(rest), to); err != nil {
			p.t.Fatalf("the %s said %q: %v", p.name, line, err)
		}
	case <-time.After(patience):
		p.t.Fatalf("the %s did not say %q", p.name, word)
	}
}
