package san

import (
	"context"
	"fmt"
	"net"
	"net/netip"

	"github.com/sanconn/san/provider/shm"
	"github.com/sanconn/san/session"
)

// shmProvider is the provider between processes of this host.
type shmProvider struct{}

func (shmProvider) name() string { return shm.Name }

func (p shmProvider) serves(dst netip.Addr, s settings) error { return shm.ServedBy(dst, p.config(s)) }

func (shmProvider) config(s settings) shm.Config {
	return shm.Config{
		Backlog: s.backlog,
		Timeout: s.attempt,
		Local:   s.local,
	}
}

func (p shmProvider) listen(tcp *net.TCPListener, s settings) (acceptor, error) {
	cfg := p.config(s)
	cfg.V6Only = s.v6only
	cfg.TakeOver = s.takeOver
	l, err := shm.Listen(tcp, cfg)
	if err != nil {
		return nil, err
	}
	return shmListener{l}, nil
}

// dial gives the endpoint a bound TCP socket to keep, which makes the dialer's address
// true and unique. The session begins before the connect is sent, so that its first message
// is there when the listener gets that.
func (p shmProvider) dial(ctx context.Context, r request) (transport, error) {
	socket, err := bind(ctx, r)
	if err != nil {
		return transport{}, err
	}
	remote := net.TCPAddrFromAddrPort(r.remote)
	var begun *session.Session
	cfg := p.config(r.settings)
	cfg.Begin = func(ep session.Endpoint) (end func()) {
		begun = session.New(ep, r.session)
		return begun.Abort
	}
	ep, err := shm.Dial(ctx, socket.fd, remote, cfg)
	if err != nil {
		socket.abandon()
		return transport{}, err
	}
	return transport{endpoint: ep, session: begun, local: socket.local, remote: remote}, nil
}

type shmListener struct{ *shm.Listener }

func (l shmListener) accept() (transport, error) {
	ep, local, remote, err := l.Accept()
	if err != nil {
		return transport{}, err
	}
	return acceptedFrom(ep, local, remote), nil
}

// serve implements direct.
func (l shmListener) serve(take func(transport)) {
	l.Serve(func(ep session.Endpoint, local, remote *net.TCPAddr) { take(acceptedFrom(ep, local, remote)) })
}

func acceptedFrom(ep session.Endpoint, local, remote *net.TCPAddr) transport {
	user := fmt.Sprintf("user %d", shm.PeerUser(ep))
	return transport{endpoint: ep, local: local, remote: remote, user: user}
}
