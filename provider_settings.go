package san

import (
	"cmp"
	"net/netip"
	"time"

	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

const (
	// defaultAttemptTimeout bounds an attempt over a SAN: many times longer than an
	// attempt that is answered, and a delay that a user tolerates once.
	defaultAttemptTimeout = 500 * time.Millisecond

	// requireAttemptTimeout is the bound if there is nothing to fall back to. Then
	// an attempt must not fail only because processors are busy.
	requireAttemptTimeout = 10 * time.Second
)

// settings are what dialers and listeners hand down to providers.
type settings struct {
	session session.Config
	local   bool          // Options.LocalAddresses
	attempt time.Duration // bounds an attempt to connect
	backlog int           // connections that wait for accept
	v6only  bool          // for listen: take no IPv4
	zone    string        // for listen: the zone of the address that was given
	source  netip.Addr    // for dial: the local address that the program has chosen, or zero

	// For listen: where another process of the same TCP socket listens, wait for its end.
	takeOver bool

	// Of verbs:
	rdma         RDMA
	subnets      []netip.Prefix // that it may serve; nil: all
	sharedDomain bool
}

// settle returns the settings for a dialer's or listener's options.
func settle(o sanconn.Options, rdma RDMA, policy Policy, env environment, backlog int) settings {
	s := settings{
		session:      sessionConfig(o),
		local:        o.LocalAddresses,
		attempt:      o.AttemptTimeout,
		backlog:      backlog,
		rdma:         rdma,
		subnets:      env.subnets,
		sharedDomain: env.sharedDomain,
	}
	s.rdma.IWARPOffset = cmp.Or(s.rdma.IWARPOffset, env.rdma.IWARPOffset)
	s.rdma.WithoutCM = s.rdma.WithoutCM || env.rdma.WithoutCM
	s.rdma.TrafficClass = cmp.Or(s.rdma.TrafficClass, env.rdma.TrafficClass)
	s.rdma.ServiceLevel = cmp.Or(s.rdma.ServiceLevel, env.rdma.ServiceLevel)
	s.rdma.AckTimeout = cmp.Or(s.rdma.AckTimeout, env.rdma.AckTimeout)
	switch {
	case s.attempt > 0:
	case policy == Require:
		s.attempt = requireAttemptTimeout
	default:
		s.attempt = defaultAttemptTimeout
	}
	s.session.Disable |= env.disable
	return s
}

// sessionConfig returns the options that the session uses.
func sessionConfig(o sanconn.Options) session.Config {
	return session.Config{
		Threshold:     o.Threshold,
		ReceiveBudget: o.ReceiveBudget,
		SendBudget:    o.SendBudget,
		Spin:          o.Spin,
		KeepAlive:     o.KeepAlive,
		CancelTimeout: o.CancelTimeout,
		CloseTimeout:  o.CloseTimeout,
		Disable:       o.Disable,
	}
}
