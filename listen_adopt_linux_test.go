package san

import (
	"errors"
	"net"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/provider/shm"
)

// heir is another listener of the same socket, as a process gets it that inherits the
// descriptor.
func heir(t testing.TB, tcp *net.TCPListener) *net.TCPListener {
	t.Helper()
	file, err := tcp.File()
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	l, err := net.FileListener(file)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l.(*net.TCPListener)
}

func mustAdopt(t testing.TB, lc *ListenConfig, tcp *net.TCPListener) *Listener {
	t.Helper()
	l, err := lc.Adopt(tcp)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// onlyShm makes shared memory the only provider, in the guest too.
func onlyShm(t *testing.T) { useProviders(t, shmProvider{}) }

// What is adopted is served by a SAN and by TCP, and closed.
func TestAdopt(t *testing.T) {
	onlyShm(t)
	for name, tcp := range map[string]*net.TCPListener{
		"made here": plainListen(t, "127.0.0.1:0"),
		"inherited": heir(t, plainListen(t, "127.0.0.1:0")),
		"on ::":     plainListen(t, ":0"),
	} {
		l := mustAdopt(t, &ListenConfig{}, tcp)
		address := net.JoinHostPort("127.0.0.1", portOf(l.Addr().String()))
		for d, provider := range map[*Dialer]string{{}: shm.Name, {Policy: Never}: providerTCP} {
			c := mustDial(t, d, address)
			wantProvider(t, c, provider)
			s := mustAccept(t, l)
			wantProvider(t, s, provider)
			send(t, c, s, name)
		}
		if got := l.Providers(); !slices.Equal(got, []string{shm.Name}) || len(l.Unavailable()) != 0 {
			t.Errorf("%s: it has %v, and lacks %v", name, got, l.Unavailable())
		}
		if err := l.Close(); err != nil {
			t.Errorf("%s: Close: %v", name, err)
		}
		if err := isOpen(tcp); !errors.Is(err, net.ErrClosed) {
			t.Errorf("%s: after Close: %v", name, err)
		}
	}
}

// If Adopt fails, the TCP listener is as it was.
func TestAdoptFails(t *testing.T) {
	f := useFake(t)
	none := &refusing{f, "none", &Unavailable{Reason: ReasonNotServed}}
	useProviders(t, none)
	tcp := plainListen(t, "127.0.0.1:0")
	closed := plainListen(t, "127.0.0.1:0")
	closed.Close()
	for _, tt := range []struct {
		lc   ListenConfig
		of   *net.TCPListener
		want error
	}{
		{ListenConfig{}, nil, syscall.EINVAL},
		{ListenConfig{}, closed, net.ErrClosed},
		{ListenConfig{Providers: []string{"no such"}}, tcp, nil},
		{ListenConfig{Policy: Require}, tcp, nil},
	} {
		l, err := tt.lc.Adopt(tt.of)
		if err == nil {
			l.Close()
			t.Fatalf("%+v of %v: no error", tt.lc, tt.of)
		}
		if oe := new(net.OpError); !errors.As(err, &oe) || oe.Op != "listen" || tt.want != nil && !errors.Is(err, tt.want) {
			t.Errorf("%+v of %v: %v", tt.lc, tt.of, err)
		}
	}
	c := mustDial(t, &Dialer{Policy: Never}, tcp.Addr().String())
	send(t, c, mustAccept(t, tcp), "still the caller's")
}

// Where there is no SAN, what is adopted is served by TCP.
func TestAdoptWithoutSAN(t *testing.T) {
	f := useFake(t)
	useProviders(t, &refusing{f, "none", &Unavailable{Reason: ReasonNotServed}})
	for _, lc := range []ListenConfig{{}, {Policy: Never}} {
		l := mustAdopt(t, &lc, plainListen(t, "127.0.0.1:0"))
		c := mustDial(t, &Dialer{Policy: Never}, l.Addr().String())
		send(t, c, mustAccept(t, l), "by TCP")
		if lacks := l.Unavailable(); lc.Policy == Prefer && (lacks["none"] == nil || lacks["none"].Reason != ReasonNotServed) {
			t.Errorf("it lacks %v", lacks)
		}
	}
}

// A socket that another user has made is not served over shm: dialers would not believe this
// process. So it is for services under systemd with User=.
func TestAdoptOfAnotherUsersSocket(t *testing.T) {
	testenv.NeedRoot(t)
	onlyShm(t)
	const nobody = 65534
	tcp := plainListen(t, "127.0.0.1:0")
	c, err := tcp.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if e := c.Control(func(fd uintptr) { err = syscall.Fchown(int(fd), nobody, -1) }); e != nil || err != nil {
		t.Fatal(e, err)
	}
	l := mustAdopt(t, &ListenConfig{}, tcp)
	if why := l.Unavailable()[shm.Name]; why == nil || why.Reason != ReasonOwner {
		t.Errorf("it lacks %v", l.Unavailable())
	}
	p := mustDial(t, &Dialer{}, l.Addr().String())
	wantProvider(t, p, providerTCP)
	send(t, p, mustAccept(t, l), "by TCP")
}

// While another listener of the socket serves, the one behind waits. It takes over at that
// one's Close. Whoever stands further behind goes on waiting.
func TestAdoptedListenersTakeTurns(t *testing.T) {
	onlyShm(t)
	tcp := plainListen(t, "127.0.0.1:0")
	adopt := func() *Listener { return mustAdopt(t, &ListenConfig{Policy: Require}, heir(t, tcp)) }
	wantTurn := func(l *Listener) {
		t.Helper()
		c := mustDial(t, &Dialer{Policy: Require}, tcp.Addr().String())
		send(t, c, mustAccept(t, l), "to the one whose turn it is")
	}
	wantWaiting := func(l *Listener) {
		t.Helper()
		why := l.Unavailable()[shm.Name]
		if why == nil || why.Reason != ReasonOwner || !errors.Is(why, syscall.EADDRINUSE) || len(l.Providers()) != 0 {
			t.Errorf("behind: it has %v and lacks %v", l.Providers(), l.Unavailable())
		}
	}
	front := adopt()
	for range 3 {
		next, further := adopt(), adopt()
		wantTurn(front)
		wantWaiting(next)
		wantWaiting(further)
		front.Close()
		wantTurn(next)
		waitFor(t, "the next to stand at the front", func() bool { return len(next.Unavailable()) == 0 })
		wantWaiting(further)
		further.Close()
		front = next
	}
}

// What waits when a listener of a shared socket is closed is left to Accept, for a while.
func TestCloseOfASharedListenerLosesNothing(t *testing.T) {
	useFake(t)
	l := mustAdopt(t, &ListenConfig{}, plainListen(t, "127.0.0.1:0"))
	address := l.Addr().String()
	mustDial(t, &Dialer{Policy: Never}, address)
	mustAccept(t, l) // from now on it takes TCP's
	late := map[string]net.Conn{
		"by SAN": mustDial(t, &Dialer{Policy: Require}, address),
		"by TCP": mustDial(t, &Dialer{Policy: Never}, address),
	}
	for _, c := range late {
		defer c.Close()
	}
	waitFor(t, "TCP's connection to be taken", func() bool { return !readable(t, l) })
	l.Close()
	for range late {
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		for how, peer := range late {
			if peer.LocalAddr().String() == c.RemoteAddr().String() {
				send(t, peer, c, how)
			}
		}
		c.Close()
	}
	_, err := l.Accept()
	wantOpError(t, err, "accept", net.ErrClosed)
}

// … and then reset.
func TestCloseOfASharedListenerResetsWhatNobodyTakes(t *testing.T) {
	useFake(t)
	old := leftTime
	leftTime = 10 * time.Millisecond
	defer func() { leftTime = old }()
	l := mustAdopt(t, &ListenConfig{}, plainListen(t, "127.0.0.1:0"))
	c := mustDial(t, &Dialer{Policy: Require}, l.Addr().String())
	waitFor(t, "the connection to be ready", func() bool { return len(l.ready) == 1 })
	l.Close()
	c.SetDeadline(time.Now().Add(testTimeout))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("Read: %v", err)
	}
	_, err := l.Accept()
	wantOpError(t, err, "accept", net.ErrClosed)
}

// One listener after the other takes over a socket while it is dialed: every connection is
// made by shared memory and answered.
func TestNobodyNoticesThatAListenerTakesOver(t *testing.T) {
	onlyShm(t)
	tcp := plainListen(t, "127.0.0.1:0")
	var serving sync.WaitGroup
	adopt := func(name byte) *Listener {
		l := mustAdopt(t, &ListenConfig{}, heir(t, tcp))
		serving.Go(func() { answer(l, name) })
		return l
	}
	l := adopt(0)
	load := startLoad(t, &Dialer{Policy: Require}, tcp.Addr().String())
	for name := range byte(amount(5, 3)) {
		load.wantMore(t, shm.Name, name)
		next := adopt(name + 1)
		load.wantMore(t, shm.Name, name)
		l.Close()
		l = next
		waitFor(t, "the next to stand at the front", func() bool { return len(l.Unavailable()) == 0 })
	}
	load.end()
	l.Close()
	serving.Wait()
}

// Listeners that share a port by SO_REUSEPORT each have a SAN, and the kernel chooses one for
// each dial as it does for TCP. When one is closed the others serve.
func TestListenersOnOnePort(t *testing.T) {
	onlyShm(t)
	lc := ListenConfig{NetListenConfig: net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		return errors.Join(c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) }), err)
	}}}
	a := mustListen(t, &lc, "tcp", "127.0.0.1:0")
	b := mustListen(t, &lc, "tcp", a.Addr().String())
	var serving sync.WaitGroup
	for name, l := range []*Listener{a, b} {
		serving.Go(func() { answer(l, byte(name)) })
	}
	load := startLoad(t, &Dialer{Policy: Require}, a.Addr().String())
	load.wantMore(t, shm.Name, 0)
	load.wantMore(t, shm.Name, 1)
	load.end()
	a.Close()
	load = startLoad(t, &Dialer{Policy: Require}, b.Addr().String())
	load.wantMore(t, shm.Name, 1)
	load.end()
	b.Close()
	serving.Wait()
}
