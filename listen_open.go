package san

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"syscall"

	"github.com/sanconn/san/internal/backlog"
	"github.com/sanconn/san/sanconn"
)

const (
	// defaultBacklog is how many connections may wait for Accept. Each holds
	// the provider's smallest buffers, so it is less than TCP's 4096.
	defaultBacklog = 1024

	// maxBacklog bounds Backlog, for which room is allocated at once. It was long the
	// limit of listen(2).
	maxBacklog = 1 << 16

	// portTries is how many ports are tried: one that is free for TCP may be taken on a
	// SAN.
	portTries = 4
)

// errPortTaken makes Listen try another port.
var errPortTaken = errors.New("san: the port is taken on a SAN's side")

// opening is what a listener has besides TCP.
type opening struct {
	policy    Policy
	providers []provider
	without   *Unavailable // why there are none
	settings  settings     // without what the TCP listener determines
}

// opening returns what the configuration and the environment say.
func (lc *ListenConfig) opening() (o opening, err error) {
	env := processEnvironment()
	o.policy = lc.Policy
	if o.providers, o.without, err = choose(lc.Providers, env, registry); err != nil {
		return o, err
	}
	if lc.Policy == Never {
		o.providers, o.without = nil, &Unavailable{Reason: ReasonPolicy}
	}
	places := min(lc.Backlog, maxBacklog)
	if places <= 0 {
		places = defaultBacklog
	}
	o.settings = settle(lc.Options, lc.RDMA, lc.Policy, env, places)
	return o, nil
}

// listen is Listen for TCP. If anyPort is set and a SAN finds TCP's port taken, the error
// is errPortTaken.
func (lc *ListenConfig) listen(ctx context.Context, network, address string, o opening, anyPort bool) (net.Listener, error) {
	inner, err := lc.NetListenConfig.Listen(ctx, network, address)
	if err != nil {
		return nil, err
	}
	tcp := inner.(*net.TCPListener)
	o.settings.v6only = network == "tcp6"
	o.settings.zone = zoneOf(address)
	l, err := o.beside(tcp, anyPort)
	if err != nil {
		tcp.Close()
		if err != errPortTaken {
			err = listenError(network, tcp.Addr(), err)
		}
		return nil, err
	}
	return l, nil
}

// beside opens a listener of each provider beside TCP's, which on an error stays as it was.
func (o opening) beside(tcp *net.TCPListener, anyPort bool) (*Listener, error) {
	o.settings.v6only = o.settings.v6only || v6only(tcp)
	l := &Listener{
		tcp:     tcp,
		policy:  o.policy,
		plain:   make(chan net.Conn),
		failed:  make(chan error),
		ready:   make(chan *sanconn.Conn, o.settings.backlog),
		left:    make(chan net.Conn, 1),
		backlog: backlog.New(o.settings.backlog),
		closed:  make(chan struct{}),
		settled: make(chan struct{}),
		without: o.without,
		lacks:   make(map[string]*Unavailable),
	}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	for _, p := range o.providers {
		a, err := p.listen(tcp, o.settings)
		switch {
		case anyPort && errors.Is(err, syscall.EADDRINUSE):
			l.stop()
			l.resetLeft() // of a dialer that knew the port
			return nil, errPortTaken
		case err != nil:
			l.lack(p.name(), err)
		default:
			l.acceptors = append(l.acceptors, opened{p.name(), a})
			l.background.Go(func() { l.serve(p.name(), a, o.settings.session) })
		}
	}
	l.countLacks()
	if len(l.acceptors) > 0 {
		l.without = nil
		return l, nil
	}
	if o.policy == Require {
		l.stop()
		return nil, requireError{l.without}
	}
	return l, nil
}

// zoneOf returns the zone of an address literal. The kernel does not return the zone of an
// MPTCP listener, which is what net makes by default.
func zoneOf(address string) string {
	host, _, _ := net.SplitHostPort(address)
	a, _ := netip.ParseAddr(host)
	return a.Zone()
}

// isAbsent reports whether a reason means that the host or the address has no such SAN,
// which is not a failure.
func isAbsent(r Reason) bool { return r == ReasonNotServed || r == ReasonNoProvider }

// lack records why the listener does not have a provider.
func (l *Listener) lack(provider string, err error) {
	why := lackOf(err)
	l.lacks[provider] = why
	if l.without == nil || isAbsent(l.without.Reason) && !isAbsent(why.Reason) {
		l.without = why
	}
}

// lackOf is the reason that an error of listening implies.
func lackOf(err error) *Unavailable {
	why, final := verdict(context.Background(), err)
	if final != nil {
		return &Unavailable{Reason: ReasonUnreachable, Err: final}
	}
	return why
}

// countLacks counts what the listener lacks.
func (l *Listener) countLacks() {
	count(func(n *Counters) {
		if len(l.acceptors) == 0 && (len(l.lacks) == 0 || isAbsent(l.without.Reason)) {
			n.Listeners[l.without.Reason]++
		}
		for _, why := range l.lacks {
			if !isAbsent(why.Reason) {
				n.Listeners[why.Reason]++
			}
		}
	})
}
