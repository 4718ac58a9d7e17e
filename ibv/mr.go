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

	// RelaxedOrdering lets data reach memory in any order (PCIe's relaxed ordering). A completion still
	// covers all that came before it (ibv_reg_mr(3)). It is a hint: without support by device, kernel
	// and library it has no effect.
	RelaxedOrdering Access = 1 << 20
)

// MR is a memory region: a range of virtual memory whose physical pages are
// pinned and known to the device.
type MR struct {
	PD   *PD
	LKey uint32 // for SGEs of the owner
	RKey uint32 // for RDMA by peers; useless without RemoteRead or RemoteWrite
	h    cObject
}

// RegMR pins and registers length bytes at addr. It keeps no reference: the caller must keep memory of
// the Go heap alive, and its pages in place.
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

// Close deregisters the memory. Afterwards the device does not access it any more. A Close during a
// transfer makes the transfer's queue pair fail. EBUSY or EINVAL: a window is bound to the region.
func (mr *MR) Close() error { return mr.h.close("ibv_dereg_mr", mr.PD.Context.Name, sysDeregMR) }
