package verbs

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
)

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
	if a.at, err = attach(a.local.Addr(), a.cfg); err != nil {
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
