package verbs

import (
	"context"

	"github.com/sanconn/san/ibv"
)

// accepting is the answer to a request, with the steps of dialing.
type accepting struct {
	cfg     Config
	request ibv.ConnParam

	cm  *cmID
	dev *device
	e   *Endpoint // owns both
}

func (a *accepting) connect(ctx context.Context) (*Endpoint, error) {
	if err := a.locate(); err != nil {
		a.cm.refuse(refusalFor(err))
		return nil, err
	}
	if err := a.create(); err != nil {
		return nil, err
	}
	if err := a.exchange(ctx); err != nil {
		a.e.abandon()
		return nil, err
	}
	if err := a.e.established(ctx); err != nil {
		a.e.abandon()
		return nil, err
	}
	return a.e, nil
}

// locate finds the device.
func (a *accepting) locate() (err error) {
	a.dev, err = useDevice(a.cm.id.Context(), a.cfg)
	return err
}

// create makes the endpoint with its queue pair, or refuses.
func (a *accepting) create() (err error) {
	a.e, err = newEndpoint(a.dev, a.cm, a.cfg, true)
	return err
}

// exchange replies to the request and waits for the dialer.
func (a *accepting) exchange(ctx context.Context) error {
	if !a.dev.iwarp() {
		a.cm.id.SetAckTimeout(a.cfg.AckTimeout)
	}
	err := a.cm.id.Accept(ibv.ConnParam{
		PrivateData:        privateData{version: protocolVersion}.bytes(),
		ResponderResources: min(a.request.ResponderResources, a.dev.readsServed()),
		InitiatorDepth:     min(a.request.InitiatorDepth, a.dev.readsIssued()),
		RNRRetryCount:      rnrRetry,
	})
	if err != nil {
		a.cm.reject(refusalFor(err)) // unless the kernel has
		return err
	}
	ev, err := a.cm.wait(ctx)
	if err == nil && ev.Type != ibv.Established {
		err = eventError(ev)
	}
	return err
}
