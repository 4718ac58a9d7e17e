package san

import (
	"context"
	"io"
	"net"
	"os"
	"sync"
	"testing"

	"github.com/sanconn/san/internal/environment"
	"github.com/sanconn/san/internal/hello"
	"github.com/sanconn/san/internal/moving"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/tcpid"
	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

// fakeName is the name of the tests' provider, which needs no kernel support and behaves as a test sets
// it.
const fakeName = "fake"

// fake is a provider over in-memory endpoints. It finds acceptors of this process only.
type fake struct {
	// fail, if not nil, is called before a move. If it returns an error, the move fails with that.
	fail func(ctx context.Context) error
	// refuse, if not nil, is the error for which listeners do without this provider.
	refuse error
	called string // its name; "": fakeName
	// impostor, if not nil, is the error with which the check fails that answers come from the
	// connection's other end.
	impostor error

	mu    sync.Mutex // guards what follows
	moves int        // how many were tried
}

// useFake makes f the only provider of the process for the rest of the test.
func useFake(t *testing.T) *fake {
	t.Helper()
	f := new(fake)
	useProviders(t, f)
	return f
}

// useProviders replaces the providers of the process for the rest of the test.
func useProviders(t *testing.T, providers ...moving.Provider) {
	t.Helper()
	registry, read := moving.Registry, processEnvironment
	env := *read()
	moving.Registry = providers
	env.Providers = moving.Names()
	processEnvironment = func() *environment.Values { return &env }
	t.Cleanup(func() { moving.Registry, processEnvironment = registry, read })
}

// byShm is the provider of shared memory.
var byShm = moving.Registry[0]

// watched is a provider that calls a function of the test for each attempt to move.
type watched struct {
	moving.Provider
	around func(move func() error) error
}

func (w watched) Move(ctx context.Context, h newconn.Handle, s moving.Settings) error {
	return w.around(func() error { return w.Provider.Move(ctx, h, s) })
}

// onlyShm makes shared memory the only provider, also in the guest.
func onlyShm(t *testing.T) { useProviders(t, byShm) }

func (f *fake) Name() string {
	if f.called != "" {
		return f.called
	}
	return fakeName
}

func (f *fake) NeedsStamp(*net.TCPConn, moving.Settings) bool { return false }

func (f *fake) Listen(*net.TCPListener, moving.Settings) (moving.Acceptor, error) {
	if f.refuse != nil {
		return nil, f.refuse
	}
	return fakeAcceptor{}, nil
}

func (f *fake) Hold(*net.TCPConn, moving.Settings) (io.Closer, error) { return fakeAcceptor{}, nil }

func (f *fake) Stamps(moving.Settings) bool { return false }

func (f *fake) Move(ctx context.Context, h newconn.Handle, s moving.Settings) error {
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
	offered := hello.Proposal{PeerCookie: peer.Cookie}
	if offered.Cookie, err = tcpid.Cookie(h.TCP()); err != nil {
		return err
	}
	if offered.Ends, err = tcpid.EndsOf(h.TCP()); err != nil {
		return err
	}
	here, there := twin.Pair(twin.Config{Limits: session.Limits{Provider: f.Name()}})
	me := uint32(os.Getuid())
	moving.Receive(moving.Came{Endpoint: there, Provider: f.Name(), User: &me}, s.Session)
	return moving.Propose(ctx, here, s.Session, h, offered, func(hello.Answer) error { return f.impostor })
}

// tried returns how many moves have reached the provider.
func (f *fake) tried() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.moves
}

type fakeAcceptor struct{}

func (fakeAcceptor) Lacks() (why error, all bool) { return nil, false }
func (fakeAcceptor) Close() error                 { return nil }
