package san

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sanconn/san/internal/environment"
	"github.com/sanconn/san/internal/moving"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

// processEnvironment reads the environment once, because the settings must not change between
// connections.
var processEnvironment = sync.OnceValue(func() *environment.Values { return environment.Read(moving.Names()) })

// moveTimeout bounds an attempt to move. requireTimeout bounds an attempt that the program waits for:
// it is longer, so that the attempt does not fail only because processors are busy.
const (
	moveTimeout    = 2 * time.Second
	requireTimeout = 10 * time.Second
)

// choose returns what a dialer or listener may use by its own settings and the environment. It fails if
// want, a Providers field, has an unknown name, or if the environment is not understood.
func choose(policy Policy, want []string, o sanconn.Options, rdma RDMA, dir string) (moving.Choice, error) {
	env := processEnvironment()
	c := moving.Choice{Settings: settingsOf(o, rdma, policy, dir, env)}
	if env.Err != nil {
		return c, env.Err
	}
	for _, name := range want {
		if known := moving.Names(); !slices.Contains(known, name) {
			return c, fmt.Errorf("san: unknown provider %q in Providers; known are %s", name, strings.Join(known, ", "))
		}
	}
	if want == nil {
		want = env.Providers
	}
	disabled := len(want) == 0
	c.Providers = make([]moving.Provider, 0, len(want))
	for _, name := range want {
		i := slices.IndexFunc(moving.Registry, func(p moving.Provider) bool { return p.Name() == name })
		switch {
		case !slices.Contains(env.Providers, name):
			disabled = true
		case i >= 0 && !slices.Contains(c.Providers, moving.Registry[i]):
			c.Providers = append(c.Providers, moving.Registry[i])
		}
	}
	switch {
	case policy == Never:
		c.Providers, c.Without = nil, &Unavailable{Reason: ReasonPolicy}
	case len(c.Providers) > 0:
	case disabled:
		c.Without = &Unavailable{Reason: ReasonDisabled}
	default:
		c.Without = &Unavailable{Reason: ReasonNoProvider}
	}
	return c, nil
}

// settingsOf returns the settings for a dialer's or listener's options.
func settingsOf(o sanconn.Options, rdma RDMA, policy Policy, dir string, env *environment.Values) moving.Settings {
	s := moving.Settings{
		Session: session.Config{
			Threshold:     o.Threshold,
			ReceiveBudget: o.ReceiveBudget,
			SendBudget:    o.SendBudget,
			Spin:          o.Spin,
			KeepAlive:     o.KeepAlive,
			CancelTimeout: o.CancelTimeout,
			CloseTimeout:  o.CloseTimeout,
			Disable:       o.Disable | env.Disable,
			Trace:         env.Trace,
		},
		Attempt:      o.AttemptTimeout,
		Dir:          cmp.Or(dir, env.ShmDir),
		RDMA:         moving.RDMA(rdma),
		Subnets:      env.Subnets,
		SharedDomain: env.SharedDomain,
	}
	s.RDMA.IWARPOffset = cmp.Or(s.RDMA.IWARPOffset, env.IWARPOffset)
	s.RDMA.WithoutCM = s.RDMA.WithoutCM || env.WithoutCM
	s.RDMA.TrafficClass = cmp.Or(s.RDMA.TrafficClass, env.TrafficClass)
	s.RDMA.ServiceLevel = cmp.Or(s.RDMA.ServiceLevel, env.ServiceLevel)
	s.RDMA.AckTimeout = cmp.Or(s.RDMA.AckTimeout, env.AckTimeout)
	switch {
	case s.Attempt > 0:
	case policy == Require:
		s.Attempt = requireTimeout
	default:
		s.Attempt = moveTimeout
	}
	return s
}
