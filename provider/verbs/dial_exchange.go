package verbs

import (
	"context"
	"fmt"
	"net"
	"net/netip"

	"github.com/sanconn/san/internal/undernet"
	"github.com/sanconn/san/session"
)

// exchangeDialing is an attempt to connect without rdma_cm, with the steps of dialing.
type exchangeDialing struct {
	cfg    Config
	local  netip.Addr
	remote netip.AddrPort

	conn net.Conn
	at   attachment
	e    *Endpoint // owns both
	own  connParams
}

func (d *exchangeDialing) connect(ctx context.Context) (*Endpoint, error) {
	if err := d.locate(ctx); err != nil {
		if d.conn != nil {
			d.conn.Close()
		}
		return nil, err
	}
	stop := bound(ctx, d.conn)
	defer stop()
	if err := d.create(); err != nil {
		return nil, err
	}
	err := d.exchange()
	if !stop() {
		err = ctx.Err() // whatever came of it: the deadline is set
	}
	if err != nil {
		d.e.abandon()
		return nil, err
	}
	d.e.tcp.follow(d.e)
	return d.e, nil
}

// locate connects by TCP, which finds the device by the address at this end.
func (d *exchangeDialing) locate(ctx context.Context) (err error) {
	side := d.cfg.iwarpPort(d.remote.Port())
	if side == 0 {
		return errNoPort
	}
	var dialer net.Dialer
	if d.local.IsValid() {
		dialer.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(d.local, 0))
	}
	if d.conn, err = dialer.DialContext(undernet.Plain(ctx), "tcp", netip.AddrPortFrom(d.remote.Addr(), side).String()); err != nil {
		return callError(err)
	}
	d.at, err = attach(addrOf(d.conn.LocalAddr()), d.cfg)
	return err
}

// create makes the endpoint with its queue pair.
func (d *exchangeDialing) create() (err error) {
	d.e, d.own, err = d.at.endpoint(d.cfg, d.conn, false)
	return err
}

// exchange sends the request, connects the queue pair by the reply, and confirms.
func (d *exchangeDialing) exchange() error {
	if _, err := d.conn.Write(d.own.bytes()); err != nil {
		return callError(err)
	}
	peer, err := readParams(d.conn)
	switch {
	case err != nil:
		return err
	case peer.refusal != 0 || peer.version != protocolVersion:
		return peer.err()
	case !d.at.isOf(peer, d.remote.Addr()):
		return unavailable(session.ReasonProtocol, fmt.Errorf("verbs: %v names %v as its RDMA address", d.remote, peer.peer.GID.Addr()))
	}
	if err := d.at.up(d.e, d.own, peer); err != nil {
		return err
	}
	_, err = d.conn.Write([]byte{1})
	return callError(err)
}
