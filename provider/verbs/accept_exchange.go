package verbs

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
)

// acceptExchange answers a request without rdma_cm, with the steps of dialing. It owns conn; port is
// the TCP listener's.
func acceptExchange(ctx context.Context, conn net.Conn, port uint16, cfg Config) (*Endpoint, error) {
	at, request, err := locateExchange(ctx, conn, port, cfg)
	if err != nil {
		conn.Close()
		return nil, err
	}
	return at.connect(ctx, conn, cfg, true, func(e *Endpoint, own connParams) error {
		if err := at.up(e, own, request); err != nil {
			refuseExchange(conn, refusalFor(err))
			return err
		}
		_, err := conn.Write(own.bytes())
		if err == nil {
			_, err = io.ReadFull(conn, make([]byte, 1)) // the dialer's confirmation
		}
		return err
	})
}

// locateExchange takes the request, and finds the device of the address at this end, or refuses.
func locateExchange(ctx context.Context, conn net.Conn, port uint16, cfg Config) (at attachment, request connParams, err error) {
	stop := bound(ctx, conn)
	defer stop()
	if request, err = readParams(conn); err != nil {
		return at, request, err // a foreign program's, perhaps, which no answer is for
	}
	refuse := func(why refusal, err error) (attachment, connParams, error) {
		refuseExchange(conn, why)
		return at, request, err
	}
	local, remote := addrOf(conn.LocalAddr()), addrOf(conn.RemoteAddr())
	switch {
	case request.version != protocolVersion:
		return refuse(refusedVersion, request.err())
	case !cfg.allows(remote):
		return refuse(refusedSubnet, errForeignAddress)
	}
	if err := cfg.admits(local, remote, port, request.claim); err != nil {
		return refuse(refusalFor(err), err)
	}
	if at, err = attach(local, cfg); err != nil {
		return refuse(refusalFor(err), err)
	}
	if !at.isOf(request, remote) {
		at.dev.release()
		return refuse(refusedSubnet, errForeignAddress)
	}
	return at, request, nil
}

func addrOf(a net.Addr) netip.Addr { return a.(*net.TCPAddr).AddrPort().Addr().Unmap() }

var errForeignAddress = errors.New("verbs: the request is from, or names, an address that is not served")
