package shm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"syscall"
	"testing"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
)

// deviceNamespace takes the test to a network namespace with loopback and another interface,
// whose name it returns.
func deviceNamespace(t *testing.T) (device string) {
	t.Helper()
	testenv.NeedRoot(t)
	runtime.LockOSThread() // for good: the thread ends with the test's goroutine
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(lo)
	}
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "san0"}, PeerName: "san1"}
	if err == nil {
		err = netlink.LinkAdd(veth)
	}
	if err == nil {
		err = netlink.LinkSetUp(veth)
	}
	if err != nil {
		t.Fatal(err)
	}
	return veth.Name
}

// plainTCP listens by TCP, not MPTCP, which does not have all socket options.
func plainTCP(t *testing.T, address string) *net.TCPListener {
	t.Helper()
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	tcp, err := lc.Listen(context.Background(), "tcp4", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tcp.Close() })
	return tcp.(*net.TCPListener)
}

func bindToDevice(t *testing.T, tcp *net.TCPListener, device string) {
	t.Helper()
	rc, err := tcp.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	rc.Control(func(fd uintptr) { err = unix.BindToDevice(int(fd), device) })
	if err != nil {
		t.Fatal(err)
	}
}

// sign has a listener take segments from an address only if they are signed.
func sign(t *testing.T, tcp *net.TCPListener, from [4]byte) {
	t.Helper()
	rc, err := tcp.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	key := unix.TCPMD5Sig{Keylen: 3}
	(*unix.RawSockaddrInet4)(unsafe.Pointer(&key.Addr)).Family = unix.AF_INET
	(*unix.RawSockaddrInet4)(unsafe.Pointer(&key.Addr)).Addr = from
	copy(key.Key[:], "key")
	rc.Control(func(fd uintptr) { err = unix.SetsockoptTCPMD5Sig(int(fd), unix.IPPROTO_TCP, unix.TCP_MD5SIG, &key) })
	if err != nil {
		t.Fatal(err)
	}
}

// A dialer that does not look for itself which socket TCP would reach gets no further.
func TestListenerThatConnectsNoLongerReach(t *testing.T) {
	device := deviceNamespace(t)
	for _, tc := range []struct {
		name   string
		change func(tcp *net.TCPListener)
		code   uint8
		back   func(tcp *net.TCPListener)
	}{
		{"bound to a device", func(tcp *net.TCPListener) { bindToDevice(t, tcp, device) }, codeClosed,
			func(tcp *net.TCPListener) { bindToDevice(t, tcp, "") }},
		{"of signed segments", func(tcp *net.TCPListener) { sign(t, tcp, [4]byte{127, 0, 0, 1}) }, codeAddress, nil},
		{"closed", func(tcp *net.TCPListener) { tcp.Close() }, codeClosed, nil},
	} {
		tcp := plainTCP(t, "0.0.0.0:0")
		l, err := Listen(tcp, Config{})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		to := tcp.Addr()
		if code := askRaw(t, l, to); code != codeOK {
			t.Errorf("%s: answered %d before", tc.name, code)
		}
		tc.change(tcp)
		if code := askRaw(t, l, to); code != tc.code {
			t.Errorf("%s: answered %d, not %d", tc.name, code, tc.code)
		}
		if tc.back != nil {
			tc.back(tcp)
			if code := askRaw(t, l, to); code != codeOK {
				t.Errorf("%s: answered %d afterwards", tc.name, code)
			}
		}
	}
}

// Nor is there a listener on shared memory where connects of this host do not reach TCP's.
func TestNoListenerThatConnectsDoNotReach(t *testing.T) {
	device := deviceNamespace(t)
	bound := plainTCP(t, "0.0.0.0:0")
	bindToDevice(t, bound, device)
	signed := plainTCP(t, "0.0.0.0:0")
	sign(t, signed, [4]byte{127, 0, 0, 1})
	for name, tcp := range map[string]*net.TCPListener{"bound to a device": bound, "of signed segments": signed} {
		_, err := Listen(tcp, Config{})
		if why := new(session.Unavailable); !errors.As(err, &why) || why.Reason != session.ReasonNotServed {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A listener is served that is bound to the loopback device, and one of another network
// namespace than that of the threads which serve it.
func TestListenerBoundToLoopbackInANamespace(t *testing.T) {
	deviceNamespace(t)
	tcp := plainTCP(t, "0.0.0.0:0")
	bindToDevice(t, tcp, "lo")
	l, err := Listen(tcp, Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if code := askRaw(t, l, tcp.Addr()); code != codeOK {
		t.Errorf("answered %d", code)
	}
}

// askRaw asks a listener for a connection by hand, over loopback, and returns the code.
func askRaw(t *testing.T, l *Listener, tcp net.Addr) (code uint8) {
	t.Helper()
	bound := bind(t, "127.0.0.1")
	defer unix.Close(bound)
	s := dialRaw(t, l)
	defer s.conn.Close()
	s.handshake()
	s.send((&message{kind: msgConnect, addr: loopbackAt(tcp)}).encode(), bound)
	var m message
	if _, err := receive(s.conn, &m); err != nil || m.kind != msgConnectReply {
		t.Fatalf("answered %+v, %v", m, err)
	}
	return m.code
}

func loopbackAt(tcp net.Addr) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(tcp.(*net.TCPAddr).Port))
}

func init() {
	// Dials under Landlock, which forbids connects.
	roles["landlocked"] = func() error {
		runtime.LockOSThread()
		if err := forbidConnects(); err != nil {
			fmt.Println("missing", err)
			return nil
		}
		a, err := net.ResolveTCPAddr("tcp4", os.Getenv("ADDR"))
		if err != nil {
			return err
		}
		_, err = dial(a, Config{})
		why := new(session.Unavailable)
		errors.As(err, &why)
		fmt.Println("dialed", why.Reason, errors.Is(err, syscall.EACCES))
		return nil
	}
}

// forbidConnects has Landlock forbid this thread TCP connects.
func forbidConnects() error {
	attr := unix.LandlockRulesetAttr{Access_net: unix.LANDLOCK_ACCESS_NET_CONNECT_TCP}
	fd, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr), 0)
	if errno != 0 {
		return fmt.Errorf("landlock_create_ruleset: %w", errno)
	}
	defer unix.Close(int(fd))
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	if _, _, errno := unix.Syscall(unix.SYS_LANDLOCK_RESTRICT_SELF, fd, 0, 0); errno != 0 {
		return fmt.Errorf("landlock_restrict_self: %w", errno)
	}
	return nil
}

// Landlock's rules for connects are heeded, though there is none.
func TestDialUnderLandlock(t *testing.T) {
	tcp, _ := listen(t, "127.0.0.1:0", Config{})
	c := spawn(t, "landlocked", nil, "ADDR="+tcp.Addr().String())
	line, err := c.lines.ReadString('\n')
	switch {
	case err != nil:
		t.Fatal(err)
	case line == "dialed "+session.ReasonPermission.String()+" true\n":
	case len(line) > 7 && line[:7] == "missing":
		testenv.Missing(t, "Landlock of Linux 6.7: "+line)
	default:
		t.Errorf("under Landlock: %q", line)
	}
}
