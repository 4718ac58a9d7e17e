package san

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/sanconn/san/internal/raceedge"
)

const (
	// minShare is the least time for one of several addresses, as in net.
	minShare = 2 * time.Second

	// familyTimeout bounds TCP's attempt at an address while the other family waits for
	// its turn, where net would not let it wait. Linux has sent three SYNs by then, after
	// 0, 1 and 3 s: the family counts as unreachable.
	familyTimeout = 5 * time.Second
)

// dialEach tries the addresses in turn until one connects.
func (d *Dialer) dialEach(ctx context.Context, network string, requests []request) (dialed, error) {
	var first error
	for i, r := range requests {
		ctx, cancel := share(ctx, len(requests)-i)
		var tcpTimeout time.Duration
		if d.NetDialer.FallbackDelay >= 0 && severalFamilies(requests[i:]) {
			tcpTimeout = familyTimeout
		}
		c, err := d.dialOne(ctx, network, r, tcpTimeout)
		cancel()
		if err == nil {
			return c, nil
		}
		first = cmp.Or(first, err)
	}
	return dialed{}, first
}

// share bounds the attempt at one address by net's own rule: left addresses, including this
// one, share the time that remains until ctx's deadline.
func share(ctx context.Context, left int) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok || left == 1 {
		return ctx, func() {}
	}
	remaining := time.Until(deadline)
	return context.WithTimeout(ctx, min(remaining, max(remaining/time.Duration(left), minShare)))
}

// dialOne connects to one address: by each provider that serves it in turn, then by TCP
// within tcpTimeout; 0: ctx is the only bound.
func (d *Dialer) dialOne(ctx context.Context, network string, r request, tcpTimeout time.Duration) (dialed, error) {
	why := &Unavailable{Reason: ReasonNotServed}
	for i, p := range r.serving {
		c, err := d.dialSAN(ctx, p, r)
		if err == nil {
			return dialed{Conn: c}, nil
		}
		unavailable, final := verdict(ctx, err)
		if final != nil {
			return dialed{}, dialError(network, d.NetDialer.LocalAddr, r.remote, final)
		}
		if i == 0 { // the preferred provider's reason is reported
			why = unavailable
		}
	}
	if d.Policy == Require {
		return dialed{}, dialError(network, d.NetDialer.LocalAddr, r.remote, requireError{why})
	}
	if tcpTimeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, tcpTimeout)
		defer cancel()
	}
	return d.fallBack(ctx, network, r.address, why, len(r.serving) > 0)
}

// slowNetwork is a provider that knows of networks whose attempts take long.
type slowNetwork interface {
	// slow is the least bound of an attempt at dst, 0 if it is like any other.
	slow(dst netip.Addr, s settings) time.Duration
}

// attemptTime is the bound of an attempt: what the program has set, or the network's.
func attemptTime(p provider, r request) time.Duration {
	if n, ok := p.(slowNetwork); ok && r.attempt == defaultAttemptTimeout {
		return max(r.attempt, n.slow(r.remote.Addr(), r.settings))
	}
	return r.attempt
}

// dialSAN makes one attempt over a SAN, unless the destination did not answer recently.
func (d *Dialer) dialSAN(ctx context.Context, p provider, r request) (net.Conn, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err() // before any hook is called
	}
	key := keyOf(p, r)
	if d.Policy != Require {
		if left := dialBackoff.left(key, time.Now()); left > 0 {
			return nil, &Unavailable{Reason: ReasonRemembered,
				Err: fmt.Errorf("%s: %v did not answer lately, and is tried again in %v", p.name(), r.remote, left.Round(time.Millisecond))}
		}
	}
	whole := attemptTime(p, r)
	timeout := whole
	if deadline, ok := ctx.Deadline(); ok && d.Policy != Require {
		timeout = min(timeout, time.Until(deadline)/2) // leave TCP its time
	}
	attempt, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	raceedge.Release()
	c, err := connect(attempt, p, r)
	if err == nil {
		dialBackoff.answered(key)
		return c, nil
	}
	// Only silence is worth a backoff: answers cost no time. If the dialer's own time is
	// up or the attempt was very short, it proves nothing; if it was shortened, not much.
	switch {
	case ctx.Err() != nil:
	case answered(err):
		dialBackoff.answered(key)
	case reasonOf(err) == ReasonTimeout && timeout >= minSilence:
		dialBackoff.timedOut(key, time.Now(), timeout == whole)
	}
	return nil, err
}

// connectTries is how often a listener may leave before a dial does without it: the second
// time it is the one that has taken over from the first.
const connectTries = 2

// connect connects and negotiates.
func connect(ctx context.Context, p provider, r request) (net.Conn, error) {
	for try := 1; ; try++ {
		t, err := p.dial(ctx, r)
		if err != nil {
			return nil, err
		}
		s, err := negotiate(ctx, t, r.session)
		if err == nil {
			return newConn(p.name(), s, t), nil
		}
		if try == connectTries || !errors.Is(err, errListenerLeft) {
			return nil, err
		}
	}
}
