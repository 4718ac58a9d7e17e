package verbs

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/internal/reason"
	"github.com/sanconn/san/session"
)

const (
	// mostMaking bounds the connections that a listener makes at a time, and the requests that wait for
	// it in the kernel. The kernel drops further ones silently; the listener refuses them.
	mostMaking = 1024
	// acceptTime bounds how long a dialer may take to finish connecting.
	acceptTime = 5 * time.Second
)

// Listener takes connections on the RDMA side of a TCP port.
type Listener struct {
	cfg  Config
	addr netip.AddrPort
	take func(*Endpoint)

	making chan struct{} // a token for each connection in progress
	ctx    context.Context
	cancel context.CancelFunc
	work   sync.WaitGroup

	found  []netip.Addr // the addresses that should be listened on; for refresh, which one goroutine at a time calls
	looked time.Time    // when found was determined; zero: the last look failed

	lost   chan struct{}            // has a token when an id has lost its device
	mu     sync.Mutex               // guards the fields below
	ids    map[netip.Addr]*listenID // by served address
	lack   error                    // while it has no address: why
	closed bool
}

// Listen listens on the RDMA side of the TCP port addr: on its address or, if that is unspecified, on
// each local address that belongs to an RDMA device, now and later. If a device goes and comes back, it
// is listened on again. If another process has the port on the RDMA side, or resources are short,
// Listen succeeds and the listener tries again (Waiting). The error is a *session.Unavailable, for
// example because no address is served.
//
// take is called for each connection, in the goroutine that has made it. It owns the endpoint, and must
// not block.
func Listen(addr netip.AddrPort, cfg Config, take func(*Endpoint)) (*Listener, error) {
	cfg = cfg.withDefaults()
	if err := callError(ibv.Available()); err != nil && !reason.Is(err, session.ReasonResources) { // then the listener tries again
		return nil, err
	}
	l := &Listener{
		cfg: cfg, addr: addr, take: take,
		making: make(chan struct{}, mostMaking),
		lost:   make(chan struct{}, 1),
		ids:    make(map[netip.Addr]*listenID),
	}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	if err := l.follow(); err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

// Waiting returns nil if the listener has an address. Otherwise it returns a *session.Unavailable,
// which wraps EADDRINUSE if another process has the port on the RDMA side.
func (l *Listener) Waiting() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.ids) > 0 {
		return nil
	}
	return l.lack
}

// Close ends the listener. Connections that were handed out live on. A second Close returns
// net.ErrClosed.
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
	return nil
}

// handle handles a connect request in the background.
func (l *Listener) handle(cm *cmID, request ibv.ConnParam) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		go cm.refuse(refusedClosed) // not in l.work: Close may have waited for that already
		return
	}
	l.work.Go(func() { l.admit(cm, request) })
}

// admit makes the connection that a request is for, or refuses it.
func (l *Listener) admit(cm *cmID, request ibv.ConnParam) {
	p, _ := parsePrivateData(request.PrivateData) // a foreign program's data has another version
	if err := l.cfg.admits(p, cm.id.LocalAddr().Addr(), cm.id.RemoteAddr().Addr(), l.addr.Port()); err != nil {
		cm.refuse(refusalFor(err))
		return
	}
	if !l.make(func(ctx context.Context) (*Endpoint, error) { return acceptRequest(ctx, cm, request, l.cfg) }) {
		cm.refuse(refusedResources)
	}
}

// make makes a connection and hands it out. It returns false if too many are in progress.
func (l *Listener) make(connect func(context.Context) (*Endpoint, error)) bool {
	select {
	case l.making <- struct{}{}:
		defer func() { <-l.making }()
	default:
		return false
	}
	ctx, cancel := context.WithTimeout(l.ctx, acceptTime)
	defer cancel()
	if e, err := connect(ctx); err == nil {
		l.take(e)
	}
	return true
}

// acceptRequest accepts a request, or refuses it, with the steps of dialing.
func acceptRequest(ctx context.Context, cm *cmID, request ibv.ConnParam, cfg Config) (*Endpoint, error) {
	dev, err := useDevice(cm.id.Context(), cfg)
	if err != nil {
		cm.refuse(refusalFor(err))
		return nil, err
	}
	e, err := newEndpoint(dev, cm, cm.id.RemoteAddr().Addr(), cfg, true, cm.id.UseQP)
	if err != nil {
		return nil, err
	}
	if err = e.reply(ctx, request); err == nil {
		err = e.established(ctx)
	}
	if err != nil {
		e.abortUnused()
		return nil, err
	}
	return e, nil
}

// reply accepts a request and waits for the dialer.
func (e *Endpoint) reply(ctx context.Context, request ibv.ConnParam) error {
	if !e.dev.iwarp() {
		e.q.cm.id.SetAckTimeout(e.cfg.AckTimeout)
	}
	err := e.q.cm.id.Accept(ibv.ConnParam{
		PrivateData:        privateData{Version: protocolVersion}.bytes(),
		ResponderResources: min(request.ResponderResources, e.dev.readsServed()),
		InitiatorDepth:     min(request.InitiatorDepth, e.dev.readsIssued()),
		RNRRetryCount:      rnrRetry,
	})
	if err != nil {
		e.q.cm.reject(refusalFor(err)) // unless the kernel has rejected it
		return err
	}
	ev, err := e.q.cm.wait(ctx)
	if err == nil && ev.Type != ibv.Established {
		err = eventError(ev)
	}
	return err
}
