package ibv

import (
	"fmt"
	"syscall"
)

// Access is what may be done to registered memory (enum ibv_access_flags). Local
// reads are always allowed.
type Access uint32

const (
	LocalWrite  Access = 1 << 0 // receives and the sinks of RDMA reads need it
	RemoteWrite Access = 1 << 1 // needs LocalWrite as well
	RemoteRead  Access = 1 << 2
	MWBind      Access = 1 << 4 // memory windows may be bound to it; needs writable pages
)

// PD is a protection domain: queue pairs use memory of their own domain only.
type PD struct {
	Context *Context
	h       handle
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
func (pd *PD) Close() error {
	if pd.h == 0 {
		return nil
	}
	errno := sysDeallocPD(pd.h)
	if errno == 0 {
		pd.h = 0
	}
	return verbError("ibv_dealloc_pd", pd.Context.Name, errno)
}

// MR is a memory region: a range of virtual memory whose physical pages are
// pinned and known to the device.
type MR struct {
	PD   *PD
	LKey uint32 // for SGEs of the owner
	RKey uint32 // for RDMA by peers; useless without RemoteRead or RemoteWrite
	h    handle
}

// RegMR pins and registers length bytes at addr. It keeps no reference: the caller
// has to keep memory of the Go heap alive, and its pages in place.
//
// ENOMEM: RLIMIT_MEMLOCK is used up; every registration counts against it, even a
// second one of the same pages. EFAULT: the memory is not mapped, or not writable
// though LocalWrite or MWBind need that. EINVAL: length is not positive.
func (pd *PD) RegMR(addr uintptr, length int, access Access) (*MR, error) {
	mr := &MR{PD: pd}
	errno := int(syscall.EINVAL)
	if length > 0 {
		mr.h, mr.LKey, mr.RKey, errno = sysRegMR(pd.h, addr, length, access)
	}
	if errno != 0 {
		return nil, verbError("ibv_reg_mr", fmt.Sprintf("%d bytes on %s", length, pd.Context.Name), errno)
	}
	return mr, nil
}

// Close deregisters the memory: after that the device no longer touches it. In the
// middle of a transfer this makes the transfer's queue pair fail. EBUSY or EINVAL: a
// window is bound to the region.
func (mr *MR) Close() error {
	if mr.h == 0 {
		return nil
	}
	errno := sysDeregMR(mr.h)
	if errno == 0 {
		mr.h = 0
	}
	return verbError("ibv_dereg_mr", mr.PD.Context.Name, errno)
}

// MW is a memory window of type 2: a key for remote access to a part of a
// memory region, bound and invalidated by work requests of one queue pair.
//
// A window has to be closed before the queue pair that it was bound on, and that
// before the region; in any other order the kernel may take a minute. Devices differ
// in what they enforce of windows: probe a device before trusting it.
type MW struct {
	PD *PD
	h  handle
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
func (mw *MW) Close() error {
	if mw.h == 0 {
		return nil
	}
	errno := sysDeallocMW(mw.h)
	if errno == 0 {
		mw.h = 0
	}
	return verbError("ibv_dealloc_mw", mw.PD.Context.Name, errno)
}

// Bind makes wr the work request that binds the window to length bytes at addr
// of mr, which was registered with MWBind, and returns the key under which peers
// will have access when it has completed. The window must be unbound; until wr
// is posted it must not be bound again. ID and flags of wr stay the caller's.
func (mw *MW) Bind(wr *SendWR, mr *MR, addr uintptr, length int, access Access) (rkey uint32) {
	key := sysMWKey(mw.h)
	rkey = key&^0xff | (key+1)&0xff // the consumer owns the low byte (ibv_inc_rkey)
	wr.Opcode = OpBindMW
	wr.NumSGE = 0
	wr.RemoteAddr, wr.RemoteKey = uint64(addr), rkey
	wr.mw, wr.mr = uint64(mw.h), uint64(mr.h)
	wr.bindLength, wr.bindAccess = uint64(length), access
	return rkey
}

// Invalidate makes wr the work request that takes away the access under rkey.
// Posting it fails with EINVAL when the window is not bound under that key:
// some kernels do not survive an invalidation of an unbound window.
func (mw *MW) Invalidate(wr *SendWR, rkey uint32) {
	wr.Opcode = OpLocalInv
	wr.NumSGE = 0
	wr.InvKey = rkey
	wr.mw = uint64(mw.h)
}
