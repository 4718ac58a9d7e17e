package shm

import (
	"context"
	"testing"

	"golang.org/x/sys/unix"
)

// uses returns how many use what dials ask by in a socket's network namespace.
func usesOfDiag(socket int) int {
	diags.mu.Lock()
	defer diags.mu.Unlock()
	if d := diags.by[netns(socket)]; d != nil {
		return d.uses
	}
	return 0
}

// Links of one network namespace share what their listeners were found by, and the last one
// closes it. A socket of another namespace than the thread's gets one of its own.
func TestDialsOfANetworkNamespaceShareOneSocket(t *testing.T) {
	leaks(t)
	here := bind(t, "127.0.0.1")
	defer unix.Close(here)
	if netns(here) == 0 {
		t.Log("this kernel has no cookies of namespaces: nothing is shared")
		return
	}
	for n := 1; n <= 2; n++ {
		tcp, l := listen(t, "127.0.0.1:0", Config{})
		a, b := meet(t, tcp, l)
		defer end(b)
		defer end(a)
		if got := usesOfDiag(here); got != n {
			t.Errorf("%d uses with %d links", got, n)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	t.Cleanup(func() {
		if err := Idle(ctx); err == nil && usesOfDiag(here) != 0 {
			t.Error("it is still there")
		}
	})
	elsewhere, err := diags.get(bindElsewhere(t))
	if err != nil {
		t.Fatal(err)
	}
	defer diags.drop(elsewhere)
	shared, err := diags.get(here)
	if err != nil {
		t.Fatal(err)
	}
	defer diags.drop(shared)
	if elsewhere.diagSocket == shared.diagSocket || elsewhere.netns != 0 {
		t.Error("two namespaces share a socket")
	}
}
