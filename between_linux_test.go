package san

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/tcpid"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/provider/shm"
)

// Tests of what may lie between the two ends, or keep them apart: it has the same effect as with net.

// With a TCP proxy between the ends, both of its connections stay on TCP.
func TestProxyInBetween(t *testing.T) {
	l := serve(t, &ListenConfig{}, "127.0.0.1:0", 1)
	proxy := plainListen(t, "127.0.0.1:0")
	var forwarding sync.WaitGroup
	forwarding.Go(func() {
		for {
			front, err := proxy.Accept()
			if err != nil {
				return
			}
			back, err := net.Dial("tcp", l.Addr().String())
			if err != nil {
				t.Error(err)
				return
			}
			forward := func(to, from net.Conn) {
				io.Copy(to, from)
				to.(*net.TCPConn).CloseWrite()
			}
			forwarding.Go(func() { forward(back, front) })
			forwarding.Go(func() { forward(front, back) })
		}
	})
	defer forwarding.Wait()
	defer proxy.Close()
	if info := wantReached(t, atOnce(), proxy.Addr().String(), 1); info.Fallback != ReasonNoListener {
		t.Errorf("through a proxy: %+v", info)
	}
}

// nftRules are for a test's network namespace. Port 7001 is redirected to one of two listeners, and so
// is port 7002 of an address that no interface has. Port 7003 is forbidden to one user.
const nftRules = `ip link set lo up
	ip addr add 10.99.0.1/32 dev lo
	nft add table ip nat
	nft add chain ip nat out '{ type nat hook output priority -100; }'
	nft add rule ip nat out tcp dport 7001 redirect to :7000
	nft add rule ip nat out ip daddr 10.98.0.1 tcp dport 7002 dnat to 10.99.0.1:7000
	ip route add 10.98.0.1/32 dev lo
	nft add table ip filter
	nft add chain ip filter out '{ type filter hook output priority 0; }'
	nft add rule ip filter out meta skuid 65534 tcp dport 7003 reject with tcp reset
	nft add rule ip filter out tcp dport 7004 reject with icmp type admin-prohibited`

func TestPacketFilters(t *testing.T) {
	needTool(t, "nft")
	inside, done := inNetwork(t, nftRules)
	if !inside {
		return
	}
	defer done()
	onlyShm(t)
	serve(t, &ListenConfig{}, ":7000", 0)
	for name, port := range []string{"7001", "7002", "7003", "7004"} { // listeners that would be reached if the rules were not obeyed
		serve(t, &ListenConfig{}, ":"+port, byte(name+1))
	}
	for _, to := range []string{"127.0.0.1:7001", "10.98.0.1:7002"} {
		if info := wantReached(t, atOnce(), to, 0); info.Fallback != ReasonNotServed {
			t.Errorf("%s: %+v", to, info)
		}
	}
	wantReachedBy(t, atOnce(), "127.0.0.1:7000", 0, shm.Name)
	wantReachedBy(t, atOnce(), "127.0.0.1:7003", 3, shm.Name)
	wantSameError(t, "127.0.0.1:7004")
	p := startProcess(t, "refused", moves, "127.0.0.1:7003", asNobody)
	if got := p.line(t); got != "refused" {
		t.Error(got)
	}
}

func init() { roles["refused"] = roleRefused }

// roleRefused checks that this package and net return the same error, or both none.
func roleRefused(lane) error {
	t := new(failures)
	wantSameError(t, os.Getenv(envAddr))
	if err := t.err(); err != nil {
		return err
	}
	fmt.Println("refused")
	return nil
}

// wantSameError dials by net and by this package, and expects the same error.
func wantSameError(t testing.TB, address string) {
	t.Helper()
	_, want := net.Dial("tcp", address)
	if want == nil {
		t.Errorf("%s: net connects", address)
		return
	}
	for _, policy := range []Policy{Prefer, Require, Never} {
		d := atOnce()
		d.Policy = policy
		if _, got := d.Dial("tcp", address); got == nil || got.Error() != want.Error() {
			t.Errorf("%s, %v: %v, want %v", address, policy, got, want)
		}
	}
}

// Two network namespaces of one host are connected by TCP only.
func TestAnotherNamespace(t *testing.T) {
	inside, done := inNetwork(t, `ip link set lo up
		ip link add here type veth peer name there
		ip addr add 10.77.0.1/24 dev here
		ip link set here up`)
	if !inside {
		return
	}
	defer done()
	onlyShm(t)
	p := startProcess(t, "serve", moves, ":7000", func(c *exec.Cmd) {
		c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	})
	p.line(t)
	script := fmt.Sprintf(`ip link set there netns %[1]d
		nsenter -n -t %[1]d ip addr add 10.77.0.2/24 dev there
		nsenter -n -t %[1]d ip link set there up`, p.Process.Pid)
	if out, err := exec.Command("bash", "-ec", script).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	serve(t, &ListenConfig{}, ":7000", 9) // the same port in this namespace
	if info := wantReached(t, atOnce(), "10.77.0.2:7000", 0); info.Fallback != ReasonNotServed {
		t.Errorf("%+v", info)
	}
}

// Both ends belong to a thread that has a network namespace of its own. Moves are made by other threads,
// which do not find the other end there: the connection stays on TCP, with a reason.
func TestThreadInAnotherNamespace(t *testing.T) {
	testenv.NeedRoot(t)
	needTool(t, "ip")
	onlyShm(t)
	var l net.Listener
	var c, s net.Conn
	made := make(chan error)
	go func() { // the namespace ends with this goroutine's thread
		runtime.LockOSThread()
		made <- func() error {
			if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
				return err
			}
			err := exec.Command("ip", "link", "set", "lo", "up").Run()
			if err == nil {
				l, err = Listen("tcp", "127.0.0.1:0")
			}
			if err == nil {
				c, err = Dial("tcp", l.Addr().String())
			}
			if err == nil {
				s, err = l.Accept()
			}
			return err
		}()
	}()
	if err := <-made; err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	defer s.Close()
	defer c.Close()
	wantStaysByUse(t, c, s, ReasonNotServed)
	if info := InfoOf(c); !errors.Is(info.Cause, tcpid.ErrNotHere) {
		t.Errorf("%+v", info)
	}
}

// Landlock forbids to connect to all ports except one: the error is net's. If it also forbids abstract
// unix sockets, connections stay on TCP.
func TestLandlock(t *testing.T) {
	if _, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION); errno != 0 {
		testenv.MissingKernel(t, "Landlock")
	}
	allowed := plainListen(t, "127.0.0.1:0")
	startServer(t, allowed, 1)
	denied := plainListen(t, "127.0.0.1:0")
	startServer(t, denied, 2)
	for scope, want := range map[uint64]string{0: shm.Name, unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET: providerTCP} {
		t.Run(want, func(t *testing.T) {
			addresses := allowed.Addr().String() + " " + denied.Addr().String()
			p := startLandlocked(t, scope, uint16(allowed.Addr().(*net.TCPAddr).Port), addresses)
			got := p.line(t)
			if !strings.HasPrefix(got, want+" ") {
				t.Errorf("a connection that is allowed goes by %s, want %s", got, want)
			}
		})
	}
}

func init() { roles["landlocked"] = roleLandlocked }

// roleLandlocked dials an allowed and a forbidden port, and prints what carries the first connection.
func roleLandlocked(lane) error {
	to := strings.Fields(os.Getenv(envAddr))
	by, err := exchange(atOnce(), to[0])
	if err != nil {
		return err
	}
	t := new(failures)
	wantSameError(t, to[1])
	if _, err := net.Dial("tcp", to[1]); !errors.Is(err, syscall.EACCES) {
		t.Error("Landlock does not forbid it: ", err)
	}
	if err := t.err(); err != nil {
		return err
	}
	fmt.Println(by.provider, by.why)
	return nil
}

// startLandlocked starts a process that may connect to only one port.
func startLandlocked(t *testing.T, scope uint64, port uint16, addresses string) (p *process) {
	t.Helper()
	version, _, _ := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	if scope != 0 && version < 6 || version < 4 {
		testenv.MissingKernel(t, fmt.Sprintf("Landlock's version 6 (there is %d)", version))
	}
	failed := make(chan error)
	go func() { // on a thread of its own, which ends with the goroutine: a child inherits the restrictions of the thread that starts it
		runtime.LockOSThread()
		err := restrictThread(scope, port)
		if err == nil {
			p = startProcess(t, "landlocked", moves, addresses, func(*exec.Cmd) {})
		}
		failed <- err
	}()
	if err := <-failed; err != nil {
		t.Fatal(err)
	}
	return p
}

func restrictThread(scope uint64, port uint16) error {
	attr := unix.LandlockRulesetAttr{Access_net: unix.LANDLOCK_ACCESS_NET_CONNECT_TCP, Scoped: scope}
	size := unsafe.Sizeof(attr)
	rules, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(&attr)), size, 0)
	if errno != 0 {
		return os.NewSyscallError("landlock_create_ruleset", errno)
	}
	defer unix.Close(int(rules))
	rule := struct{ access, port uint64 }{unix.LANDLOCK_ACCESS_NET_CONNECT_TCP, uint64(port)}
	const netPort = 2 // LANDLOCK_RULE_NET_PORT
	if _, _, errno := unix.Syscall6(unix.SYS_LANDLOCK_ADD_RULE, rules, netPort, uintptr(unsafe.Pointer(&rule)), 0, 0, 0); errno != 0 {
		return os.NewSyscallError("landlock_add_rule", errno)
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	if _, _, errno := unix.Syscall(unix.SYS_LANDLOCK_RESTRICT_SELF, rules, 0, 0); errno != 0 {
		return os.NewSyscallError("landlock_restrict_self", errno)
	}
	return nil
}
