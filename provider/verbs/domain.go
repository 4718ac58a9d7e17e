package verbs

import (
	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/session"
)

// domain is a protection domain and the registrations in it. No key may serve another
// connection's peer (rule R2): a window's belongs to its queue pair, so where windows can
// be trusted there is one domain for all connections of a device, and memory is registered
// once for all of them; elsewhere each connection has its own.
type domain struct {
	pd     *ibv.PD
	cache  *regcache.Cache
	shared bool // by connections of its device, which keeps it
}

// sharesDomain reports whether a new endpoint is in the shared domain. By default it is
// only if it exposes no memory but by windows, as the device is known to enforce them, so that what
// connections with Config.SharedDomain and without windows expose there is their own risk alone.
func (d *device) sharesDomain(cfg Config) bool {
	return cfg.SharedDomain || d.mayHaveWindows(cfg) && d.windows.Load()
}

// useDomain gives the domain for a new endpoint, which closes one that is not shared.
func (d *device) useDomain(cfg Config) (*domain, error) {
	if !d.sharesDomain(cfg) {
		return d.newDomain(cfg)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.shared == nil {
		shared, err := d.newDomain(cfg)
		if err != nil {
			return nil, err
		}
		shared.shared = true
		d.shared = shared
	}
	return d.shared, nil
}

func (d *device) newDomain(cfg Config) (*domain, error) {
	pd, err := d.ctx.AllocPD()
	if err != nil {
		return nil, err
	}
	cache := regcache.New(registrar{pd, arriving(cfg)}, regcache.Config{
		Disabled:        cfg.Disable&session.FeatureRegCache != 0,
		MaxRegistration: d.most.registration,
		// What a device wrote to the heap after a fork would be lost, and what it read from
		// there stale: this process may have other pages then.
		ArenaOnly: !ibv.ForkSafe(),
	})
	return &domain{pd: pd, cache: cache}, nil
}

func (dom *domain) close() {
	dom.cache.Close()
	dom.pd.Close()
}

// registrar registers memory with a protection domain, for the cache.
type registrar struct {
	pd       *ibv.PD
	arriving ibv.Access // of what a device writes to
}

// arriving is how large transfers may reach memory. With relaxed ordering, which some hosts
// need for the speed of the line, they do in any order. That is safe as nothing is looked at
// but behind a completion, which covers all before it: a read's own, or that of the message
// behind an RDMA write (Fill). A window's bind has no flag for it.
func arriving(cfg Config) ibv.Access {
	if cfg.Disable&session.FeatureRelaxed != 0 {
		return ibv.LocalWrite
	}
	return ibv.LocalWrite | ibv.RelaxedOrdering
}

func (r registrar) Register(addr uintptr, n int, access regcache.Access) (regcache.MR, error) {
	mr, err := r.pd.RegMR(addr, n, r.verbs(access))
	if err != nil {
		return regcache.MR{}, limited(err)
	}
	return regcache.MR{LKey: mr.LKey, RKey: mr.RKey, Ref: mr}, nil
}

func (r registrar) Deregister(mr regcache.MR) error { return mr.Ref.(*ibv.MR).Close() }

func (r registrar) verbs(a regcache.Access) (v ibv.Access) {
	for _, pair := range [...]struct {
		from regcache.Access
		to   ibv.Access
	}{
		{regcache.LocalWrite, r.arriving},
		{regcache.RemoteRead, ibv.RemoteRead},
		{regcache.RemoteWrite, ibv.RemoteWrite | r.arriving},
		{regcache.BindWindow, ibv.MWBind},
	} {
		if a&pair.from != 0 {
			v |= pair.to
		}
	}
	return v
}
