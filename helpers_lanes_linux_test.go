package san

import (
	"sync"

	"github.com/sanconn/san/provider/shm"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
	"github.com/sanconn/san/test/hwsim"
)

// systemLanes are the lanes over what this kernel has or, in a guest (test/guest) with RDMA devices,
// over these.
var systemLanes = sync.OnceValue(func() []lane {
	if inGuest != "" {
		return verbsLanes(inGuest)
	}
	return shmLanes
})()

// sanLanes are the lanes on which all bytes go by a SAN.
var sanLanes = func() (sans []lane) {
	for _, l := range systemLanes {
		if !l.moving {
			sans = append(sans, l)
		}
	}
	return sans
}()

// verbsLanes connect one end of the guest's cable with the other: with the send buffer only, with RDMA
// read in addition, and with RDMA read only.
func verbsLanes(dev string) []lane {
	host := map[string]string{"rxe": "10.8.0.2", "siw": "10.8.1.2", hwsim.Lane: "127.0.0.1"}[dev]
	host6 := map[string]string{"rxe": "fd08::2", "siw": "fd08:1::2"}[dev]
	with := func(name, host string, o sanconn.Options) lane {
		o.AttemptTimeout = testTimeout // the guest is slow
		return lane{name: name, provider: "verbs", policy: Require, providers: []string{"verbs"}, host: host, options: o}
	}
	spare := func(l lane) lane { l.spare = true; return l }
	withoutRead := with("verbs without RDMA read", host, sanconn.Options{Threshold: 4 << 10, Disable: session.FeatureRDMARead})
	withoutRead.spare = dev != hwsim.Lane // for the guest's drivers, the provider's tests run it
	moving := with("verbs, moving", host, sanconn.Options{})
	moving.policy, moving.moving = Prefer, true
	return []lane{
		with("verbs", host, sanconn.Options{}),
		spare(with("verbs, IPv6", host6, sanconn.Options{})),
		spare(with("verbs by messages", host, sanconn.Options{Threshold: -1})),
		with("verbs by RDMA read", host, sanconn.Options{Threshold: 4 << 10, Disable: session.FeatureRDMAWrite}),
		withoutRead,
		moving,
	}
}

func init() { roleLanes = append(roleLanes, shmLanes...) }

var shmLanes = []lane{
	{name: "shm", provider: shm.Name, policy: Require},
	{name: "shm, moving", provider: shm.Name, policy: Prefer, moving: true},
}
