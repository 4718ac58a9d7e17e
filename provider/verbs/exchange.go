package verbs

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/internal/undernet"
	"github.com/sanconn/san/session"
)

// Connecting without rdma_cm (Config.WithoutCM), for containers and virtual functions where rdma_cm
// does not work though verbs do. The two ends exchange the numbers and addresses of their queue pairs
// over a TCP connection to the port that iWARP would have. Afterwards that TCP connection is idle; its
// end is the end of the connection. It works on InfiniBand and RoCE.

// connParams is the request and the reply of the exchange: paramsLen bytes, little endian. The dialer
// sends one more byte when it is ready to send.
type connParams struct {
	privateData
	Peer   ibv.QPPeer
	MTU    uint8 // enum ibv_mtu
	Served uint8 // RDMA reads that this end serves at a time
}

const paramsLen = 40

func (c connParams) bytes() []byte {
	c.Magic = privateMagic
	b, _ := binary.Append(nil, binary.LittleEndian, c) // it cannot fail
	return b
}

func readParams(r io.Reader) (c connParams, err error) {
	b := make([]byte, paramsLen)
	if _, err := io.ReadFull(r, b); errors.Is(err, syscall.ECONNRESET) {
		return c, callError(err)
	} else if err != nil {
		return c, unavailable(session.ReasonProtocol, fmt.Errorf("verbs: no answer that was understood: %w", errWithoutErrno{err}))
	}
	if _, err := binary.Decode(b, binary.LittleEndian, &c); err != nil || c.Magic != privateMagic {
		return c, unavailable(session.ReasonProtocol, errors.New("verbs: a foreign program answered"))
	}
	c.Peer.PSN &= psnMask
	return c, nil
}

const psnMask = 1<<24 - 1

// exchangeDevice opens a device for connections without rdma_cm.
func exchangeDevice(name string) (*device, error) {
	dev, err := openDevice(name)
	if err != nil {
		return nil, callError(err)
	}
	if dev.iwarp() {
		dev.release()
		return nil, unavailable(session.ReasonNotServed, fmt.Errorf("verbs: %s is an iWARP device, which connects by rdma_cm alone", name))
	}
	return dev, nil
}

// exchangeServes returns nil if one of these addresses belongs, or may belong, to a device for
// connections without rdma_cm, and otherwise the reason why none does.
func exchangeServes(addrs []netip.Addr) error {
	if bareDevice() != "" || cannotLook() != nil {
		return nil // the listener serves the other addresses, or this one may be served
	}
	none := errNoneServed
	for _, a := range addrs {
		netdev, err := interfaceOf(a)
		if err != nil {
			return nil
		}
		name := DeviceOf(netdev)
		if name == "" {
			continue
		}
		dev, err := exchangeDevice(name)
		if err == nil {
			dev.release()
			return nil
		}
		var why *session.Unavailable
		if !errors.As(err, &why) || why.Reason != session.ReasonNotServed {
			return nil
		}
		none = err
	}
	return none
}

// connect makes an endpoint, which owns the device and conn, by an exchange over conn. If the passive
// end fails, it sends a refusal. After its reply any byte, and so a refusal, ends the connection.
func (a attachment) connect(ctx context.Context, conn net.Conn, cfg Config, passive bool, exchange func(e *Endpoint, own connParams) error) (*Endpoint, error) {
	stop := bound(ctx, conn)
	defer stop()
	e, err := newEndpoint(a.dev, nil, addrOf(conn.RemoteAddr()), cfg, passive, func(q *ibv.QP) error {
		return q.Init(ibv.QPPath{Port: uint8(a.port.Num), PKeyIndex: a.pkeyIndex}, ibv.RemoteRead|ibv.RemoteWrite)
	})
	if err == nil {
		e.tcp = conn
		err = exchange(e, connParams{
			privateData: privateData{Version: protocolVersion, Claim: cfg.Claim},
			Peer:        ibv.QPPeer{QPNum: e.q.qp.Num, PSN: rand.Uint32() & psnMask, GID: a.gids[0].GID, LID: a.port.LID},
			MTU:         uint8(a.mtu()),
			Served:      a.dev.readsServed(),
		})
	}
	if !stop() {
		err = ctx.Err() // whatever the result: the deadline is set
	}
	if err == nil {
		e.watch.Go(func() {
			conn.Read(make([]byte, 1))
			e.q.hangUp(fmt.Errorf("verbs: the peer has gone: %w", syscall.ECONNRESET), func() {})
		})
		return e, nil
	}
	if passive {
		refuseExchange(conn, refusalFor(err))
	}
	if e != nil {
		e.abortUnused()
	}
	conn.Close()
	return nil, callError(err)
}

// refuseExchange sends a reject.
func refuseExchange(conn net.Conn, why refusal) {
	conn.Write(connParams{privateData: privateData{Version: protocolVersion, Refusal: why}}.bytes())
}

// isOf reports whether the address in the parameters is that of the host that has sent them, which was
// checked against Subnets. InfiniBand has addresses of its own.
func (a attachment) isOf(c connParams, host netip.Addr) bool {
	return a.port.LinkLayer == ibv.LinkInfiniBand || c.Peer.GID.Addr() == host.Unmap().WithZone("")
}

// up connects the queue pair to the peer's.
func (a attachment) up(e *Endpoint, own, peer connParams) error {
	if peer.MTU == 0 { // not every driver checks it
		return unavailable(session.ReasonProtocol, errors.New("verbs: the peer names no MTU"))
	}
	path := ibv.QPPath{
		Port: uint8(a.port.Num), PSN: own.Peer.PSN,
		MTU:         ibv.MTU(min(own.MTU, peer.MTU)),
		ReadsIssued: min(peer.Served, a.dev.readsIssued()), ReadsServed: own.Served,
		MinRNRTimer: rnrTimer, Timeout: e.cfg.AckTimeout, RetryCount: a.dev.retries(), RNRRetry: rnrRetry,
		TrafficClass: e.cfg.TrafficClass, SL: e.cfg.ServiceLevel,
		PeerIsOnSubnet: a.isOnSubnet(peer.Peer.GID),
	}
	if err := a.inTurn(func(g ibv.GIDEntry) error {
		path.GIDIndex = uint8(g.Index)
		return e.q.qp.ReadyToReceive(path, peer.Peer)
	}); err != nil {
		return err
	}
	return callError(e.q.qp.ReadyToSend(path))
}

var errNoPort = unavailable(session.ReasonNotServed, errors.New("verbs: no port to connect by without rdma_cm: IWARPOffset is negative"))

// bound makes reads and writes of conn fail when ctx ends, until stop is called. stop returns false if
// ctx has ended.
func bound(ctx context.Context, conn net.Conn) (stop func() bool) {
	conn.SetDeadline(time.Time{})
	return context.AfterFunc(ctx, func() { conn.SetDeadline(time.Now()) })
}

// dialExchange connects without rdma_cm: over TCP, whose local address determines the device.
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
		case peer.Refusal != 0 || peer.Version != protocolVersion:
			return peer.err()
		case !at.isOf(peer, remote.Addr()):
			return unavailable(session.ReasonProtocol, fmt.Errorf("verbs: %v names %v as its RDMA address", remote, peer.Peer.GID.Addr()))
		}
		if err := at.up(e, own, peer); err != nil {
			return err
		}
		_, err = conn.Write([]byte{1}) // this end is ready to send
		return callError(err)
	})
}

// acceptExchange answers a request without rdma_cm, with the steps of dialing. It owns conn; port is
// the TCP listener's.
func acceptExchange(ctx context.Context, conn net.Conn, port uint16, cfg Config) (*Endpoint, error) {
	stop := bound(ctx, conn)
	request, err := readParams(conn)
	stop()
	if err != nil { // perhaps a foreign program, which gets no answer
		conn.Close()
		return nil, err
	}
	at, err := locateExchange(conn, request, port, cfg)
	if err != nil {
		refuseExchange(conn, refusalFor(err))
		conn.Close()
		return nil, err
	}
	return at.connect(ctx, conn, cfg, true, func(e *Endpoint, own connParams) error {
		if err := at.up(e, own, request); err != nil {
			return err
		}
		_, err := conn.Write(own.bytes())
		if err == nil {
			_, err = io.ReadFull(conn, make([]byte, 1)) // the dialer's confirmation
		}
		return err
	})
}

// locateExchange finds the device of conn's local address, unless the request is to be refused.
func locateExchange(conn net.Conn, request connParams, port uint16, cfg Config) (at attachment, err error) {
	local, remote := addrOf(conn.LocalAddr()), addrOf(conn.RemoteAddr())
	if err = cfg.admits(request.privateData, local, remote, port); err != nil {
		return at, err
	}
	if at, err = attach(local, cfg); err == nil && !at.isOf(request, remote) {
		at.dev.release()
		err = errForeignAddress
	}
	return at, err
}

func addrOf(a net.Addr) netip.Addr { return a.(*net.TCPAddr).AddrPort().Addr().Unmap() }
