package verbs

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"time"

	"github.com/sanconn/san/internal/backlog"
)

// maxPending is how many accepted TCP connections may still owe their request; more wait
// until one of these has sent it or has timed out.
const maxPending = 256

// serveExchange accepts the connections that are made without rdma_cm.
func (l *Listener) serveExchange() error {
	side := l.cfg.iwarpPort(l.addr.Port())
	if side == 0 {
		return errNoPort
	}
	network := "tcp"
	switch {
	case l.addr.Addr().Is4():
		network = "tcp4" // 0.0.0.0 would take IPv6 as well
	case l.cfg.V6Only:
		network = "tcp6"
	}
	tcp, err := net.ListenTCP(network, net.TCPAddrFromAddrPort(netip.AddrPortFrom(l.addr.Addr(), side)))
	if err != nil {
		return callError(err)
	}
	context.AfterFunc(l.ctx, func() { tcp.Close() })
	pending := backlog.New(maxPending)
	l.work.Go(func() {
		for {
			conn, err := tcp.Accept()
			switch {
			case errors.Is(err, net.ErrClosed):
				return
			case err != nil:
				time.Sleep(acceptPause) // for want of descriptors, say
				continue
			}
			p, _ := pending.Begin(l.ctx, acceptTime)
			for p == nil {
				time.Sleep(acceptPause)
				p, _ = pending.Begin(l.ctx, acceptTime)
			}
			l.work.Go(func() { l.admitExchange(conn, p) })
		}
	})
	return nil
}

// acceptPause is the time between attempts to accept while there is no room.
const acceptPause = time.Millisecond

// admitExchange makes a connection of a request. pending ends when it has come.
func (l *Listener) admitExchange(conn net.Conn, pending *backlog.Place) {
	refuse := func(why refusal) {
		refuseExchange(conn, why)
		conn.Close()
	}
	stop := bound(pending.Context(), conn)
	request, err := readParams(conn)
	late := !stop()
	pending.End(false)
	remote := conn.RemoteAddr().(*net.TCPAddr).AddrPort()
	remote = netip.AddrPortFrom(remote.Addr().Unmap(), remote.Port())
	switch {
	case err != nil || late:
		conn.Close()
		return
	case request.version != protocolVersion:
		refuse(refusedVersion)
		return
	case !l.cfg.allows(remote.Addr()):
		refuse(refusedSubnet)
		return
	}
	p, _ := l.backlog.Begin(l.ctx, acceptTime)
	if p == nil {
		refuse(refusedBacklog)
		return
	}
	local := conn.LocalAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
	a := exchangeAccepting{
		cfg: l.cfg, local: netip.AddrPortFrom(local, l.addr.Port()), remote: remote,
		request: request, conn: conn,
	}
	e, err := a.connect(p.Context())
	l.made(p, e, err)
}

// exchangeAccepting is the answer to a request without rdma_cm, with the steps of dialing.
type exchangeAccepting struct {
	cfg           Config
	local, remote netip.AddrPort
	request       connParams

	conn net.Conn
	at   attachment
	e    *Endpoint // owns both
	own  connParams
}

func (a *exchangeAccepting) connect(ctx context.Context) (*Endpoint, error) {
	stop := bound(ctx, a.conn)
	defer stop()
	if err := a.locate(); err != nil {
		a.conn.Close()
		return nil, err
	}
	if err := a.create(); err != nil {
		return nil, err
	}
	err := a.exchange()
	if !stop() {
		err = ctx.Err() // whatever came of it: the deadline is set
	}
	if err != nil {
		a.e.abandon()
		return nil, err
	}
	a.finish()
	return a.e, nil
}

// locate finds the device of the address at this end, or refuses.
func (a *exchangeAccepting) locate() (err error) {
	if a.at, err = attach(a.local.Addr()); err != nil {
		refuseExchange(a.conn, refusalFor(err))
		return err
	}
	if !a.at.isOf(a.request, a.remote.Addr()) {
		a.at.dev.release()
		refuseExchange(a.conn, refusedSubnet)
		return errForeignAddress
	}
	return nil
}

var errForeignAddress = errors.New("verbs: the request names another host's address")

// create makes the endpoint with its queue pair, or refuses.
func (a *exchangeAccepting) create() (err error) {
	a.e, a.own, err = a.at.endpoint(a.cfg, a.conn, true)
	return err
}

// exchange connects the queue pair, replies, and waits for the dialer's confirmation.
func (a *exchangeAccepting) exchange() error {
	if err := a.at.up(a.e, a.own, a.request); err != nil {
		refuseExchange(a.conn, refusalFor(err))
		return err
	}
	_, err := a.conn.Write(a.own.bytes())
	if err == nil {
		_, err = io.ReadFull(a.conn, make([]byte, 1))
	}
	return err
}

// finish makes the connection fit to be handed out.
func (a *exchangeAccepting) finish() {
	a.e.localAddr, a.e.remoteAddr = a.local, a.remote
	a.e.tcp.follow(a.e)
}
