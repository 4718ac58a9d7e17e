package san

import (
	"cmp"
	"context"
	"math"
	"slices"
	"time"
)

// fallbackDelay is net's default for Dialer.FallbackDelay.
const fallbackDelay = 300 * time.Millisecond

// race connects to one of the addresses. It tries those of the first one's family in turn,
// and in parallel those of the other when that takes long or fails. The loser's connection
// is closed.
func (d *Dialer) race(ctx context.Context, network string, requests []request) (dialed, error) {
	if network != "tcp" || d.NetDialer.FallbackDelay < 0 {
		return d.dialEach(ctx, network, requests)
	}
	other := func(r request) bool { return r.network != requests[0].network }
	first := slices.DeleteFunc(slices.Clone(requests), other)
	second := slices.DeleteFunc(slices.Clone(requests), func(r request) bool { return !other(r) })
	if len(second) == 0 {
		return d.dialEach(ctx, network, first)
	}

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	over := make(chan struct{})
	defer close(over)
	wait := time.NewTimer(d.headStart(ctx, first))
	defer wait.Stop()
	ours := d.enter(ctx, network, first, over)
	var theirs <-chan result
	var firstErr, secondErr error
	for {
		select {
		case r := <-ours:
			if r.err == nil {
				return r.dialed, nil
			}
			if firstErr = r.err; secondErr != nil {
				return dialed{}, firstErr
			}
			wait.Reset(0)
		case r := <-theirs:
			if r.err == nil {
				return r.dialed, nil
			}
			if secondErr = r.err; firstErr != nil {
				return dialed{}, firstErr
			}
		case <-wait.C:
			if theirs == nil {
				theirs = d.enter(ctx, network, second, over)
			}
		}
	}
}

// result is the result of dialing one family's addresses.
type result struct {
	dialed
	err error
}

// enter dials in the background, for race. A connection made after the race is closed.
func (d *Dialer) enter(ctx context.Context, network string, requests []request, over <-chan struct{}) <-chan result {
	done := make(chan result)
	go func() { // ends soon after ctx, whoever wins
		c, err := d.dialEach(ctx, network, requests)
		select {
		case done <- result{c, err}:
		case <-over:
			if err == nil {
				c.Close()
			}
		}
	}()
	return done
}

// headStart is how long the first family is tried alone. A TCP connection of the second
// must not win against a SAN that is about to answer, but the second needs a share of the
// time that there is.
func (d *Dialer) headStart(ctx context.Context, first []request) time.Duration {
	delay := cmp.Or(d.NetDialer.FallbackDelay, fallbackDelay)
	if d.Policy != Prefer || !slices.ContainsFunc(first, askable) {
		return delay
	}
	most := delay + min(first[0].attempt, math.MaxInt64-delay)
	if deadline, ok := ctx.Deadline(); ok {
		most = min(most, time.Until(deadline)/2)
	}
	return max(delay, most)
}

// askable reports whether a SAN that serves the address is going to be tried.
func askable(r request) bool {
	return slices.ContainsFunc(r.serving, func(p provider) bool { return !remembered.has(keyOf(p, r), time.Now()) })
}

// dialEach tries the addresses in turn until one connects.
func (d *Dialer) dialEach(ctx context.Context, network string, requests []request) (dialed, error) {
	var first error
	for i, r := range requests {
		ctx, cancel := share(ctx, len(requests)-i)
		c, err := d.dialOne(ctx, network, r)
		cancel()
		if err == nil {
			return c, nil
		}
		first = cmp.Or(first, err)
	}
	return dialed{}, first
}
