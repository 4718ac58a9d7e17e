package verbs

// siw reports whether the device is the kernel's Soft-iWARP. For the sink of an RDMA read
// it needs only LocalWrite (siw_proc_rresp in siw_qp_rx.c), where iWARP demands
// RemoteWrite: so that memory can stay registered, and the peer cannot write to it.
func (d *device) siw() bool { return d.iwarp() && d.caps.VendorID == siwVendor }

// libsiw cannot map a queue that the kernel has put at 0x90000 of the device's
// file: it mistakes that offset for its failure value (SIW_INVAL_UOBJ_KEY). Offsets are
// given out from 0 upwards, page by page, so that the queue of about the seventeenth
// connection fails, and each after it, until others end. A completion queue that is made
// first, and lies across that offset, keeps it from all others.
const (
	siwVendor     = 0x626d74
	siwForbidden  = 0x90000
	siwCompletion = 32 // bytes
)

// avoidForbidden is called before anything else is made on a device.
func (d *device) avoidForbidden() {
	if d.siw() {
		d.filler, _ = d.ctx.CreateCQ(siwForbidden/siwCompletion+1, nil, 0)
	}
}

// siw copies payload of siwShort bytes or less into the packet's header. If it crosses a
// page, the bytes in the second page are taken from beyond the end of the first instead
// (siw_try_1seg in siw_qp_tx.c; Linux 5.3 to 6.12 at least), so that a reader gets bytes
// that nobody wrote. We do not know whether the peer's device is siw, so on iWARP such
// transfers are split in two.
const (
	siwShort = 32   // MAX_HDR_INLINE
	siwPage  = 4096 // the smallest page size, of which all others are multiples
)

// siwSplit is how many of the n bytes at addr go in a first part; 0: no split.
func siwSplit(addr uint64, n int) int {
	first := int(siwPage - addr%siwPage)
	if n > siwShort || first >= n {
		return 0
	}
	return first
}
