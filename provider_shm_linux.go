package san

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"

	"github.com/sanconn/san/internal/finding"
	"github.com/sanconn/san/internal/hello"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/tcpid"
	"github.com/sanconn/san/provider/shm"
	"github.com/sanconn/san/session"
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
	offered := hello.Offer{Ends: ends, PeerCookie: peer.Cookie}
	if offered.Cookie, err = tcpid.Cookie(tcp); err != nil {
		return err
	}
	return finding.Search{
		At:   finding.Here(ends.Remote.Port()),
		To:   ends.Remote,
		User: peer.UID,
		Offer: func(ctx context.Context, ep session.Endpoint) error {
			// The kernel has told whose process it is.
			return offer(ctx, ep, s.session, h, offered, func(hello.Answer) error { return nil })
		},
	}.Run(ctx)
}

// moveOutside looks for the process in the directory, and proves by the connection's stamp, both
// ways, that it has the other end.
func moveOutside(ctx context.Context, h newconn.Handle, s settings, ends tcpid.Ends) error {
	l := h.Life().(*life)
	return l.prove(h.TCP(), func(stamp tcpid.Stamp) error {
		return finding.Search{
			At: finding.Place{Dir: s.dir, Peer: ends.Remote},
			To: ends.Remote,
			Offer: func(ctx context.Context, ep session.Endpoint) error {
				return offerStamped(ctx, ep, s, h, ends, stamp)
			},
		}.Run(ctx)
	})
}

// mayBeOutside reports whether an address may be one of another network namespace of this host.
func mayBeOutside(remote netip.AddrPort, s settings) bool {
	return s.dir != "" && !remote.Addr().IsLoopback()
}

// needsStamp implements provider.
func (shmProvider) needsStamp(tcp *net.TCPConn, s settings) bool {
	return mayBeOutside(tcp.RemoteAddr().(*net.TCPAddr).AddrPort(), s)
}

// stamps reports whether there is a directory, where connections are told by their stamps.
func (shmProvider) stamps(s settings) bool { return s.dir != "" }

// listen implements provider.
func (shmProvider) listen(tcp *net.TCPListener, s settings) (acceptor, error) {
	at := tcp.Addr().(*net.TCPAddr).AddrPort()
	n, err := openNames(at, s)
	if err != nil {
		return nil, err
	}
	if mayBeOutside(at, s) {
		if err := tcpid.SaveSYN(tcp); err != nil {
			n.Outside = &Unavailable{Reason: ReasonNotServed, Err: err}
		}
	}
	return n, nil
}

// hold implements provider.
func (shmProvider) hold(tcp *net.TCPConn, s settings) (io.Closer, error) {
	n, err := openNames(tcp.LocalAddr().(*net.TCPAddr).AddrPort(), s)
	if err != nil {
		return nil, err
	}
	return n, nil
}

func openNames(at netip.AddrPort, s settings) (*finding.Names, error) {
	dir := ""
	if mayBeOutside(at, s) {
		dir = s.dir
	}
	return finding.Open(at.Port(), dir, s.session, func(ep finding.Taken, cfg session.Config) {
		c := came{Endpoint: ep.Endpoint, provider: shm.Name, outside: ep.Outside}
		if !ep.Outside {
			c.user = &ep.User
		}
		receive(c, cfg)
	})
}
