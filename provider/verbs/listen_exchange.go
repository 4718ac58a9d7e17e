package verbs

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"time"

	"github.com/sanconn/san/internal/backlog"
	"github.com/sanconn/san/internal/undernet"
)

// maxPending is how many accepted TCP connections may still owe their request; more wait
// until one of these has sent it or has timed out.
const maxPending = 256

// followExchange listens for connections that are made without rdma_cm. The device is looked
// up for each, so there is nothing to follow but the end of another process that has the port.
func (l *Listener) followExchange() error {
	tcp, err := l.listenExchange()
	if err == nil {
		l.serveExchange(tcp)
		return nil
	}
	if !l.mayTakeOver(err) {
		return err
	}
	l.taken = err
	l.work.Go(func() {
		for err != nil {
			select {
			case <-l.ctx.Done():
				return
			case <-time.After(turnTime):
			}
			tcp, err = l.listenExchange()
		}
		l.mu.Lock()
		l.taken = nil
		l.mu.Unlock()
		l.serveExchange(tcp)
	})
	return nil
}

// listenExchange opens the port that connections without rdma_cm are made at.
func (l *Listener) listenExchange() (*net.TCPListener, error) {
	side := l.cfg.iwarpPort(l.addr.Port())
	if side == 0 {
		return nil, errNoPort
	}
	network := "tcp"
	switch {
	case l.addr.Addr().Is4():
		network = "tcp4" // 0.0.0.0 would take IPv6 as well
	case l.cfg.V6Only:
		network = "tcp6"
	}
	var config net.ListenConfig
	tcp, err := config.Listen(undernet.Plain(l.ctx), network, netip.AddrPortFrom(l.addr.Addr(), side).String())
	if err != nil {
		return nil, callError(err)
	}
	return tcp.(*net.TCPListener), nil
}

// serveExchange accepts the connections that are made there.
func (l *Listener) serveExchange(tcp *net.TCPListener) {
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
			from := dialerOf(conn).Addr().String()
			p, _ := pending.Begin(l.ctx, from, acceptTime)
			for p == nil {
				time.Sleep(acceptPause)
				p, _ = pending.Begin(l.ctx, from, acceptTime)
			}
			l.work.Go(func() { l.admitExchange(conn, p) })
		}
	})
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
	remote := dialerOf(conn)
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
	p, err := l.backlog.Begin(l.ctx, remote.Addr().String(), acceptTime)
	if err != nil {
		refuse(refusalFor(err))
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

// dialerOf is the dialer's address.
func dialerOf(conn net.Conn) netip.AddrPort {
	remote := conn.RemoteAddr().(*net.TCPAddr).AddrPort()
	return netip.AddrPortFrom(remote.Addr().Unmap(), remote.Port())
}
