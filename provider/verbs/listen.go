package verbs

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/session"
)

const (
	// kernelBacklog is large, as the kernel drops what exceeds it in silence;
	// the listener's own backlog refuses.
	kernelBacklog = 1024
	// acceptTime bounds how long a dialer may take to finish connecting.
	acceptTime = 5 * time.Second
)

// Listener accepts connections on the RDMA side of a TCP port.
type Listener struct {
	cfg  Config
	addr netip.AddrPort

	ready   chan *Endpoint // room for the whole backlog
	pending atomic.Int32   // connections that are being made, or are ready
	ctx     context.Context
	cancel  context.CancelFunc
	work    sync.WaitGroup

	mu     sync.Mutex               // guards what follows
	ids    map[netip.Addr]*listenID // by served address
	closed bool
}

// listenID is the rdma_listen on one address.
type listenID struct {
	l    *Listener
	id   *ibv.ID
	tcp  netip.AddrPort // what it stands for
	done sync.Once
}

// Listen listens beside the TCP port addr, on that address or, if it is
// unspecified, on each local address that belongs to an RDMA device, now and
// later. An error is a *session.Unavailable: no address is served, or another
// program has the port on the RDMA side.
func Listen(addr netip.AddrPort, cfg Config) (*Listener, error) {
	cfg = cfg.withDefaults()
	if err := ibv.Available(); err != nil {
		return nil, unavailable(session.ReasonNoProvider, err)
	}
	l := &Listener{
		cfg: cfg, addr: addr,
		ready: make(chan *Endpoint, cfg.Backlog),
		ids:   make(map[netip.Addr]*listenID),
	}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	if err := l.follow(); err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

// follow listens on what is served, and goes on as addresses come and go.
func (l *Listener) follow() error {
	if l.cfg.WithoutCM {
		return l.serveExchange()
	}
	if !l.addr.Addr().IsUnspecified() {
		return l.add(l.addr.Addr())
	}
	changed, err := watchAddresses(l.ctx)
	if err != nil {
		return unavailable(session.ReasonNoProvider, err)
	}
	err = l.refresh()
	l.work.Go(func() {
		for range changed {
			l.refresh()
		}
	})
	return err
}

// refresh compares the served addresses with those that are listened on. The
// error is the first one, if nothing is listened on.
func (l *Listener) refresh() error {
	served := servedAddresses(l.addr.Addr())
	want := make(map[netip.Addr]bool, len(served))
	var first error
	for _, a := range served {
		want[a] = true
		if err := l.add(a); err != nil && first == nil {
			first = err
		}
	}
	l.mu.Lock()
	var gone []*listenID
	for a, id := range l.ids {
		if !want[a] {
			delete(l.ids, a)
			gone = append(gone, id)
		}
	}
	n := len(l.ids)
	l.mu.Unlock()
	for _, id := range gone {
		id.close()
	}
	switch {
	case n > 0:
		return nil
	case first != nil:
		return first
	}
	return unavailable(session.ReasonNotServed, errors.New("verbs: no address of this host belongs to an RDMA device"))
}

// add listens on one address, unless it is listened on already.
func (l *Listener) add(a netip.Addr) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || l.ids[a] != nil {
		return nil
	}
	channel, err := hub.use()
	if err != nil {
		return callError(err)
	}
	x := &listenID{l: l, tcp: netip.AddrPortFrom(a, l.addr.Port())}
	if err := x.listen(channel); err != nil {
		x.close()
		return callError(fmt.Errorf("verbs: listen on %v: %w", x.tcp, err))
	}
	l.ids[a] = x
	return nil
}

func (x *listenID) listen(channel *ibv.EventChannel) error {
	for _, iwarp := range []bool{false, true} {
		at := x.tcp
		if iwarp {
			port := x.l.cfg.iwarpPort(x.tcp.Port())
			if port == 0 {
				return unavailable(session.ReasonNotServed, errors.New("iWARP is switched off"))
			}
			at = netip.AddrPortFrom(x.tcp.Addr(), port)
		}
		id, err := channel.NewID()
		if err != nil {
			return err
		}
		id.Owner = x
		if err := id.Bind(at); err != nil {
			id.Close()
			return err
		}
		// Binding tells which device it is, and with it whose the ports are.
		if ctx := id.Context(); ctx == nil {
			id.Close()
			return unavailable(session.ReasonNotServed, errors.New("no RDMA device has this address"))
		} else if !iwarp && ctx.Transport == ibv.TransportIWARP {
			id.Close()
			continue
		}
		if err := id.Listen(kernelBacklog); err != nil {
			id.Close()
			return err
		}
		x.id = id
		return nil
	}
	return nil
}

func (x *listenID) close() {
	x.done.Do(func() {
		if x.id != nil {
			x.id.Close()
		}
		hub.release()
	})
}

// event takes a connect request. Nothing here blocks: more requests than the
// kernel queues would be lost.
func (x *listenID) event(ev ibv.Event) {
	if ev.Type != ibv.ConnectRequest {
		return
	}
	l := x.l
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		// Refused by the id's end, which Close of the listener waits for.
		k := adopt(ev.ID)
		go k.refuse(refusedBacklog)
		return
	}
	k := adopt(ev.ID)
	l.work.Go(func() { l.admit(k, x.tcp, ev.Param) })
}

// refuse rejects a request and destroys its id.
func (l *link) refuse(why refusal) {
	l.id.Reject(hello{helloVersion, why}.bytes())
	l.close()
}

// admit makes a connection of a request.
func (l *Listener) admit(k *link, tcp netip.AddrPort, p ibv.ConnParam) {
	h, ours := parseHello(p.PrivateData)
	switch {
	case !ours || h.version != helloVersion:
		k.refuse(refusedVersion)
		return
	case !l.cfg.allows(k.id.RemoteAddr().Addr()):
		k.refuse(refusedSubnet)
		return
	case int(l.pending.Add(1)) > cap(l.ready):
		l.pending.Add(-1)
		k.refuse(refusedBacklog)
		return
	}
	e, err := l.accept(k, tcp, p)
	if err != nil {
		l.pending.Add(-1)
		return
	}
	l.ready <- e // pending keeps room for it
}

func (l *Listener) accept(k *link, tcp netip.AddrPort, p ibv.ConnParam) (*Endpoint, error) {
	remote := k.id.RemoteAddr()
	dev, err := useDevice(k.id.Context())
	if err != nil {
		k.refuse(refusedResources)
		return nil, err
	}
	e, err := newEndpoint(dev, k, l.cfg, true)
	if err != nil {
		return nil, err
	}
	if !dev.iwarp() {
		k.id.SetAckTimeout(ackTimeout)
	}
	err = k.id.Accept(ibv.ConnParam{
		PrivateData:        hello{version: helloVersion}.bytes(),
		ResponderResources: min(p.ResponderResources, uint8(min(dev.caps.MaxQPReadAtomic, readDepth))),
		InitiatorDepth:     min(p.InitiatorDepth, uint8(min(dev.caps.MaxQPInitiatorRead, readDepth))),
		RNRRetryCount:      0,
	})
	if err != nil {
		e.abandon()
		return nil, err
	}
	ctx, cancel := context.WithTimeout(l.ctx, acceptTime)
	defer cancel()
	ev, err := k.wait(ctx)
	if err == nil && ev.Type != ibv.Established {
		err = eventError(ev)
	}
	if err == nil {
		err = e.established(ctx)
	}
	if err != nil {
		e.abandon()
		return nil, err
	}
	e.local, e.remote = tcp, remote
	return e, nil
}

// Accept waits for the next connection. The error is net.ErrClosed.
func (l *Listener) Accept() (*Endpoint, error) {
	select {
	case e := <-l.ready:
		l.pending.Add(-1)
		return e, nil
	case <-l.ctx.Done():
		return nil, net.ErrClosed
	}
}

// Addrs are the addresses that are listened on.
func (l *Listener) Addrs() []netip.AddrPort {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cfg.WithoutCM {
		return []netip.AddrPort{l.addr}
	}
	var list []netip.AddrPort
	for _, x := range l.ids {
		list = append(list, x.tcp)
	}
	return list
}

// Close ends the listener: connections that wait for Accept are reset.
func (l *Listener) Close() error {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return net.ErrClosed
	}
	l.closed = true
	ids := l.ids
	l.ids = nil
	l.mu.Unlock()
	l.cancel()
	for _, x := range ids {
		x.close()
	}
	l.work.Wait()
	for {
		select {
		case e := <-l.ready:
			e.Abort()
		default:
			return nil
		}
	}
}
