package verbs

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"time"

	"github.com/sanconn/san/internal/reason"
	"github.com/sanconn/san/internal/undernet"
	"github.com/sanconn/san/session"
)

// followExchange listens for connections that are made without rdma_cm. Their device is looked up for
// each. So it tries again only while another process has the port, or resources are short.
func (l *Listener) followExchange() error {
	tcp, err := l.listenExchange()
	if err != nil && !reason.Is(err, session.ReasonResources) {
		return err
	}
	l.lack = err
	l.work.Go(func() {
		for ; err != nil; tcp, err = l.listenExchange() {
			select {
			case <-l.ctx.Done():
				return
			case <-time.After(retryTime):
			}
		}
		l.mu.Lock()
		l.lack = nil
		l.mu.Unlock()
		l.serveExchange(tcp)
	})
	return nil
}

// listenExchange opens the port for connections without rdma_cm.
func (l *Listener) listenExchange() (net.Listener, error) {
	side := l.cfg.iwarpPort(l.addr.Port())
	if side == 0 {
		return nil, errNoPort
	}
	network := "tcp"
	switch {
	case l.addr.Addr().Is4():
		network = "tcp4" // 0.0.0.0 would include IPv6
	case l.cfg.V6Only:
		network = "tcp6"
	}
	var config net.ListenConfig
	tcp, err := config.Listen(undernet.Plain(l.ctx), network, netip.AddrPortFrom(l.addr.Addr(), side).String())
	return tcp, callError(err)
}

// serveExchange accepts connections on that port.
func (l *Listener) serveExchange(tcp net.Listener) {
	context.AfterFunc(l.ctx, func() { tcp.Close() })
	for {
		conn, err := tcp.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			time.Sleep(acceptPause)
		default:
			l.work.Go(func() { l.admitExchange(conn) })
		}
	}
}

// acceptPause is the pause after a failed accept, most likely for lack of descriptors.
const acceptPause = 10 * time.Millisecond

// admitExchange makes a connection by an exchange over conn.
func (l *Listener) admitExchange(conn net.Conn) {
	if !l.make(func(ctx context.Context) (*Endpoint, error) { return acceptExchange(ctx, conn, l.addr.Port(), l.cfg) }) {
		refuseExchange(conn, refusedResources)
		conn.Close()
	}
}
