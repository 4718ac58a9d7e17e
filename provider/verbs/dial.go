package verbs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"syscall"
	"time"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/session"
)

const (
	// resolveTime is short, and resolving is repeated, because with a cold neighbour entry rdma_cm
	// answers only when the time given is over.
	resolveTime = 50 * time.Millisecond
	// routeTime is for a busy subnet manager (on InfiniBand; otherwise the answer is immediate). The
	// kernel queries ten times within it (nmbr_sa_query_retries in core/sa_query.c), and then resolve
	// tries again.
	routeTime = time.Second
)

// Dial connects to the RDMA listener that belongs to the TCP port remote, from the address local or, if
// that is zero, from one that the system chooses. It returns when ctx ends at the latest. The caller
// must bound the number of concurrent Dials, because too many overrun the queues of the peer or of the
// subnet manager.
//
// The error is ctx's or a *session.Unavailable.
func Dial(ctx context.Context, local netip.Addr, remote netip.AddrPort, cfg Config) (*Endpoint, error) {
	cfg = cfg.withDefaults()
	if !cfg.allows(remote.Addr()) {
		return nil, unavailable(session.ReasonNotServed, fmt.Errorf("verbs: %v is not among the subnets allowed", remote.Addr()))
	}
	if cfg.WithoutCM {
		return dialExchange(ctx, local, remote, cfg)
	}
	for try := 1; ; try++ {
		d := dialing{cfg: cfg, local: local, remote: remote}
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

// On iWARP rdma_cm chooses a local port without regard to TCP connections: one to the same peer may
// still hold the port.
var errPortInUse = unavailable(session.ReasonResources, errors.New("verbs: the local port is in use"))

const dialTries = 4

// dialing is one attempt to connect. Its steps are those of accepting at the other end: locate the
// device, create the endpoint, exchange parameters, finish.
type dialing struct {
	cfg    Config
	local  netip.Addr
	remote netip.AddrPort

	cm  *cmID
	dev *device
	e   *Endpoint // owns both; nil while a call that is blocked in rdma_connect has to end it
}

func (d *dialing) connect(ctx context.Context) (*Endpoint, error) {
	if err := d.locate(ctx); err != nil {
		if d.cm != nil {
			d.cm.close()
		}
		return nil, err
	}
	var err error
	if d.e, err = newEndpoint(d.dev, d.cm, d.remote.Addr(), d.cfg, false, d.cm.id.UseQP); err != nil {
		return nil, callError(err)
	}
	if err = d.exchange(ctx); err == nil {
		err = callError(d.e.established(ctx))
	}
	if err != nil {
		if d.e != nil {
			d.e.abortUnused()
		}
		return nil, err
	}
	return d.e, nil
}

// locate finds the device and the path to the peer.
func (d *dialing) locate(ctx context.Context) (err error) {
	err = d.resolveAddr(ctx, d.remote.Port())
	if err == nil && d.cm.id.Context().Transport == ibv.TransportIWARP { // iWARP has a port of its own
		port := d.cfg.iwarpPort(d.remote.Port())
		if port == 0 {
			return errNoIWARP
		}
		first := d.cm
		err = d.resolveAddr(ctx, port)
		first.close()
	}
	if err != nil {
		return err
	}
	if name := d.cm.id.Context().Name; d.cfg.Device != "" && name != d.cfg.Device {
		return unavailable(session.ReasonNotServed, fmt.Errorf("verbs: rdma_cm would leave by %s, the socket's route by %s", name, d.cfg.Device))
	}
	// On InfiniBand the subnet manager knows the path.
	if err := d.resolve(ctx, ibv.RouteResolved, func() error { return d.cm.id.ResolveRoute(routeTime) }); err != nil {
		return err
	}
	d.dev, err = useDevice(d.cm.id.Context(), d.cfg)
	return callError(err)
}

// resolve calls ask until rdma_cm reports the answer.
func (d *dialing) resolve(ctx context.Context, answer ibv.EventType, ask func() error) error {
	for {
		if err := ask(); err != nil {
			return callError(err)
		}
		ev, err := d.cm.wait(ctx)
		switch {
		case err != nil:
			return err
		case ev.Type == answer:
			return nil
		case ctx.Err() != nil || !os.IsTimeout(ev.Errno()):
			return eventError(ev)
		}
	}
}

// resolveAddr makes an id with the configured traffic class, and binds it to a device.
func (d *dialing) resolveAddr(ctx context.Context, port uint16) (err error) {
	if d.cm, err = newID(); err != nil {
		return callError(err)
	}
	if d.cfg.TrafficClass != 0 {
		if err = d.cm.id.SetTOS(d.cfg.TrafficClass); err != nil {
			return callError(err)
		}
	}
	return d.resolve(ctx, ibv.AddrResolved, func() error {
		return d.cm.id.ResolveAddr(netip.AddrPortFrom(d.local, 0), netip.AddrPortFrom(d.remote.Addr(), port), resolveTime)
	})
}

var errNoIWARP = unavailable(session.ReasonNotServed, errors.New("verbs: iWARP is switched off: IWARPOffset is negative"))

// exchange sends the request and waits for the reply.
func (d *dialing) exchange(ctx context.Context) (err error) {
	param := ibv.ConnParam{
		PrivateData:        privateData{Version: protocolVersion, Claim: d.cfg.Claim}.bytes(),
		ResponderResources: d.dev.readsServed(),
		InitiatorDepth:     d.dev.readsIssued(),
		RetryCount:         d.dev.retries(),
		RNRRetryCount:      rnrRetry,
	}
	if d.dev.iwarp() {
		err = d.requestIWARP(ctx, param)
	} else {
		d.cm.id.SetAckTimeout(d.cfg.AckTimeout) // fails on older kernels, whose default is seconds
		err = callError(d.cm.id.Connect(param))
	}
	if err != nil {
		return err
	}
	ev, err := d.cm.wait(ctx)
	if err == nil && ev.Type != ibv.Established {
		err = eventError(ev)
	}
	if err == nil {
		if p, ours := parsePrivateData(ev.Param.PrivateData); !ours || p.Version != protocolVersion {
			err = unavailable(session.ReasonProtocol, errors.New("verbs: a foreign program accepted the connection"))
		}
	}
	return err
}

// requestIWARP calls rdma_connect, which on iWARP may block for most of a minute and cannot be
// interrupted. If this goroutine gives up, the one with the call tears the endpoint down.
func (d *dialing) requestIWARP(ctx context.Context, param ibv.ConnParam) error {
	e := d.e
	called := make(chan error)
	gone := make(chan struct{})
	ok := blocking.try(func() {
		err := d.cm.id.Connect(param)
		select {
		case called <- err:
		case <-gone:
			e.abortUnused()
		}
	})
	if !ok {
		return unavailable(session.ReasonResources, errors.New("verbs: too many iWARP connects without an answer"))
	}
	select {
	case err := <-called:
		if errors.Is(err, syscall.EADDRNOTAVAIL) {
			return errPortInUse
		}
		return callError(err)
	case <-ctx.Done():
		d.e = nil
		close(gone)
		return ctx.Err()
	}
}

// established is called by either end when rdma_cm has reported the connection.
func (e *Endpoint) established(ctx context.Context) error {
	if e.dev.iwarp() {
		return e.readyToReceive(ctx)
	}
	e.q.qp.Modify(ibv.QPAttr{MinRNRTimer: rnrTimer}, ibv.MaskMinRNRTimer)
	return nil
}
