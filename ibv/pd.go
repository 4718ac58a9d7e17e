package ibv

// PD is a protection domain: queue pairs use memory of their own domain only.
type PD struct {
	Context *Context
	h       cObject
}

// AllocPD makes a protection domain.
func (c *Context) AllocPD() (*PD, error) {
	h, errno := sysAllocPD(c.h)
	if errno != 0 {
		return nil, verbError("ibv_alloc_pd", c.Name, errno)
	}
	return &PD{Context: c, h: h}, nil
}

// Close frees the domain. It fails with EBUSY while something in it is still open.
func (pd *PD) Close() error { return pd.h.close("ibv_dealloc_pd", pd.Context.Name, sysDeallocPD) }
