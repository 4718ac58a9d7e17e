package verbs

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"syscall"
	"time"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/internal/reason"
	"github.com/sanconn/san/session"
)

// listenID is the rdma_listen on one address.
type listenID struct {
	l       *Listener
	channel *ibv.EventChannel
	id      *ibv.ID
	dev     *device        // kept for later connections, with its registrations; or nil
	tcp     netip.AddrPort // the TCP address that it belongs to
	gone    bool           // the device is gone; guarded by mu of l
}

const (
	// retryTime is the pause before a listener tries an address again on which it could not listen,
	// because the device has just gone or just come. It doubles each time, up to rescanTime. A new
	// device of an existing address may stay unnoticed for rescanTime, because the kernel's route
	// messages do not show it.
	retryTime = 100 * time.Millisecond
	// If another process has the port, or resources are short, the pause stays retryTime: no event
	// reports the end of that, and an attempt costs a few system calls. Listing the addresses costs
	// milliseconds on nodes of containers, so that is done only every rescanTime and when the kernel
	// reports a change.
	rescanTime = 30 * time.Second
)

// follow listens on the served addresses, and follows their changes in the background.
func (l *Listener) follow() error {
	if l.cfg.WithoutCM {
		if served, err := l.served(); err == nil { // otherwise one may be served
			if err := exchangeServes(served); err != nil {
				return err
			}
		}
		return l.followExchange()
	}
	changed, _ := watchAddresses(l.ctx) // nil: then rescanTime is enough
	err := l.refresh(true)
	if why := l.Waiting(); why != nil && !reason.Is(why, session.ReasonResources) {
		return why
	}
	l.work.Go(func() { l.keepUp(changed, err) })
	return nil
}

// keepUp calls refresh when something has changed, and from time to time, until the listener ends. err
// is the last refresh's error.
func (l *Listener) keepUp(changed <-chan struct{}, err error) {
	wait := rescanTime
	if err != nil {
		wait = retryTime
	}
	for {
		retry, look := retryTime, true
		select {
		case <-l.ctx.Done():
			if changed != nil {
				for range changed { // ends when watchAddresses has ended
				}
			}
			return
		case _, ok := <-changed:
			if !ok {
				changed = nil
			}
		case <-l.lost:
		case <-time.After(wait):
			retry = min(2*wait, rescanTime)
			look = changed == nil || !reason.Is(err, session.ReasonResources)
		}
		err = l.refresh(look)
		wait = nextLook(err, retry)
	}
}

// nextLook returns the time from a refresh to the next one; retry: the time if nothing else determines
// it.
func nextLook(err error, retry time.Duration) time.Duration {
	switch {
	case err == nil:
		return rescanTime
	case reason.Is(err, session.ReasonResources):
		return retryTime
	}
	return retry
}

var errNoneServed = unavailable(session.ReasonNotServed, errors.New("verbs: no address that is listened on belongs to an RDMA device"))

// served returns the addresses that should be listened on: the one that was given, or those of RDMA
// devices that the unspecified address stands for.
func (l *Listener) served() ([]netip.Addr, error) {
	if a := l.addr.Addr(); !a.IsUnspecified() {
		return []netip.Addr{a}, nil
	}
	return servedAddresses(l.addr.Addr(), l.cfg.V6Only)
}

// refresh adds and removes ids, so that the listener listens on the addresses on which it should. With
// look, or if the last list of these addresses is old or could not be read, it reads the list;
// otherwise it uses the last one. If the list cannot be read, the present addresses stay. The error is
// why an address is not listened on, preferably that another process has the port, or that resources
// are short.
func (l *Listener) refresh(look bool) error {
	if look || time.Since(l.looked) >= rescanTime {
		served, err := l.served()
		if err != nil {
			l.looked = time.Time{}
			l.mu.Lock()
			defer l.mu.Unlock()
			l.lack = listenError(err)
			return l.lack
		}
		l.found, l.looked = served, time.Now()
	}
	missing := make(map[netip.Addr]bool)
	for _, a := range l.found {
		missing[a] = true
	}
	var gone []*listenID
	l.mu.Lock()
	for a, x := range l.ids {
		if !missing[a] {
			delete(l.ids, a)
			gone = append(gone, x)
		}
		delete(missing, a)
	}
	if l.closed {
		clear(missing)
	}
	l.mu.Unlock()
	var first, lack error
	for _, a := range l.found {
		if !missing[a] {
			continue
		}
		delete(missing, a)
		err := l.add(a)
		first = cmp.Or(first, err)
		if reason.Is(err, session.ReasonResources) {
			lack = cmp.Or(lack, err)
		}
	}
	l.mu.Lock()
	l.lack = cmp.Or(lack, first, errNoneServed)
	l.mu.Unlock()
	for _, x := range gone {
		x.close()
	}
	return cmp.Or(lack, first)
}

// add listens on one more address. One goroutine at a time calls it.
func (l *Listener) add(a netip.Addr) error {
	channel, err := hub.use()
	if err != nil {
		return listenError(err)
	}
	x := &listenID{l: l, channel: channel, tcp: netip.AddrPortFrom(a, l.addr.Port())}
	// mu is not held, as readEvents needs it and a device that is being closed takes its time.
	if err := x.listen(); err != nil {
		x.close()
		return listenError(fmt.Errorf("verbs: listen on %v: %w", x.tcp, err))
	}
	l.mu.Lock()
	gone := l.closed || x.gone
	if !gone {
		l.ids[a] = x
	}
	l.mu.Unlock()
	if gone {
		x.close()
		return listenError(fmt.Errorf("verbs: listen on %v: the device has gone: %w", x.tcp, syscall.ENODEV))
	}
	return nil
}

// listenError returns the error of a call, for the listener.
func listenError(err error) error {
	if errors.Is(err, syscall.ENODEV) { // no device has the address, or there is no device
		return unavailable(session.ReasonNotServed, err)
	}
	return callError(err)
}

// listen listens, on iWARP at iWARP's port. After an error close must be called.
func (x *listenID) listen() error {
	err := x.bind(x.tcp)
	if err == nil && x.id.Context().Transport == ibv.TransportIWARP {
		port := x.l.cfg.iwarpPort(x.tcp.Port())
		if port == 0 {
			return errNoIWARP
		}
		x.id.Close()
		err = x.bind(netip.AddrPortFrom(x.tcp.Addr(), port))
	}
	if err == nil {
		err = x.id.Listen(mostMaking)
	}
	if err == nil {
		x.dev, _ = useDevice(x.id.Context(), x.l.cfg) // an error comes again for each connection
	}
	return err
}

// bind makes an id with an address. The address determines the device, and the device whose ports are
// used.
func (x *listenID) bind(at netip.AddrPort) (err error) {
	if x.id, err = x.channel.NewID(); err != nil {
		return err
	}
	x.id.Owner = x
	if err = x.id.Bind(at); err == nil && x.id.Context() == nil {
		err = unavailable(session.ReasonNotServed, errors.New("no RDMA device has this address"))
	}
	return err
}

// close is called once: by whoever has removed x from ids, or has not added it.
func (x *listenID) close() {
	if x.dev != nil {
		x.dev.release() // before the id, as in Endpoint.destroy
	}
	if x.id != nil {
		x.id.Close()
	}
	hub.release()
}

// event handles a connect request, or the device's removal. After a removal the id gets no more events,
// even if the device comes back. Nor does it after its address has moved to another device
// (cma_netdev_change in core/cma.c). Nothing may block here: the kernel loses requests beyond its
// queue.
func (x *listenID) event(ev ibv.Event) {
	switch ev.Type {
	case ibv.DeviceRemoval, ibv.AddrChange:
		x.l.deviceGone(x)
	case ibv.ConnectRequest:
		if cm := hub.adopt(ev.ID, x.channel); cm != nil {
			x.l.handle(cm, ev.Param)
		} else {
			ev.ID.Close() // which refuses the request
		}
	}
}

func (l *Listener) deviceGone(x *listenID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	x.gone = true
	if l.closed || l.ids[x.tcp.Addr()] != x {
		return
	}
	delete(l.ids, x.tcp.Addr())
	l.work.Go(func() { // not here, as closing the last id waits for readEvents, which has called event
		x.close()
		select {
		case l.lost <- struct{}{}:
		default:
		}
	})
}
