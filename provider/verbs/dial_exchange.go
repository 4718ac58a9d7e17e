package verbs

import (
	"context"
	"fmt"
	"net"
	"net/netip"

	"github.com/sanconn/san/internal/undernet"
	"github.com/sanconn/san/session"
)

// dialExchange connects without rdma_cm: by TCP, which finds the device by the address at this end.
func dialExchange(ctx context.Context, local netip.Addr, remote netip.AddrPort, cfg Config) (*Endpoint, error) {
	side := cfg.iwarpPort(remote.Port())
	if side == 0 {
		return nil, errNoPort
	}
	var dialer net.Dialer
	if local.IsValid() {
		dialer.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(local, 0))
	}
	conn, err := dialer.DialContext(undernet.Plain(ctx), "tcp", netip.AddrPortFrom(remote.Addr(), side).String())
	if err != nil {
		return nil, callError(err)
	}
	at, err := attach(addrOf(conn.LocalAddr()), cfg)
	if err != nil {
		conn.Close()
		return nil, err
	}
	return at.connect(ctx, conn, cfg, false, func(e *Endpoint, own connParams) error {
		if _, err := conn.Write(own.bytes()); err != nil {
			return callError(err)
		}
		peer, err := readParams(conn)
		switch {
		case err != nil:
			return err
		case peer.refusal != 0 || peer.version != protocolVersion:
			return peer.err()
		case !at.isOf(peer, remote.Addr()):
			return unavailable(session.ReasonProtocol, fmt.Errorf("verbs: %v names %v as its RDMA address", remote, peer.peer.GID.Addr()))
		}
		if err := at.up(e, own, peer); err != nil {
			return err
		}
		_, err = conn.Write([]byte{1}) // this end is ready to send
		return callError(err)
	})
}
