package san

import (
	"context"
	"io"
	"net"
	"os"
	"sync"
	"testing"

	"github.com/sanconn/san/internal/hello"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/tcpid"
	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

// fakeName is the name of the tests' provider, which needs no kernel and behaves as the
// test has set it to.
const fakeName = "fake"

// fake is a provider over in-memory endpoints. It finds the acceptors of this process.
type fake struct {
	// fail, if not nil, is called before a move; its error is the move's.
	fail func(ctx context.Context) error
	// refuse, if not nil, is why listeners do without it.
	refuse error
	called string // its name, if that is not fakeName
	// impostor, if not nil, is why its answers are not from the connection's other end.
	impostor error

	mu       sync.Mutex // guards what follows
	moves    int        // that were tried
	listened settings   // of the last listener
}

// useFake makes f the only provider of the process for the rest of the test.
func useFake(t *testing.T) *fake {
	t.Helper()
	f := new(fake)
	useProviders(t, f)
	return f
}

// useProviders replaces the providers of the process for the rest of the test.
func useProviders(t *testing.T, providers ...provider) {
	t.Helper()
	old := registry
	registry = providers
	t.Cleanup(func() { registry = old })
}

// onlyShm makes shared memory the only provider, in the guest too.
func onlyShm(t *testing.T) { useProviders(t, shmProvider{}) }

func (f *fake) name() string {
	if f.called != "" {
		return f.called
	}
	return fakeName
}

func (f *fake) needsStamp(*net.TCPConn, settings) bool { return false }

func (f *fake) listen(_ *net.TCPListener, s settings) (acceptor, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.listened = s
	if f.refuse != nil {
		return nil, f.refuse
	}
	return fakeAcceptor{}, nil
}

func (f *fake) hold(*net.TCPConn, settings) (io.Closer, error) { return fakeAcceptor{}, nil }

func (f *fake) stamps(settings) bool { return false }

func (f *fake) move(ctx context.Context, h newconn.Handle, s settings) error {
	f.mu.Lock()
	f.moves++
	f.mu.Unlock()
	if f.fail != nil {
		if err := f.fail(ctx); err != nil {
			return err
		}
	}
	peer, err := tcpid.Peer(h.TCP())
	switch {
	case err != nil:
		return &Unavailable{Reason: ReasonNotServed, Err: err}
	case !peer.Accepted:
		return &Unavailable{Reason: ReasonNoListener, Err: hello.ErrNotAccepted}
	}
	offered := hello.Offer{PeerCookie: peer.Cookie}
	if offered.Cookie, err = tcpid.Cookie(h.TCP()); err != nil {
		return err
	}
	if offered.Ends, err = tcpid.EndsOf(h.TCP()); err != nil {
		return err
	}
	here, there := twin.Pair(twin.Config{Limits: session.Limits{Provider: f.name()}})
	me := uint32(os.Getuid())
	receive(came{Endpoint: there, provider: f.name(), user: &me}, s.session)
	return offer(ctx, here, s.session, h, offered, func(hello.Answer) error { return f.impostor })
}

// tried returns how many moves came as far as the provider.
func (f *fake) tried() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.moves
}

type fakeAcceptor struct{}

func (fakeAcceptor) Lacks() (why error, all bool) { return nil, false }
func (fakeAcceptor) Close() error                 { return nil }
