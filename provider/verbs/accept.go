package verbs

import (
	"context"

	"github.com/sanconn/san/ibv"
)

// acceptRequest answers a request, or refuses it, with the steps of dialing.
func acceptRequest(ctx context.Context, cm *cmID, request ibv.ConnParam, cfg Config) (*Endpoint, error) {
	dev, err := useDevice(cm.id.Context(), cfg)
	if err != nil {
		cm.refuse(refusalFor(err))
		return nil, err
	}
	e, err := newEndpoint(dev, cm, cm.id.RemoteAddr().Addr(), cfg, true)
	if err != nil {
		return nil, err
	}
	if err = e.reply(ctx, request); err == nil {
		err = e.established(ctx)
	}
	if err != nil {
		e.abandon()
		return nil, err
	}
	return e, nil
}

// reply accepts a request and waits for the dialer.
func (e *Endpoint) reply(ctx context.Context, request ibv.ConnParam) error {
	if !e.dev.iwarp() {
		e.cm.id.SetAckTimeout(e.cfg.AckTimeout)
	}
	err := e.cm.id.Accept(ibv.ConnParam{
		PrivateData:        privateData{version: protocolVersion}.bytes(),
		ResponderResources: min(request.ResponderResources, e.dev.readsServed()),
		InitiatorDepth:     min(request.InitiatorDepth, e.dev.readsIssued()),
		RNRRetryCount:      rnrRetry,
	})
	if err != nil {
		e.cm.reject(refusalFor(err)) // unless the kernel has
		return err
	}
	ev, err := e.cm.wait(ctx)
	if err == nil && ev.Type != ibv.Established {
		err = eventError(ev)
	}
	return err
}
