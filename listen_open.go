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

// listen is Listen for TCP. If anyPort is set and a SAN finds TCP's port taken, the error
// is errPortTaken.
func (lc *ListenConfig) listen(ctx context.Context, network, address string, providers []provider, why *Unavailable, env environment, anyPort bool) (net.Listener, error) {
	inner, err := lc.NetListenConfig.Listen(ctx, network, address)
	if err != nil {
		return nil, err
	}
	places := min(lc.Backlog, maxBacklog)
	if places <= 0 {
		places = defaultBacklog
	}
	settings := settle(lc.Options, lc.RDMA, lc.Policy, env, places)
	tcp := inner.(*net.TCPListener)
	settings.v6only = network == "tcp6" || v6only(tcp)
	settings.zone = zoneOf(address)
	l := &Listener{
		tcp:     tcp,
		policy:  lc.Policy,
		plain:   make(chan net.Conn),
		failed:  make(chan error),
		ready:   make(chan *sanconn.Conn, places),
		backlog: backlog.New(places),
		closed:  make(chan struct{}),
		without: why,
		lacks:   make(map[string]*Unavailable),
	}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	for _, p := range providers {
		a, err := p.listen(l.tcp, settings)
		switch {
		case anyPort && errors.Is(err, syscall.EADDRINUSE):
			l.Close()
			return nil, errPortTaken
		case err != nil:
			l.lack(p.name(), err)
		default:
			l.providers = append(l.providers, p.name())
			l.acceptors = append(l.acceptors, a)
			l.background.Go(func() { l.serve(p.name(), a, settings.session) })
		}
	}
	l.countLacks()
	if len(l.acceptors) > 0 {
		l.without = nil
		return l, nil
	}
	if lc.Policy == Require {
		addr := l.tcp.Addr()
		l.Close()
		return nil, listenError(network, addr, requireError{l.without})
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
	why, final := verdict(context.Background(), err)
	if final != nil {
		why = &Unavailable{Reason: ReasonUnreachable, Err: final}
	}
	l.lacks[provider] = why
	if l.without == nil || isAbsent(l.without.Reason) && !isAbsent(why.Reason) {
		l.without = why
	}
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
