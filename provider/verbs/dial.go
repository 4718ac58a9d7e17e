package verbs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"syscall"
	"time"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/session"
)

const (
	// resolveTime is short and resolving is repeated, because with a cold neighbour
	// entry rdma_cm answers only when the time given is over.
	resolveTime = 50 * time.Millisecond
	routeTime   = 500 * time.Millisecond

	// retryCount retries of ackTimeout (4.096 µs × 2¹⁷ = 537 ms) end a
	// connection after four seconds of silence: longer than a switch takes to
	// choose another path or an overloaded software device to answer, short
	// compared with TCP's minutes. 7 means for ever on rxe.
	retryCount = 6
	ackTimeout = 17
)

// Dial connects to the RDMA listener that belongs to the TCP port remote, from
// the address local or, if that is zero, one that the system chooses. It returns
// when ctx ends at the latest. On iWARP the port of local is not used.
//
// Errors: syscall.ECONNREFUSED where TCP would be refused as well, ctx's, or
// *session.Unavailable.
func Dial(ctx context.Context, local, remote netip.AddrPort, cfg Config) (*Endpoint, error) {
	cfg = cfg.withDefaults()
	if !cfg.allows(remote.Addr()) {
		return nil, unavailable(session.ReasonNotServed, fmt.Errorf("verbs: %v is not among the subnets allowed", remote.Addr()))
	}
	if cfg.WithoutCM {
		return dialExchange(ctx, local, remote, cfg)
	}
	for try := 1; ; try++ {
		l, err := newLink()
		if err != nil {
			return nil, callError(err)
		}
		d := dialing{link: l, cfg: cfg, local: local, remote: remote}
		e, err := d.connect(ctx)
		switch {
		case (err == errPortInUse || err == errStale) && try < dialTries && ctx.Err() == nil:
			continue
		case err != nil && ctx.Err() != nil && !errors.As(err, new(*session.Unavailable)):
			err = ctx.Err()
		}
		return e, err
	}
}

// On iWARP rdma_cm picks a local port without regard to TCP's connections: one to the
// same peer may still hold it.
var errPortInUse = unavailable(session.ReasonResources, errors.New("verbs: the local port is in use"))

const dialTries = 4

// dialing is an attempt to connect. It owns link until an endpoint does.
type dialing struct {
	link          *link
	cfg           Config
	local, remote netip.AddrPort
}

func (d *dialing) connect(ctx context.Context) (*Endpoint, error) {
	if err := d.resolve(ctx); err != nil {
		d.link.close()
		return nil, err
	}
	dev, err := useDevice(d.link.id.Context())
	if err != nil {
		d.link.close()
		return nil, callError(err)
	}
	e, err := newEndpoint(dev, d.link, d.cfg, false)
	if err != nil {
		return nil, callError(err)
	}
	if err := d.establish(ctx, e); err != nil {
		return nil, err
	}
	if err := e.established(ctx); err != nil {
		e.abandon()
		return nil, err
	}
	e.local, e.remote = d.link.id.LocalAddr(), d.remote
	return e, nil
}

// resolve finds the device and the path to the peer.
func (d *dialing) resolve(ctx context.Context) error {
	to := d.remote
	for {
		if err := d.link.id.ResolveAddr(d.local, to, resolveTime); err != nil {
			return callError(err)
		}
		ev, err := d.link.wait(ctx)
		if err != nil {
			return err
		}
		if ev.Type == ibv.AddrResolved {
			if to != d.remote || d.link.id.Context().Transport != ibv.TransportIWARP {
				break
			}
			// The device decides which port it is: bind again.
			port := d.cfg.iwarpPort(d.remote.Port())
			switch {
			case port == 0:
				return errNoIWARP
			case d.cfg.FixedPort:
				return errFixedPort
			}
			to = netip.AddrPortFrom(d.remote.Addr(), port)
			d.local = netip.AddrPortFrom(d.local.Addr(), 0) // its port is TCP's, where the caller may hold it
			fresh, err := newLink()
			if err != nil {
				return callError(err)
			}
			d.link.close()
			d.link = fresh
			continue
		}
		if ctx.Err() != nil || !timedOut(ev) {
			return eventError(ev)
		}
	}
	if err := d.link.id.ResolveRoute(routeTime); err != nil {
		return callError(err)
	}
	ev, err := d.link.wait(ctx)
	if err == nil && ev.Type != ibv.RouteResolved {
		err = eventError(ev)
	}
	return err
}

var errNoIWARP = unavailable(session.ReasonNotServed, errors.New("verbs: iWARP is switched off: IWARPOffset is negative"))

var errFixedPort = unavailable(session.ReasonNotServed, errors.New("verbs: this connection cannot leave from a port of the program's choice"))

func timedOut(ev ibv.Event) bool {
	var timeout interface{ Timeout() bool }
	return errors.As(ev.Errno(), &timeout) && timeout.Timeout()
}

// establish connects the endpoint. When it fails it has torn e down, or the goroutine
// that is stuck in rdma_connect will.
func (d *dialing) establish(ctx context.Context, e *Endpoint) error {
	e.reached.Store(true)
	if err := d.call(ctx, e); err != nil {
		return err
	}
	ev, err := d.link.wait(ctx)
	if err == nil && ev.Type != ibv.Established {
		err = eventError(ev)
		if ev.Type == ibv.Rejected || ev.Type == ibv.Unreachable {
			e.reached.Store(false)
		}
	}
	if err != nil {
		e.abandon()
		return err
	}
	if h, ok := parseHello(ev.Param.PrivateData); !ok || h.version != helloVersion {
		e.abandon()
		return unavailable(session.ReasonProtocol, errors.New("verbs: a foreign program accepted the connection"))
	}
	return nil
}

// call is establish's call of rdma_connect.
func (d *dialing) call(ctx context.Context, e *Endpoint) error {
	id := d.link.id
	param := ibv.ConnParam{
		PrivateData:        hello{version: helloVersion}.bytes(),
		ResponderResources: e.dev.readsServed(),
		InitiatorDepth:     e.dev.readsIssued(),
		RetryCount:         retryCount,
		RNRRetryCount:      0, // the session's credits make it impossible
	}
	if !e.dev.iwarp() {
		id.SetAckTimeout(ackTimeout) // older kernels cannot: the default is seconds
		err := id.Connect(param)
		if err != nil {
			e.reached.Store(false)
			e.abandon()
		}
		return callError(err)
	}
	// Connect may block for most of a minute, and nothing can interrupt it: its
	// goroutine tears e down if we have gone.
	called := make(chan error)
	gone := make(chan struct{})
	ok := blocking.try(func() {
		err := id.Connect(param)
		select {
		case called <- err:
		case <-gone:
			e.abandon()
		}
	})
	if !ok {
		e.abandon()
		return unavailable(session.ReasonResources, errors.New("verbs: too many iWARP connects without an answer"))
	}
	select {
	case err := <-called:
		if err == nil {
			return nil
		}
		e.reached.Store(false)
		e.abandon()
		if errors.Is(err, syscall.EADDRNOTAVAIL) {
			return errPortInUse
		}
		return callError(err)
	case <-ctx.Done():
		close(gone)
		return ctx.Err()
	}
}

// wait waits for the next event of an id that is being connected.
func (l *link) wait(ctx context.Context) (ibv.Event, error) {
	select {
	case ev := <-l.events:
		return ev, nil
	case <-ctx.Done():
		return ibv.Event{}, ctx.Err()
	}
}
