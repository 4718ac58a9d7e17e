package ibv

// MW is a memory window of type 2: a key for remote access to a part of a
// memory region, bound and invalidated by work requests of one queue pair.
//
// A window has to be closed before the queue pair that it was bound on, and that
// before the region; in any other order the kernel may take a minute. Devices differ
// in what they enforce of windows: probe a device before trusting it.
type MW struct {
	PD *PD
	h  cObject
}

// AllocMW makes an unbound window. EOPNOTSUPP: the device has none.
func (pd *PD) AllocMW() (*MW, error) {
	h, errno := sysAllocMW(pd.h)
	if errno != 0 {
		return nil, verbError("ibv_alloc_mw", pd.Context.Name, errno)
	}
	return &MW{PD: pd, h: h}, nil
}

// Close frees the window, and ends the access of one that is bound.
func (mw *MW) Close() error { return mw.h.close("ibv_dealloc_mw", mw.PD.Context.Name, sysDeallocMW) }

// Bind makes wr the work request that binds the window to length bytes at addr of mr, which must be
// registered with MWBind. It returns the key by which peers have access once the request has completed.
// The window must be unbound; until wr is posted it must not be bound again. Bind leaves ID and Flags
// of wr to the caller.
func (mw *MW) Bind(wr *SendWR, mr *MR, addr uintptr, length int, access Access) (rkey uint32) {
	key := sysMWKey(mw.h)
	rkey = key&^0xff | (key+1)&0xff // the consumer owns the low byte (ibv_inc_rkey)
	wr.Opcode, wr.SGE = OpBindMW, SGE{}
	wr.RemoteAddr, wr.RemoteKey = uint64(addr), rkey
	wr.mw, wr.mr = uint64(mw.h), uint64(mr.h)
	wr.bindLength, wr.bindAccess = uint64(length), access
	return rkey
}

// Invalidate makes wr the work request that ends the access by rkey. Posting it fails with EINVAL if
// the window is not bound with that key: some kernels do not survive an invalidation of an unbound
// window.
func (mw *MW) Invalidate(wr *SendWR, rkey uint32) {
	wr.Opcode, wr.SGE = OpLocalInv, SGE{}
	wr.InvKey = rkey
	wr.mw = uint64(mw.h)
}
