package verbs

import (
	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/session"
)

// domain is a protection domain and the registrations in it. A key must not serve the peer of another
// connection (rule R2). A window's key belongs to its queue pair. So if windows can be trusted, all
// connections of a device share one domain, and memory is registered once for all of them; otherwise
// each connection has its own domain.
type domain struct {
	pd     *ibv.PD
	cache  *regcache.Cache
	shared bool // by connections of its device, which owns it
}

// sharesDomain reports whether a new endpoint uses the shared domain. By default it does only if it
// exposes memory by windows alone, and the device is known to enforce them. So connections with
// Config.SharedDomain and without windows expose only their own memory to each other's peers.
func (d *device) sharesDomain(cfg Config) bool {
	return cfg.SharedDomain || d.mayHaveWindows(cfg) && d.windows.Load()
}

// useDomain returns the domain for a new endpoint. The endpoint closes a domain that is not shared.
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
		// After a fork this process may have other pages. Then what a device wrote to the heap would be
		// lost, and what it read from there would be stale.
		ArenaOnly: !ibv.ForkSafe(),
	})
	return &domain{pd: pd, cache: cache}, nil
}

func (dom *domain) close() {
	dom.cache.Close()
	dom.pd.Close()
}

// registrar registers memory in a protection domain, for the cache.
type registrar struct {
	pd       *ibv.PD
	arriving ibv.Access // the access for memory that a device writes to
}

// arriving returns the access for large transfers into memory. With relaxed ordering, which some hosts
// need for the full speed of the line, they may arrive in any order. That is safe, because nothing is
// read before a completion that covers all of it: a read's own completion, or that of the message after
// an RDMA write (Fill). Binding a window has no flag for it.
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
