package moving

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
	"github.com/sanconn/san/internal/reason"
	"github.com/sanconn/san/internal/tcpid"
	"github.com/sanconn/san/provider/shm"
	"github.com/sanconn/san/session"
)

// shmProvider is the provider between processes of this host.
type shmProvider struct{}

func (shmProvider) Name() string { return shm.Name }

// Move proposes the move to the processes that accept connections on the port, one after the other,
// until it has found the one with the connection's other end.
func (shmProvider) Move(ctx context.Context, h newconn.Handle, s Settings) error {
	tcp := h.TCP()
	if tcpid.IsMPTCP(tcp) {
		return &session.Unavailable{Reason: session.ReasonNotServed, Err: fmt.Errorf("shm: %w", tcpid.ErrMPTCP)}
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
		return &session.Unavailable{Reason: session.ReasonNotServed, Err: fmt.Errorf("shm: %w", err)}
	case err != nil:
		return err
	case !peer.Accepted:
		return &session.Unavailable{Reason: session.ReasonNoListener, Err: hello.ErrNotAccepted}
	}
	proposed := hello.Proposal{Ends: ends, PeerCookie: peer.Cookie}
	if proposed.Cookie, err = tcpid.Cookie(tcp); err != nil {
		return err
	}
	err = finding.Search{
		At:   finding.Here(tcpid.Namespace(tcp), ends.Remote.Port()),
		To:   ends.Remote,
		User: peer.UID,
		Propose: func(ctx context.Context, ep session.Endpoint) error {
			// The kernel has told the process's user, so the answer needs no proof.
			return Propose(ctx, ep, s.Session, h, proposed, func(hello.Answer) error { return nil })
		},
	}.Run(ctx)
	if reason.Is(err, session.ReasonNoListener) { // searched in this thread's network namespace, which may be the wrong one
		if elsewhere := tcpid.CheckThread(tcp); errors.Is(elsewhere, tcpid.ErrNotHere) {
			err = &session.Unavailable{Reason: session.ReasonNotServed, Err: fmt.Errorf("shm: %w", elsewhere)}
		}
	}
	return err
}

// moveOutside looks for the process in the directory. Both ends prove by the connection's stamp that
// they hold the connection.
func moveOutside(ctx context.Context, h newconn.Handle, s Settings, ends tcpid.Ends) error {
	return lifeOf(h).prove(h.TCP(), func(stamp tcpid.Stamp) error {
		return finding.Search{
			At: finding.Place{Dir: s.Dir, Peer: ends.Remote},
			To: ends.Remote,
			Propose: func(ctx context.Context, ep session.Endpoint) error {
				return proposeStamped(ctx, ep, s, h, ends, stamp)
			},
		}.Run(ctx)
	})
}

// mayBeOutside reports whether an address may be in another network namespace of this host.
func mayBeOutside(remote netip.AddrPort, s Settings) bool {
	return s.Dir != "" && !remote.Addr().IsLoopback()
}

func (shmProvider) NeedsStamp(tcp *net.TCPConn, s Settings) bool {
	return mayBeOutside(tcp.RemoteAddr().(*net.TCPAddr).AddrPort(), s)
}

// Stamps reports whether there is a directory, as connections through it are proved by stamps.
func (shmProvider) Stamps(s Settings) bool { return s.Dir != "" }

func (shmProvider) Listen(tcp *net.TCPListener, s Settings) (Acceptor, error) {
	at := tcp.Addr().(*net.TCPAddr).AddrPort()
	n, err := openNames(at, s)
	if err != nil {
		return nil, err
	}
	if mayBeOutside(at, s) {
		if err := tcpid.SaveSYN(tcp); err != nil {
			n.Outside = &session.Unavailable{Reason: session.ReasonNotServed, Err: err}
		}
	}
	return n, nil
}

func (shmProvider) Hold(tcp *net.TCPConn, s Settings) (io.Closer, error) {
	n, err := openNames(tcp.LocalAddr().(*net.TCPAddr).AddrPort(), s)
	if err != nil {
		return nil, err
	}
	return n, nil
}

func openNames(at netip.AddrPort, s Settings) (*finding.Names, error) {
	dir := ""
	if mayBeOutside(at, s) {
		dir = s.Dir
	}
	return finding.Open(finding.Here(s.Namespace, at.Port()), dir, s.Session, func(ep session.Endpoint, outside bool, cfg session.Config) {
		c := Came{Endpoint: ep, Provider: shm.Name, outside: outside}
		if !outside {
			user := shm.PeerUser(ep)
			c.User = &user
		}
		Receive(c, cfg)
	})
}
