package san

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/sanconn/san/session"
	"github.com/sanconn/san/session/twin"
)

// fakeName is the name of the tests' provider, which needs no kernel and behaves as the
// test has set it to.
const fakeName = "fake"

// fake is a provider over in-memory endpoints. It serves this host's loopback
// addresses.
type fake struct {
	// fail, if not nil, is called before a dial is tried; its error is the dial's.
	fail func(ctx context.Context, r request) error
	// unnegotiated endpoints are connected to no listener.
	unnegotiated bool
	// silent dials reach the listener, are reported by connected, and never negotiate.
	silent    atomic.Bool
	connected chan struct{}

	mu        sync.Mutex
	listeners map[netip.AddrPort]*fakeAcceptor // guarded by mu
	attempts  int                              // dials that were tried, guarded by mu
	listened  settings                         // of the last listener, guarded by mu
}

// useFake makes f the only provider of the process for the rest of the test.
func useFake(t *testing.T) *fake {
	t.Helper()
	f := &fake{listeners: make(map[netip.AddrPort]*fakeAcceptor), connected: make(chan struct{}, 1)}
	useProviders(t, f)
	return f
}

// useProviders replaces the providers of the process for the rest of the test,
// and makes it forget what failed before.
func useProviders(t *testing.T, providers ...provider) {
	t.Helper()
	old := registry
	registry = providers
	resetBackoff()
	t.Cleanup(func() {
		registry = old
		resetBackoff()
	})
}

func resetBackoff() {
	dialBackoff.mu.Lock()
	defer dialBackoff.mu.Unlock()
	clear(dialBackoff.silent)
}

func (f *fake) name() string { return fakeName }

func (f *fake) serves(dst netip.Addr, _ settings) error {
	if dst.IsLoopback() {
		return nil
	}
	return errors.New("it serves loopback alone")
}

func (f *fake) addr(a net.Addr) netip.AddrPort {
	ap := a.(*net.TCPAddr).AddrPort()
	return netip.AddrPortFrom(reached(ap.Addr(), nil), ap.Port())
}

func (f *fake) listen(tcp *net.TCPListener, s settings) (acceptor, error) {
	a := &fakeAcceptor{f: f, addr: f.addr(tcp.Addr()), arrivals: make(chan transport), closed: make(chan struct{})}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.listeners[a.addr] = a
	f.listened = s
	return a, nil
}

func (f *fake) dial(ctx context.Context, r request) (transport, error) {
	f.mu.Lock()
	f.attempts++
	a := f.listeners[r.remote]
	f.mu.Unlock()
	if f.fail != nil {
		if err := f.fail(ctx, r); err != nil {
			return transport{}, err
		}
	}
	if a == nil {
		return transport{}, &Unavailable{Reason: ReasonNoListener}
	}
	s, err := bind(ctx, r)
	if err != nil {
		return transport{}, err
	}
	remote := net.TCPAddrFromAddrPort(r.remote)
	here, there := twin.Pair(twin.Config{Limits: session.Limits{Provider: fakeName}})
	if f.unnegotiated {
		return transport{endpoint: here, local: s.local, remote: remote, hold: s}, nil
	}
	select {
	case a.arrivals <- transport{endpoint: there, local: remote, remote: s.local}:
		if f.silent.Load() {
			f.connected <- struct{}{}
			<-ctx.Done()
			here.Abort()
			here.Retire()
			s.Close()
			return transport{}, ctx.Err()
		}
		return transport{endpoint: here, local: s.local, remote: remote, hold: s}, nil
	case <-a.closed:
		s.Close()
		return transport{}, &Unavailable{Reason: ReasonNoListener}
	case <-ctx.Done():
		s.Close()
		return transport{}, ctx.Err()
	}
}

// tried returns how many dials came as far as the provider.
func (f *fake) tried() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.attempts
}

type fakeAcceptor struct {
	f        *fake
	addr     netip.AddrPort
	arrivals chan transport
	once     sync.Once
	closed   chan struct{}
}

func (a *fakeAcceptor) accept() (transport, error) {
	select {
	case t := <-a.arrivals:
		return t, nil
	case <-a.closed:
		return transport{}, net.ErrClosed
	}
}

func (a *fakeAcceptor) Waiting() error { return nil }

func (a *fakeAcceptor) Close() error {
	a.once.Do(func() {
		close(a.closed)
		a.f.mu.Lock()
		defer a.f.mu.Unlock()
		delete(a.f.listeners, a.addr)
	})
	return nil
}
