package san

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
)

func TestDialHooksSeeTheSocketOfTheAddress(t *testing.T) {
	useFake(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	var calls atomic.Int32
	d := &Dialer{}
	d.NetDialer.ControlContext = func(_ context.Context, network, address string, c syscall.RawConn) error {
		calls.Add(1)
		if network != "tcp4" || address != l.Addr().String() {
			t.Errorf("hook for %s %s", network, address)
		}
		return c.Control(func(fd uintptr) {
			if err := setReuseAddr(fd); err != nil {
				t.Error(err)
			}
		})
	}
	c := mustDial(t, d, l.Addr().String())
	wantProvider(t, c, fakeName)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := d.DialContext(ctx, "tcp", l.Addr().String())
	wantOpError(t, err, "dial", context.Canceled)
	if calls.Load() != 1 { // not for a dial that is over
		t.Errorf("hook called %d times", calls.Load())
	}
	var port int // to which a hook binds the socket itself
	d.NetDialer.ControlContext = func(_ context.Context, _, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) {
			if err := syscall.Bind(int(fd), &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
				t.Error(err)
			}
			if sa, err := syscall.Getsockname(int(fd)); err == nil {
				port = sa.(*syscall.SockaddrInet4).Port
			}
		})
	}
	c = mustDial(t, d, l.Addr().String())
	wantProvider(t, c, fakeName)
	if got := c.LocalAddr().(*net.TCPAddr).Port; got != port {
		t.Errorf("the connection comes from port %d, the hook chose %d", got, port)
	}
	d.NetDialer.ControlContext = nil
	d.NetDialer.Control = func(string, string, syscall.RawConn) error { return syscall.EXDEV }
	_, err = d.Dial("tcp", l.Addr().String())
	wantOpError(t, err, "dial", syscall.EXDEV)
}

func TestDialLocalAddr(t *testing.T) {
	useFake(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	local := freePort(t)
	addr, err := net.ResolveTCPAddr("tcp", local)
	if err != nil {
		t.Fatal(err)
	}
	c := mustDial(t, &Dialer{NetDialer: net.Dialer{LocalAddr: addr}}, l.Addr().String())
	wantProvider(t, c, fakeName)
	if got := mustAccept(t, l).RemoteAddr().String(); got != local {
		t.Errorf("the acceptor sees %s, want %s", got, local)
	}

	// From an address of its own, IPv4's unspecified one is not 127.0.0.1.
	there := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.5:0")
	from := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 5)}
	c = mustDial(t, &Dialer{NetDialer: net.Dialer{LocalAddr: from}}, "0.0.0.0:"+portOf(there.Addr().String()))
	wantProvider(t, c, fakeName)
	send(t, c, mustAccept(t, there), "here")

	for _, port := range []int{-1, 1 << 16} {
		_, err = (&Dialer{NetDialer: net.Dialer{LocalAddr: &net.TCPAddr{Port: port}}}).Dial("tcp", l.Addr().String())
		wantOpError(t, err, "dial", syscall.EINVAL)
	}
	_, err = (&Dialer{NetDialer: net.Dialer{LocalAddr: &net.UDPAddr{}}}).Dial("tcp", l.Addr().String())
	if err == nil || !strings.Contains(err.Error(), "mismatched local address type") {
		t.Errorf("a UDP address: %v", err)
	}
}

// TCP's dials cannot use a port that is bound. When SANs have used up their share of the
// ports of a network namespace, dials fall back to TCP.
func TestPortsAreLeftToTCP(t *testing.T) {
	const half = 50
	low := 32769 // odd, as nowhere else: it is read, and not remembered
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and ends with this goroutine
		done <- func() error {
			if err := ownNetwork(); err != nil {
				return err
			}
			ports := fmt.Sprintln(low, low+2*half-1)
			if err := os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", []byte(ports), 0); err != nil {
				return err
			}
			server, err := net.Listen("tcp", "127.0.0.1:80")
			if err != nil {
				return err
			}
			defer server.Close()
			r := request{remote: server.Addr().(*net.TCPAddr).AddrPort()}
			n := 0
			for ; n <= half; n++ {
				s, e := bind(t.Context(), r)
				if err = e; err != nil {
					break
				}
				defer s.Close()
			}
			if n != half || reasonOf(err) != ReasonResources {
				return fmt.Errorf("%d of %d ports bound, then %v", n, 2*half, err)
			}
			c, err := net.Dial("tcp", server.Addr().String())
			if err == nil {
				c.Close()
			}
			return err
		}()
	}()
	if err := <-done; errors.Is(err, syscall.EPERM) {
		testenv.Missing(t, "the right to make a network namespace")
	} else if err != nil {
		t.Error(err)
	}
}

// What a hook sets for the route decides the local address, as over TCP.
func TestLocalAddressByTheHooksRoute(t *testing.T) {
	mark := func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, 7) }
	device := func(fd int) error { return unix.BindToDevice(fd, "rail2") }
	failed := make(chan error)
	go func() { // its thread ends with it
		runtime.LockOSThread()
		err := ownNetwork()
		if err == nil {
			var out []byte
			if out, err = exec.Command("sh", "-ec", twoRails).CombinedOutput(); err != nil {
				err = fmt.Errorf("%w: %s", err, out)
			}
		}
		for want, hook := range map[string]func(int) error{"10.77.1.1": nil, "10.77.2.1": mark, "10.77.2.2": device} {
			if err != nil {
				break
			}
			err = bindsTo(want, hook)
		}
		failed <- err
	}()
	if err := <-failed; errors.As(err, new(*exec.ExitError)) || errors.Is(err, exec.ErrNotFound) {
		testenv.Missing(t, err.Error())
	} else if err != nil {
		t.Error(err)
	}
}

// twoRails are two ways to 10.78.0.0/16: rail1, and for marked or bound sockets rail2.
const twoRails = `
	ip link add rail1 type veth peer far1 && ip link set far1 up && ip addr add 10.77.1.1/24 dev rail1 && ip link set rail1 up
	ip link add rail2 type veth peer far2 && ip link set far2 up && ip addr add 10.77.2.1/24 dev rail2 && ip link set rail2 up
	ip addr add 10.77.2.2/24 dev rail2
	ip route add 10.78.0.0/16 dev rail1 src 10.77.1.1
	ip route add 10.78.0.0/16 dev rail2 src 10.77.2.1 table 100
	ip route add 10.78.0.0/16 dev rail2 src 10.77.2.2 table 101
	ip rule add fwmark 7 table 100
	ip rule add oif rail2 table 101`

// bindsTo returns an error unless a socket that hook, if it is not nil, has set up gets the
// local address want.
func bindsTo(want string, hook func(fd int) error) error {
	r := request{network: "tcp4", remote: netip.MustParseAddrPort("10.78.0.1:80")}
	if hook != nil {
		r.control = func(_ context.Context, _, _ string, c syscall.RawConn) (err error) {
			c.Control(func(fd uintptr) { err = hook(int(fd)) })
			return err
		}
	}
	s, err := bind(context.Background(), r)
	if err != nil {
		return err
	}
	defer s.Close()
	if got := s.local.IP.String(); got != want {
		return fmt.Errorf("the local address is %s, want %s", got, want)
	}
	return nil
}
