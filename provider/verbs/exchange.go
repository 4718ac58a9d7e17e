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
	"sync"
	"syscall"
	"time"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/internal/backlog"
	"github.com/sanconn/san/session"
)

// Connecting without rdma_cm (Config.WithoutCM), for containers and virtual
// functions where it does not work though verbs do: the two ends tell each other
// their queue pair's number and address over a TCP connection, to the port that
// iWARP would have. That connection stays, says nothing more, and its end is the
// connection's end. InfiniBand and RoCE only.
type exchanged struct {
	conn  net.Conn
	watch sync.WaitGroup
}

// close ends the connection and waits for its watcher.
func (x *exchanged) close() {
	x.conn.Close()
	x.watch.Wait()
}

// follow ends e when the peer's TCP connection ends.
func (x *exchanged) follow(e *Endpoint) {
	x.conn.SetDeadline(time.Time{})
	x.watch.Go(func() {
		var b [1]byte
		x.conn.Read(b[:])
		e.broken(fmt.Errorf("verbs: the peer has gone: %w", syscall.ECONNRESET))
	})
}

// card is what the ends tell each other, cardLen bytes, little endian:
//
//	 0  hello    8 bytes: magic, version, refusal
//	 8  qp       u32
//	12  psn      u32  of the first packet
//	16  gid      16 bytes
//	32  lid      u16  InfiniBand
//	34  mtu      u8   enum ibv_mtu
//	35  served   u8   RDMA reads that this end serves at a time
//	36  zero     4 bytes
//
// The dialer adds one byte when it is ready to send.
type card struct {
	hello
	peer   ibv.QPPeer
	mtu    ibv.MTU
	served uint8
}

const cardLen = 40

func (c card) bytes() []byte {
	b := make([]byte, cardLen)
	copy(b, c.hello.bytes()[:8])
	binary.LittleEndian.PutUint32(b[8:], c.peer.QPNum)
	binary.LittleEndian.PutUint32(b[12:], c.peer.PSN)
	copy(b[16:], c.peer.GID[:])
	binary.LittleEndian.PutUint16(b[32:], c.peer.LID)
	b[34], b[35] = byte(c.mtu), c.served
	return b
}

func readCard(r io.Reader) (c card, err error) {
	b := make([]byte, cardLen)
	if _, err := io.ReadFull(r, b); err != nil {
		return c, unavailable(session.ReasonProtocol, fmt.Errorf("verbs: no answer that was understood: %w", errWithoutErrno{err}))
	}
	var ours bool
	if c.hello, ours = parseHello(b); !ours {
		return c, unavailable(session.ReasonProtocol, errors.New("verbs: a foreign program answered"))
	}
	c.peer = ibv.QPPeer{QPNum: binary.LittleEndian.Uint32(b[8:]), PSN: binary.LittleEndian.Uint32(b[12:]) & psnMask, LID: binary.LittleEndian.Uint16(b[32:])}
	copy(c.peer.GID[:], b[16:])
	c.mtu, c.served = ibv.MTU(b[34]), b[35]
	return c, nil
}

const psnMask = 1<<24 - 1

// exchangeDevice opens a device that connects without rdma_cm.
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

// exchangeServes is nil if one of these addresses belongs to a device that connects
// without rdma_cm, or may do so, and otherwise says why none does.
func exchangeServes(addrs []netip.Addr) error {
	first := errNoneServed
	for _, a := range addrs {
		name := DeviceOf(interfaceOf(a))
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
		if first == errNoneServed {
			first = err
		}
	}
	return first
}

// endpoint makes the queue pair and the card for the peer.
func (a attachment) endpoint(cfg Config, conn net.Conn, passive bool) (*Endpoint, card, error) {
	e, err := newEndpoint(a.dev, nil, cfg, passive)
	if err == nil {
		e.tcp = &exchanged{conn: conn}
		if err = e.qp.Init(uint8(a.port.Num), ibv.RemoteRead|ibv.RemoteWrite); err == nil {
			err = e.postAll()
		}
	}
	if err != nil {
		if passive {
			conn.Write(card{hello: hello{helloVersion, refusalFor(err)}}.bytes())
		}
		if e != nil {
			e.discard()
		}
		conn.Close()
		return nil, card{}, callError(err)
	}
	return e, card{
		hello:  hello{version: helloVersion},
		peer:   ibv.QPPeer{QPNum: e.qp.Num, PSN: rand.Uint32() & psnMask, GID: a.gids[0].GID, LID: a.port.LID},
		mtu:    a.port.ActiveMTU,
		served: a.dev.readsServed(),
	}, nil
}

// isOf reports whether the card's address is that of the host which sent it, for which
// Subnets was checked. InfiniBand has addresses of its own.
func (a attachment) isOf(c card, host netip.Addr) bool {
	return a.port.LinkLayer == ibv.LinkInfiniBand || c.peer.GID.Addr() == host.Unmap().WithZone("")
}

var errForeignAddress = errors.New("verbs: the card names another host's address")

// up connects the queue pair to the peer's.
func (a attachment) up(e *Endpoint, mine, theirs card) error {
	path := ibv.QPPath{
		Port: uint8(a.port.Num), PSN: mine.peer.PSN,
		MTU:         min(mine.mtu, theirs.mtu),
		ReadsIssued: min(theirs.served, a.dev.readsIssued()), ReadsServed: mine.served,
		MinRNRTimer: rnrTimer, Timeout: ackTimeout, RetryCount: retryCount,
		PeerIsOnSubnet: a.port.LinkLayer == ibv.LinkInfiniBand,
	}
	e.reached.Store(true)
	if err := a.inTurn(func(g ibv.GIDEntry) error {
		path.GIDIndex = uint8(g.Index)
		return e.qp.ReadyToReceive(path, theirs.peer)
	}); err != nil {
		return err
	}
	return callError(e.qp.ReadyToSend(path))
}

var errNoPort = unavailable(session.ReasonNotServed, errors.New("verbs: no port to connect by without rdma_cm: IWARPOffset is negative"))

func dialExchange(ctx context.Context, local, remote netip.AddrPort, cfg Config) (*Endpoint, error) {
	side := cfg.iwarpPort(remote.Port())
	switch {
	case side == 0:
		return nil, errNoPort
	case cfg.FixedPort:
		return nil, errFixedPort
	}
	var d net.Dialer
	if local.Addr().IsValid() && !local.Addr().IsUnspecified() {
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(local.Addr(), 0))
	}
	conn, err := d.DialContext(ctx, "tcp", netip.AddrPortFrom(remote.Addr(), side).String())
	if err != nil {
		return nil, callError(err)
	}
	stop := bound(ctx, conn)
	defer stop()
	at := conn.LocalAddr().(*net.TCPAddr).AddrPort()
	a, err := attach(at.Addr())
	if err != nil {
		conn.Close()
		return nil, err
	}
	e, mine, err := a.endpoint(cfg, conn, false)
	if err != nil {
		return nil, err
	}
	err = a.introduce(e, conn, mine, remote.Addr())
	if !stop() {
		err = ctx.Err() // whatever came of it: the deadline is set
	}
	if err != nil {
		e.discard()
		return nil, err
	}
	e.local, e.remote = netip.AddrPortFrom(at.Addr().Unmap(), at.Port()), remote
	e.tcp.follow(e)
	return e, nil
}

// introduce is the dialer's part of the exchange.
func (a attachment) introduce(e *Endpoint, conn net.Conn, mine card, remote netip.Addr) error {
	if _, err := conn.Write(mine.bytes()); err != nil {
		return callError(err)
	}
	theirs, err := readCard(conn)
	switch {
	case err != nil:
		return err
	case theirs.refusal != 0 || theirs.version != helloVersion:
		return theirs.hello.meaning()
	case !a.isOf(theirs, remote):
		return unavailable(session.ReasonProtocol, fmt.Errorf("verbs: %v names %v as its RDMA address", remote, theirs.peer.GID.Addr()))
	}
	if err := a.up(e, mine, theirs); err != nil {
		return err
	}
	_, err = conn.Write([]byte{1})
	return callError(err)
}

// maxStrangers is how many accepted TCP connections may still owe their card; more wait
// until one of these has sent it or has timed out.
const maxStrangers = 256

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
	strangers := backlog.New(maxStrangers)
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
			p, _ := strangers.Begin(l.ctx, acceptTime)
			for p == nil {
				time.Sleep(acceptPause)
				p, _ = strangers.Begin(l.ctx, acceptTime)
			}
			l.work.Go(func() { l.admitExchange(conn, p) })
		}
	})
	return nil
}

// acceptPause is the time between attempts to accept while there is no room.
const acceptPause = time.Millisecond

// bound makes conn's reads and writes fail when ctx ends, until stop, which reports
// false if ctx has ended.
func bound(ctx context.Context, conn net.Conn) (stop func() bool) {
	conn.SetDeadline(time.Time{})
	return context.AfterFunc(ctx, func() { conn.SetDeadline(time.Now()) })
}

func (l *Listener) admitExchange(conn net.Conn, stranger *backlog.Place) {
	refuse := func(why refusal) {
		conn.Write(card{hello: hello{helloVersion, why}}.bytes())
		conn.Close()
	}
	stop := bound(stranger.Context(), conn)
	theirs, err := readCard(conn)
	late := !stop()
	stranger.End(false)
	remote := conn.RemoteAddr().(*net.TCPAddr).AddrPort()
	remote = netip.AddrPortFrom(remote.Addr().Unmap(), remote.Port())
	switch {
	case err != nil || late:
		conn.Close()
		return
	case theirs.version != helloVersion:
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
	e, err := l.acceptExchange(p.Context(), conn, theirs, remote, refuse)
	l.made(p, e, err)
}

func (l *Listener) acceptExchange(ctx context.Context, conn net.Conn, theirs card, remote netip.AddrPort, refuse func(refusal)) (*Endpoint, error) {
	stop := bound(ctx, conn)
	defer stop()
	at := conn.LocalAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
	a, err := attach(at)
	if err != nil {
		refuse(refusalFor(err))
		return nil, err
	}
	if !a.isOf(theirs, remote.Addr()) {
		a.dev.release()
		refuse(refusedSubnet)
		return nil, errForeignAddress
	}
	e, mine, err := a.endpoint(l.cfg, conn, true)
	if err != nil {
		return nil, err
	}
	if err = a.up(e, mine, theirs); err != nil {
		refuse(refusalFor(err))
	} else {
		if _, err = conn.Write(mine.bytes()); err == nil {
			_, err = io.ReadFull(conn, make([]byte, 1))
		}
		if !stop() {
			err = ctx.Err() // whatever came of it: the deadline is set
		}
	}
	if err != nil {
		e.discard()
		return nil, err
	}
	e.local, e.remote = netip.AddrPortFrom(at, l.addr.Port()), remote
	e.tcp.follow(e)
	return e, nil
}
