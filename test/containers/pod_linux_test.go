package containers

import (
	"fmt"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
)

// pod is a network namespace, represented by a thread that is in it, and that starts processes in it.
type pod struct {
	tid   int
	calls chan func()
}

func newPod(t testing.TB) *pod {
	t.Helper()
	testenv.NeedRoot(t)
	p := &pod{calls: make(chan func())}
	failed, ended := make(chan error), make(chan struct{})
	go func() {
		defer close(ended)
		runtime.LockOSThread() // never unlocked, so the thread ends with the goroutine
		p.tid = unix.Gettid()
		failed <- unix.Unshare(unix.CLONE_NEWNET)
		for call := range p.calls {
			call()
		}
	}()
	t.Cleanup(func() { close(p.calls); <-ended })
	if err := <-failed; err != nil {
		testenv.Missing(t, fmt.Sprintf("a network namespace: %v", err))
	}
	return p
}

// do calls f on the pod's thread.
func (p *pod) do(f func()) {
	done := make(chan struct{})
	p.calls <- func() { defer close(done); f() }
	<-done
}

// script runs shell commands in the pod.
func (p *pod) script(t testing.TB, commands string) {
	t.Helper()
	var out []byte
	var err error
	p.do(func() { out, err = exec.Command("sh", "-ec", commands).CombinedOutput() })
	if err != nil {
		testenv.Missing(t, fmt.Sprintf("%s: %v: %s", strings.TrimSpace(commands), err, out))
	}
}

// twoPods makes two pods that are connected by a network. The addresses of the first are 10.0.0.1 and
// fd00::1, those of the second 10.0.0.2, fd00::2 and 10.0.0.3.
func twoPods(t testing.TB) (a, b *pod) {
	t.Helper()
	a, b = newPod(t), newPod(t)
	a.script(t, fmt.Sprintf("ip link add v0 type veth peer name v0 netns %d", b.tid))
	for i, p := range []*pod{a, b} {
		p.script(t, strings.ReplaceAll(`
			ip link set lo up
			ip link set v0 up
			ip addr add 10.0.0.N/24 dev v0
			ip addr add fd00::N/64 dev v0 nodad`, "N", fmt.Sprint(i+1)))
	}
	b.script(t, "ip addr add 10.0.0.3/24 dev v0")
	return a, b
}
