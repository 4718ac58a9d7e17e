package san

import (
	"cmp"
	"net/netip"
	"time"

	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

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
func settle(o sanconn.Options, rdma RDMA, policy Policy, dir string, env *environment) settings {
	s := settings{
		session: session.Config{
			Threshold:     o.Threshold,
			ReceiveBudget: o.ReceiveBudget,
			SendBudget:    o.SendBudget,
			Spin:          o.Spin,
			KeepAlive:     o.KeepAlive,
			CancelTimeout: o.CancelTimeout,
			CloseTimeout:  o.CloseTimeout,
			Disable:       o.Disable | env.disable,
			Trace:         env.trace,
		},
		attempt:      o.AttemptTimeout,
		dir:          cmp.Or(dir, env.shmDir),
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
		s.attempt = requireTimeout
	default:
		s.attempt = moveTimeout
	}
	return s
}
