package san

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/provider/verbs"
)

// memlockDone is what the child of TestMemlockExhausted prints at the end of its checks. Without it, a
// child that ran no test, or skipped it, would count as a success.
const memlockDone = "memlock: all was checked"

// If RLIMIT_MEMLOCK has room for one connection over RDMA, the first dial gets it. The next one stays on
// TCP with a reason that is counted, or fails with an error that names the limit to raise.
func TestMemlockExhausted(t *testing.T) {
	const inChild = "SAN_TEST_MEMLOCK_CHILD"
	testenv.NeedDevice(t)
	if os.Getenv(inChild) != "" {
		checkMemlockExhausted(t)
		fmt.Println(memlockDone)
		return
	}
	// The child runs as a user to whom the limit applies. It is started through /proc, as only root may
	// be able to enter the folder of the binary.
	child := exec.Command("/proc/self/exe", "-test.run=^TestMemlockExhausted$", "-test.v")
	child.Env = append(os.Environ(), inChild+"=1")
	child.Dir = "/"
	const nobody = 65534
	child.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	out, err := child.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Errorf("the child: %v", err)
	} else if !slices.Contains(strings.Split(string(out), "\n"), memlockDone) {
		t.Error("the child did not come to the end of its checks")
	}
}

// checkMemlockExhausted lowers the process's limit for good.
func checkMemlockExhausted(t *testing.T) {
	l := systemLanes[0]
	const limit = verbs.MinMemlock
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: limit, Max: limit}); err != nil {
		t.Fatal(err)
	}
	client, server := l.pipe(t)
	send(t, client, server, "over RDMA")

	prefer := l
	prefer.policy, prefer.options.MoveAtOnce = Prefer, true
	listener := prefer.listen(t, prefer.here())
	before := Stats().Fallbacks[ReasonResources]
	connect := func() net.Conn {
		c := mustDial(t, prefer.dialer(), listener.Addr().String())
		s := mustAccept(t, listener)
		waitFor(t, "it has moved, or does not", func() bool { return !isUndecided(c) })
		send(t, c, s, "by whatever carries it")
		return c
	}
	last := connect()
	for most := 4; InfoOf(last).Provider == "verbs" && most > 0; most-- { // each connection has both ends in this process
		last = connect()
	}
	wantFallback(t, last, ReasonResources)
	if n := Stats().Fallbacks[ReasonResources]; n != before+1 {
		t.Errorf("%d fallbacks for %q, want 1", n-before, ReasonResources)
	}

	required := l.listen(t, l.here())
	c, err := l.dialer().Dial("tcp", required.Addr().String())
	if err == nil {
		c.Close()
		t.Fatalf("connected by %s", InfoOf(c).Provider)
	}
	why := new(Unavailable)
	if !errors.As(err, &why) || why.Reason != ReasonResources || !strings.Contains(fmt.Sprint(err), "RLIMIT_MEMLOCK") {
		t.Errorf("Require: %v; it does not name what is missing", err)
	}
	send(t, client, server, "still over RDMA")
}
