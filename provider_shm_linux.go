package san

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"time"

	"github.com/sanconn/san/internal/hello"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/tcpid"
	"github.com/sanconn/san/provider/shm"
)

// shmProvider is the provider between processes of this host.
type shmProvider struct{}

func (shmProvider) name() string { return shm.Name }

// move asks the processes that accept connections of the port, one after the other, until one
// has the other end of this one.
func (shmProvider) move(ctx context.Context, h newconn.Handle, s settings) error {
	tcp := h.TCP()
	if multipath, err := tcp.MultipathTCP(); multipath && err == nil {
		return &Unavailable{Reason: ReasonNotServed, Err: fmt.Errorf("shm: %w", tcpid.ErrMPTCP)}
	}
	ends, err := tcpid.EndsOf(tcp)
	if err != nil {
		return err
	}
	peer, err := tcpid.Peer(tcp)
	switch {
	case errors.Is(err, tcpid.ErrNotHere) && mayBeOutside(ends.Remote, s):
		return moveOutside(ctx, h, s, ends)
	case errors.Is(err, tcpid.ErrNotHere):
		return &Unavailable{Reason: ReasonNotServed, Err: fmt.Errorf("shm: %w", err)}
	case err != nil:
		return err
	case !peer.Accepted:
		return &Unavailable{Reason: ReasonNoListener, Err: hello.ErrNotAccepted}
	}
	q := search{Offer: hello.Offer{Ends: ends, PeerCookie: peer.Cookie}, at: namesHere(ends.Remote.Port()), user: peer.UID}
	if q.Cookie, err = tcpid.Cookie(tcp); err != nil {
		return err
	}
	q.confirm = func(hello.Answer) error { return nil } // the kernel has told whose process it is
	return q.run(ctx, h, s)
}

// moveOutside looks for the process in the directory, and proves by the connection's stamp, both
// ways, that it has the other end.
func moveOutside(ctx context.Context, h newconn.Handle, s settings, ends tcpid.Ends) error {
	l := h.Life().(*life)
	return l.prove(h.TCP(), func(stamp tcpid.Stamp) error {
		return search{
			Offer:   hello.Offer{Ends: ends, Stamped: true, Challenge: stamp.Challenge()},
			at:      names{s.dir, ends.Remote},
			confirm: func(a hello.Answer) error { return l.confirm(stamp, a) },
		}.run(ctx, h, s)
	})
}

// mayBeOutside reports whether an address may be one of another network namespace of this host.
func mayBeOutside(remote netip.AddrPort, s settings) bool {
	return s.dir != "" && !remote.Addr().IsLoopback()
}

// dialed implements provider.
func (shmProvider) dialed(tcp *net.TCPConn, began time.Time, l *life, s settings) {
	if mayBeOutside(tcp.RemoteAddr().(*net.TCPAddr).AddrPort(), s) {
		l.dialerStamps(tcp, began)
	}
}

// stamps reports whether there is a directory, where connections are told by their stamps.
func (shmProvider) stamps(s settings) bool { return s.dir != "" }

// listen implements provider.
func (shmProvider) listen(tcp *net.TCPListener, s settings) (acceptor, error) {
	a, err := shmNames.open(tcp.Addr().(*net.TCPAddr).AddrPort(), s)
	if err != nil {
		return nil, err
	}
	if a.there != nil {
		if err := tcpid.SaveSYN(tcp); err != nil {
			a.outside = &Unavailable{Reason: ReasonNotServed, Err: err}
		}
	}
	return a, nil
}

// hold implements provider.
func (shmProvider) hold(tcp *net.TCPConn, s settings) (io.Closer, error) {
	a, err := shmNames.open(tcp.LocalAddr().(*net.TCPAddr).AddrPort(), s)
	if err != nil {
		return nil, err
	}
	return a, nil
}
