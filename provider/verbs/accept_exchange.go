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
	cfg     Config
	port    uint16 // of the TCP listener
	conn    net.Conn
	request connParams

	at  attachment
	e   *Endpoint // owns both
	own connParams
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
	a.e.tcp.follow(a.e)
	return a.e, nil
}

// locate takes the request, and finds the device of the address at this end, or refuses.
func (a *exchangeAccepting) locate() (err error) {
	if a.request, err = readParams(a.conn); err != nil {
		return err // a foreign program's, perhaps, which no answer is for
	}
	refuse := func(why refusal, err error) error {
		refuseExchange(a.conn, why)
		return err
	}
	local, remote := addrOf(a.conn.LocalAddr()), addrOf(a.conn.RemoteAddr())
	switch {
	case a.request.version != protocolVersion:
		return refuse(refusedVersion, a.request.err())
	case !a.cfg.allows(remote):
		return refuse(refusedSubnet, errForeignAddress)
	}
	if err := a.cfg.admits(local, remote, a.port, a.request.claim); err != nil {
		return refuse(refusalFor(err), err)
	}
	if a.at, err = attach(local, a.cfg); err != nil {
		return refuse(refusalFor(err), err)
	}
	if !a.at.isOf(a.request, remote) {
		a.at.dev.release()
		return refuse(refusedSubnet, errForeignAddress)
	}
	return nil
}

func addrOf(a net.Addr) netip.Addr { return a.(*net.TCPAddr).AddrPort().Addr().Unmap() }

var errForeignAddress = errors.New("verbs: the request is from, or names, an address that is not served")

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
