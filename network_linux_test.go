package san

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/tcpid"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/provider/shm"
)

// Tests that a destination which net reaches is reached, in whatever form its address is given.

// serve makes a listener, and answers with a name on its connections.
func serve(t testing.TB, lc *ListenConfig, address string, name byte) *Listener {
	t.Helper()
	l := mustListen(t, lc, "tcp", address)
	var serving sync.WaitGroup
	serving.Go(func() { reply(l, name) })
	t.Cleanup(func() {
		l.Close()
		serving.Wait()
	})
	return l
}

// wantReached dials by net and by this package, and checks that both get an answer with the given name.
// It returns what carries this package's connection in the end, at both ends.
func wantReached(t testing.TB, d *Dialer, address string, name byte) (info Info) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	p, err := d.NetDialer.DialContext(ctx, "tcp", address)
	if err != nil {
		t.Fatalf("net's own dial: %v", err)
	}
	defer p.Close()
	c, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if a, b := p.RemoteAddr().String(), c.RemoteAddr().String(); a != b {
		t.Errorf("%s: the remote address is %s, and net's %s", address, b, a)
	}
	from, want := *c.LocalAddr().(*net.TCPAddr), p.LocalAddr().(*net.TCPAddr)
	if from.Port = want.Port; from.String() != want.String() {
		t.Errorf("%s: the local address is %s, and net's %s", address, c.LocalAddr(), want)
	}
	ask := func(c net.Conn) {
		t.Helper()
		c.SetDeadline(time.Now().Add(testTimeout))
		if got, err := ask(c); got != name || err != nil {
			t.Fatalf("%s: %d has answered instead of %d, %v", address, got, name, err)
		}
	}
	ask(p)
	ask(c)
	waitFor(t, "it moves, or not", func() bool { return !isUndecided(c) })
	ask(c)
	wantCarried(t, p, providerTCP)
	if info, err = carriedAtBothEnds(c); err != nil {
		t.Errorf("%s: %v", address, err)
	}
	return info
}

func wantReachedBy(t testing.TB, d *Dialer, address string, name byte, provider string) {
	t.Helper()
	if info := wantReached(t, d, address, name); info.Provider != provider {
		t.Errorf("%s: by %+v, want %s", address, info, provider)
	}
}

func TestWildcardsAndMappedAddresses(t *testing.T) {
	onlyShm(t)
	for name, on := range []string{":0", "0.0.0.0:0", "[::]:0", "127.0.0.1:0", "[::1]:0", "[::ffff:127.0.0.1]:0"} {
		t.Run(on, func(t *testing.T) { // the listener ends before the next subtest, which may get the same port in the other family
			l := serve(t, &ListenConfig{}, on, byte(name))
			reached := 0
			for _, to := range []string{"", "0.0.0.0", "::", "127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1", "::ffff:0.0.0.0", "localhost"} {
				address := net.JoinHostPort(to, portOf(l.Addr().String()))
				if c, err := net.Dial("tcp", address); err != nil {
					_, got := new(Dialer).Dial("tcp", address)
					if got == nil || got.Error() != err.Error() {
						t.Errorf("%s: %v, want %v", address, got, err)
					}
					continue
				} else {
					c.SetDeadline(time.Now().Add(testTimeout))
					answer, err := ask(c)
					c.Close()
					if err == nil && answer != byte(name) { // the answer of another program, which has the port in the other family
						continue
					}
				}
				wantReachedBy(t, atOnce(), address, byte(name), shm.Name)
				reached++
			}
			if reached == 0 {
				t.Error("no address of it was reached")
			}
		})
	}
}

// Several listeners on one port, each on another address.
func TestOnePortOnSeveralAddresses(t *testing.T) {
	onlyShm(t)
	first := serve(t, &ListenConfig{}, "127.0.0.1:0", 1)
	port := portOf(first.Addr().String())
	serve(t, &ListenConfig{}, "127.0.0.2:"+port, 2)
	serve(t, &ListenConfig{}, "[::1]:"+port, 3)
	plain := plainListen(t, "127.0.0.3:"+port)
	var serving sync.WaitGroup
	serving.Go(func() { reply(plain, 4) })
	defer serving.Wait()
	defer plain.Close()
	d := atOnce()
	d.Options.AttemptTimeout = 100 * time.Millisecond // this process has a name for the port, and could still register the connection
	wantReachedBy(t, d, "127.0.0.3:"+port, 4, providerTCP)
	wantReachedBy(t, atOnce(), "127.0.0.1:"+port, 1, shm.Name)
	wantReachedBy(t, atOnce(), "127.0.0.2:"+port, 2, shm.Name)
	wantReachedBy(t, atOnce(), "[::1]:"+port, 3, shm.Name)
}

// The host's own addresses other than loopback, and link-local addresses of IPv6 with their zone.
func TestOwnAddresses(t *testing.T) {
	inside, done := inNetwork(t, `echo 0 > /proc/sys/net/ipv6/conf/default/accept_dad
		ip link set lo up
		ip link add here type veth peer name there
		ip addr add 10.77.0.1/24 dev here
		ip addr add 10.78.0.1/32 dev there
		ip addr add fd77::1/64 dev here nodad
		ip link set here up
		ip link set there up`)
	if !inside {
		return
	}
	defer done()
	onlyShm(t)
	var local string
	waitFor(t, "a link-local address", func() bool { local = linkLocal(t, "here"); return local != "" })
	for name, to := range []string{"10.77.0.1", "10.78.0.1", "fd77::1", local + "%here"} {
		for _, on := range []string{to, ""} {
			l := serve(t, &ListenConfig{}, net.JoinHostPort(on, "0"), byte(name))
			wantReachedBy(t, atOnce(), net.JoinHostPort(to, portOf(l.Addr().String())), byte(name), shm.Name)
		}
	}
}

// linkLocal returns a usable link-local address of an interface, or "".
func linkLocal(t testing.TB, name string) string {
	t.Helper()
	i, err := net.InterfaceByName(name)
	if err != nil {
		t.Fatal(err)
	}
	addrs, err := i.Addrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		if ip := a.(*net.IPNet).IP; ip.To4() == nil && ip.IsLinkLocalUnicast() {
			l, err := net.Listen("tcp", net.JoinHostPort(ip.String()+"%"+name, "0"))
			if err != nil {
				return "" // it is still tentative
			}
			l.Close()
			return ip.String()
		}
	}
	return ""
}

// control returns a Control hook that changes a socket.
func control(change func(fd int) error) func(network, address string, c syscall.RawConn) error {
	return func(_, _ string, c syscall.RawConn) (err error) {
		return errors.Join(c.Control(func(fd uintptr) { err = change(int(fd)) }), err)
	}
}

// Sockets that are bound to an interface by SO_BINDTODEVICE.
func TestBindToDevice(t *testing.T) {
	inside, done := inNetwork(t, `ip link set lo up
		ip link add here type veth peer name there
		ip addr add 10.77.0.1/24 dev here
		ip link set here up
		ip link set there up`)
	if !inside {
		return
	}
	defer done()
	onlyShm(t)
	to := func(device string) func(string, string, syscall.RawConn) error {
		return control(func(fd int) error { return unix.BindToDevice(fd, device) })
	}
	on := func(device string) *ListenConfig {
		return &ListenConfig{NetListenConfig: net.ListenConfig{Control: to(device)}}
	}
	l := serve(t, on("lo"), "0.0.0.0:0", 1)
	port := portOf(l.Addr().String())
	serve(t, on("here"), "0.0.0.0:"+port, 2)
	d := atOnce()
	wantReachedBy(t, d, "127.0.0.1:"+port, 1, shm.Name)
	// Because the host's own addresses are reached over lo, the kernel looks for the other end's socket
	// on lo, and finds none there.
	if info := wantReached(t, d, "10.77.0.1:"+port, 2); info.Provider != providerTCP || info.Fallback != ReasonNotServed {
		t.Errorf("a listener bound to another device: %+v", info)
	}
	d.NetDialer.Control = to("lo")
	wantReachedBy(t, d, "127.0.0.1:"+port, 1, shm.Name)
}

// Multipath TCP at either end, if the kernel has it: no byte is wrong, and a connection for which the
// kernel reports something else than the socket shows stays on TCP.
func TestMultipathTCP(t *testing.T) {
	onlyShm(t)
	for _, listen := range []bool{false, true} {
		lc := &ListenConfig{}
		lc.NetListenConfig.SetMultipathTCP(listen)
		l := serve(t, lc, "127.0.0.1:0", 5)
		for _, dial := range []bool{false, true} {
			d := atOnce()
			d.NetDialer.SetMultipathTCP(dial)
			info := wantReached(t, d, l.Addr().String(), 5)
			if !dial && info.Provider != shm.Name || dial && isMultipath(t, d, l) && (info.Fallback != ReasonNotServed || !errors.Is(info.Cause, tcpid.ErrMPTCP)) {
				t.Errorf("listener %v, dialer %v: %+v", listen, dial, info)
			}
		}
	}
}

// isMultipath reports whether a dialer gets a socket of Multipath TCP, whether or not the listener has
// one.
func isMultipath(t testing.TB, d *Dialer, l *Listener) bool {
	t.Helper()
	c, err := d.NetDialer.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	protocol := 0
	if err := raw.Control(func(fd uintptr) { protocol, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PROTOCOL) }); err != nil {
		t.Fatal(err)
	}
	return protocol == unix.IPPROTO_MPTCP && err == nil
}

// A connection with TCP_MD5SIG moves like any other. Without the key there is no connection.
func TestMD5(t *testing.T) {
	onlyShm(t)
	key := func(of string) func(string, string, syscall.RawConn) error {
		return control(func(fd int) error {
			sig := unix.TCPMD5Sig{Keylen: uint16(len(of))}
			sig.Addr.Family = unix.AF_INET
			(*unix.RawSockaddrInet4)(unsafe.Pointer(&sig.Addr)).Addr = [4]byte{127, 0, 0, 1}
			copy(sig.Key[:], of)
			return unix.SetsockoptTCPMD5Sig(fd, unix.IPPROTO_TCP, unix.TCP_MD5SIG, &sig)
		})
	}
	lc := &ListenConfig{NetListenConfig: net.ListenConfig{Control: key("secret")}}
	lc.NetListenConfig.SetMultipathTCP(false)
	ln, err := lc.Listen(t.Context(), "tcp4", "127.0.0.1:0")
	if errors.Is(err, unix.ENOPROTOOPT) || errors.Is(err, unix.EOPNOTSUPP) {
		testenv.MissingKernel(t, "TCP_MD5SIG")
	}
	if err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	serving.Go(func() { reply(ln, 6) })
	defer serving.Wait()
	defer ln.Close()
	d := atOnce()
	d.NetDialer.Control = key("secret")
	wantReachedBy(t, d, ln.Addr().String(), 6, shm.Name)
	for _, without := range []func(string, string, syscall.RawConn) error{nil, key("another")} {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		d.NetDialer.Control = without
		_, err := d.DialContext(ctx, "tcp", ln.Addr().String())
		wantOpError(t, err, "dial", err)
		if e := (net.Error)(nil); !errors.As(err, &e) || !e.Timeout() {
			t.Errorf("without the key: %v", err)
		}
		cancel()
	}
}

// Control hooks are called for the connection's only socket.
func TestHooksSeeTheSocket(t *testing.T) {
	onlyShm(t)
	l := serve(t, &ListenConfig{}, "127.0.0.1:0", 0)
	var sockets []string
	d := atOnce()
	d.NetDialer.Control = func(network, address string, _ syscall.RawConn) error {
		sockets = append(sockets, network+" "+address)
		return nil
	}
	c := mustDial(t, d, l.Addr().String())
	wantMoved(t, c, shm.Name)
	if want := []string{"tcp4 " + l.Addr().String()}; !slices.Equal(sockets, want) {
		t.Errorf("%q, want %q", sockets, want)
	}
}
