package testenv

import (
	"os/exec"
	"syscall"
	"testing"
	"time"
)

// quitTime bounds how long a process takes to write its goroutines' stacks.
const quitTime = 10 * time.Second

// Ended waits until a test's other process has ended, and returns how. The process's standard error
// appears with the test's. A process that takes longer than limit fails the test: see Hung.
func Ended(t testing.TB, role string, child *exec.Cmd, limit time.Duration) (err error) {
	t.Helper()
	ended := waited(child)
	select {
	case err = <-ended:
	case <-time.After(limit):
		quit(t, role, child, "end", ended)
	}
	return err
}

// Hung fails the test because a process has not done in time what it should. The failure names its role.
// The process is ended by SIGQUIT, so that it writes its goroutines' stacks to standard error. No other
// goroutine may wait for it meanwhile.
func Hung(t testing.TB, role string, child *exec.Cmd, what string) {
	t.Helper()
	quit(t, role, child, what, waited(child))
}

// waited returns a channel that gets the process's end, once it has been reaped.
func waited(child *exec.Cmd) <-chan error {
	ended := make(chan error, 1)
	go func() { ended <- child.Wait() }()
	return ended
}

func quit(t testing.TB, role string, child *exec.Cmd, what string, ended <-chan error) {
	t.Helper()
	child.Process.Signal(syscall.SIGQUIT)
	select {
	case <-ended:
	case <-time.After(quitTime):
		child.Process.Kill()
		<-ended
	}
	t.Fatalf("the other process, %q (%d), did not %s; what its goroutines did is on standard error", role, child.Process.Pid, what)
}
