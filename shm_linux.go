package san

import (
	"context"
	"net"
	"net/netip"

	"github.com/sanconn/san/provider/shm"
)

// sharedMemory is the provider between processes of this host.
type sharedMemory struct{}

func (sharedMemory) name() string { return shm.Name }

func (p sharedMemory) serves(dst netip.Addr, s settings) bool { return p.notServed(dst, s) == nil }

func (p sharedMemory) notServed(dst netip.Addr, s settings) error {
	return shm.ServedBy(dst, p.config(s))
}

func (sharedMemory) config(s settings) shm.Config {
	return shm.Config{
		Backlog: s.backlog,
		Timeout: s.attempt,
		Local:   s.local,
	}
}

func (p sharedMemory) listen(tcp *net.TCPListener, s settings) (acceptor, error) {
	cfg := p.config(s)
	cfg.V6Only = s.v6only
	l, err := shm.Listen(tcp, cfg)
	if err != nil {
		return nil, err
	}
	return sharedMemoryListener{l}, nil
}

// dial gives the endpoint a bound TCP socket to keep, which makes the dialer's address
// true and unique.
func (p sharedMemory) dial(ctx context.Context, r request) (link, error) {
	socket, err := bind(ctx, r)
	if err != nil {
		return link{}, err
	}
	remote := net.TCPAddrFromAddrPort(r.remote)
	ep, err := shm.Dial(ctx, socket.fd, remote, p.config(r.settings))
	if err != nil {
		socket.Close()
		return link{}, err
	}
	return link{endpoint: ep, local: socket.local, remote: remote}, nil
}

type sharedMemoryListener struct{ *shm.Listener }

func (l sharedMemoryListener) accept() (link, error) {
	ep, local, remote, err := l.Accept()
	return link{endpoint: ep, local: local, remote: remote}, err
}
