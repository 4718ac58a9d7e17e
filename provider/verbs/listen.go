package verbs

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/internal/backlog"
	"github.com/sanconn/san/session"
)

const (
	// kernelBacklog is large, as the kernel silently drops what exceeds it;
	// the listener's own backlog refuses.
	kernelBacklog = 1024
	// acceptTime bounds how long a dialer may take to finish connecting.
	acceptTime = 5 * time.Second
)

// Listener accepts connections on the RDMA side of a TCP port.
type Listener struct {
	cfg  Config
	addr netip.AddrPort

	ready   chan *Endpoint   // room for the whole backlog
	backlog *backlog.Backlog // of connections that are being made, or are ready
	ctx     context.Context
	cancel  context.CancelFunc
	work    sync.WaitGroup

	lost   chan struct{}            // has a token when an id has lost its device
	mu     sync.Mutex               // guards what follows
	ids    map[netip.Addr]*listenID // by served address
	taken  error                    // why not on an address that another process has; nil: there is none
	closed bool
}

// Listen listens on the RDMA side of the TCP port addr, on that address or, if it is
// unspecified, on each local address that belongs to an RDMA device, now and
// later: a device that comes back is listened on again. An error is a
// *session.Unavailable: for example no address is served, or another program has
// the port on the RDMA side and cfg.TakeOver is not set.
func Listen(addr netip.AddrPort, cfg Config) (*Listener, error) {
	cfg = cfg.withDefaults()
	if err := ibv.Available(); err != nil {
		return nil, unavailable(session.ReasonNoProvider, err)
	}
	l := &Listener{
		cfg: cfg, addr: addr,
		ready:   make(chan *Endpoint, cfg.Backlog),
		backlog: backlog.New(cfg.Backlog),
		lost:    make(chan struct{}, 1),
		ids:     make(map[netip.Addr]*listenID),
	}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	if err := l.follow(); err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

// Accept waits for the next connection. After Close it returns net.ErrClosed. It is
// safe for concurrent use.
func (l *Listener) Accept() (*Endpoint, error) {
	select {
	case e := <-l.ready:
		l.backlog.Leave()
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

// Waiting returns nil unless the listener has no address yet, because another process has
// the port on the RDMA side: then a *session.Unavailable around EADDRINUSE.
func (l *Listener) Waiting() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.ids) > 0 {
		return nil
	}
	return l.taken
}

// Close ends the listener: connections that wait for Accept are reset. A second Close
// returns net.ErrClosed.
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
			e.abandon()
		default:
			return nil
		}
	}
}

// handle deals with a connect request, in the background.
func (l *Listener) handle(cm *cmID, tcp netip.AddrPort, request ibv.ConnParam) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		go cm.refuse(refusedClosed) // Close may have waited for l.work already
		return
	}
	l.work.Go(func() { l.admit(cm, tcp, request) })
}

// admit makes a connection of a request.
func (l *Listener) admit(cm *cmID, tcp netip.AddrPort, request ibv.ConnParam) {
	p, ours := parsePrivateData(request.PrivateData)
	switch {
	case !ours || p.version != protocolVersion:
		cm.refuse(refusedVersion)
		return
	case !l.cfg.allows(cm.id.RemoteAddr().Addr()):
		cm.refuse(refusedSubnet)
		return
	}
	place, err := l.backlog.Begin(l.ctx, cm.id.RemoteAddr().Addr().String(), acceptTime)
	if err != nil {
		cm.refuse(refusalFor(err))
		return
	}
	a := accepting{cfg: l.cfg, local: tcp, remote: cm.id.RemoteAddr(), cm: cm, request: request}
	e, err := a.connect(place.Context())
	l.made(place, e, err)
}

// made queues a connection for Accept, if it was made and its place is still valid.
func (l *Listener) made(p *backlog.Place, e *Endpoint, err error) {
	switch placed := p.End(err == nil); {
	case placed:
		l.ready <- e // its place keeps room for it
	case err == nil:
		e.abandon()
	}
}
