package san

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sanconn/san/internal/environment"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

// processEnvironment reads the environment once, because the answer must not change between
// connections.
var processEnvironment = sync.OnceValue(func() *environment.Values { return environment.Read(providerNames()) })

// choice is what connections may move to, and how.
type choice struct {
	providers []provider   // in order of preference
	without   *Unavailable // why there are none, or none is tried
	settings  settings
}

// choose returns what the environment leaves of what a dialer or listener has set. It is an error
// if want, a Providers field, has an unknown name, or the environment is not understood.
func choose(policy Policy, want []string, o sanconn.Options, rdma RDMA, dir string) (choice, error) {
	env := processEnvironment()
	c := choice{settings: settle(o, rdma, policy, dir, env)}
	known := providerNames()
	if env.Err != nil {
		return c, env.Err
	}
	for _, name := range want {
		if !slices.Contains(known, name) {
			return c, fmt.Errorf("san: unknown provider %q in Providers; known are %s", name, strings.Join(known, ", "))
		}
	}
	switch {
	case want == nil && env.Restricted:
		want = env.Providers
	case want == nil:
		want = known
	}
	disabled := len(want) == 0
	for _, name := range want {
		i := slices.IndexFunc(registry, func(p provider) bool { return p.name() == name })
		switch {
		case !env.Allows(name):
			disabled = true
		case i >= 0 && !slices.Contains(c.providers, registry[i]):
			c.providers = append(c.providers, registry[i])
		}
	}
	switch {
	case policy == Never:
		c.providers, c.without = nil, &Unavailable{Reason: ReasonPolicy}
	case len(c.providers) > 0:
	case disabled:
		c.without = &Unavailable{Reason: ReasonDisabled}
	default:
		c.without = &Unavailable{Reason: ReasonNoProvider}
	}
	return c, nil
}

// standard are the providers of the project, in order of preference, even those that this
// build does not have.
var standard = []string{"shm", "verbs"}

// providerNames are all that Providers and SAN_PROVIDERS may name, in order of preference.
func providerNames() (names []string) {
	for _, p := range registry {
		names = append(names, p.name())
	}
	for _, name := range standard {
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

// settings are what dialers and listeners hand down to providers.
type settings struct {
	session session.Config
	attempt time.Duration // bounds an attempt to move
	v6only  bool          // for listen: take no IPv4
	zone    string        // for listen: the zone of the address that was given

	// Of shm:
	dir string // for other network namespaces of this host; "": none

	// Of verbs:
	rdma         RDMA
	subnets      []netip.Prefix // that it may serve; nil: all
	sharedDomain bool
}

// settle returns the settings for a dialer's or listener's options.
func settle(o sanconn.Options, rdma RDMA, policy Policy, dir string, env *environment.Values) settings {
	s := settings{
		session: session.Config{
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
		attempt:      o.AttemptTimeout,
		dir:          cmp.Or(dir, env.ShmDir),
		rdma:         rdma,
		subnets:      env.Subnets,
		sharedDomain: env.SharedDomain,
	}
	s.rdma.IWARPOffset = cmp.Or(s.rdma.IWARPOffset, env.IWARPOffset)
	s.rdma.WithoutCM = s.rdma.WithoutCM || env.WithoutCM
	s.rdma.TrafficClass = cmp.Or(s.rdma.TrafficClass, env.TrafficClass)
	s.rdma.ServiceLevel = cmp.Or(s.rdma.ServiceLevel, env.ServiceLevel)
	s.rdma.AckTimeout = cmp.Or(s.rdma.AckTimeout, env.AckTimeout)
	switch {
	case s.attempt > 0:
	case policy == Require:
		s.attempt = requireTimeout
	default:
		s.attempt = moveTimeout
	}
	return s
}
