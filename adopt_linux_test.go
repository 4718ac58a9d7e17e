package san

import (
	"errors"
	"net"
	"slices"
	"sync"
	"syscall"
	"testing"

	"github.com/sanconn/san/provider/shm"
)

// heir returns another listener of the same socket, as a process that inherits the descriptor would make
// it.
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

// isOpen returns why a listener cannot be used, or nil.
func isOpen(tcp *net.TCPListener) error {
	c, err := tcp.SyscallConn()
	if err != nil {
		return err
	}
	return c.Control(func(uintptr) {})
}

// An adopted listener accepts connections over a SAN and over TCP, and Close closes it.
func TestAdopt(t *testing.T) {
	onlyShm(t)
	for name, tcp := range map[string]*net.TCPListener{
		"made here": plainListen(t, "127.0.0.1:0"),
		"inherited": heir(t, plainListen(t, "127.0.0.1:0")),
		"on ::":     plainListen(t, ":0"),
	} {
		l := mustAdopt(t, &ListenConfig{}, tcp)
		address := net.JoinHostPort("127.0.0.1", portOf(l.Addr().String()))
		c := mustDial(t, atOnce(), address)
		s := mustAccept(t, l)
		wantMoved(t, c, shm.Name)
		wantMoved(t, s, shm.Name)
		send(t, c, s, name)
		c = mustDial(t, &Dialer{Policy: Never}, address)
		send(t, c, mustAccept(t, l), name)
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

// If Adopt fails, the TCP listener is unchanged.
func TestAdoptFails(t *testing.T) {
	useProviders(t, &fake{called: "none", refuse: &Unavailable{Reason: ReasonNotServed}})
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

// Without a SAN, an adopted listener accepts over TCP, and its connections are net's own.
func TestAdoptWithoutSAN(t *testing.T) {
	useProviders(t, &fake{called: "none", refuse: &Unavailable{Reason: ReasonNotServed}})
	for _, lc := range []ListenConfig{{}, {Policy: Never}} {
		l := mustAdopt(t, &lc, plainListen(t, "127.0.0.1:0"))
		c := mustDial(t, &Dialer{Policy: Never}, l.Addr().String())
		s := mustAccept(t, l)
		send(t, c, s, "by TCP")
		if _, ok := s.(*net.TCPConn); !ok {
			t.Errorf("%v: Accept has returned a %T", lc.Policy, s)
		}
		want := ReasonNotServed
		if lc.Policy == Never {
			want = ReasonPolicy
		}
		wantFallback(t, s, want)
		if lacks := l.Unavailable(); lc.Policy == Prefer && (lacks["none"] == nil || lacks["none"].Reason != ReasonNotServed) {
			t.Errorf("it lacks %v", lacks)
		}
	}
}

// Several listeners of one socket accept at the same time. Each connection moves to the listener that
// has accepted it, even if other listeners open and close meanwhile.
func TestListenersOfOneSocket(t *testing.T) {
	onlyShm(t)
	tcp := plainListen(t, "127.0.0.1:0")
	var serving sync.WaitGroup
	adopt := func(name byte) *Listener {
		l := mustAdopt(t, &ListenConfig{}, heir(t, tcp))
		serving.Go(func() { reply(l, name) })
		return l
	}
	l := adopt(0)
	load := startLoad(t, atOnce(), tcp.Addr().String())
	for name := range byte(amount(5, 3)) {
		load.wantMore(t, shm.Name, name)
		next := adopt(name + 1)
		load.wantMore(t, shm.Name, name)
		l.Close()
		l = next
	}
	load.end()
	l.Close()
	serving.Wait()
}
