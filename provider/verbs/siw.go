package verbs

// siw says whether the device is the kernel's Soft-iWARP. It wants no more than the
// local right to write for the memory that a read goes to (siw_proc_rresp in
// siw_qp_rx.c), where iWARP asks for the remote one: so that memory stays
// registered, and is none of the peer's business.
func (d *device) siw() bool { return d.iwarp() && d.caps.VendorID == siwVendor }

// libsiw cannot map a queue that the kernel has put at 0x90000 of the device's
// file: there it takes the place for the sign of a failure (SIW_INVAL_UOBJ_KEY).
// Places are given out from 0 upwards, page by page, so that the queue of some
// seventeenth connection fails, and each after it, until others end. A completion
// queue that is made first, and lies across that place, keeps it from all others.
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

// What siw sends of siwShort bytes or less it copies into the packet's header,
// and what crosses a page it cuts at the wrong place: as many bytes as lie in the
// second page are taken from the first, beyond its end (siw_try_1seg in
// siw_qp_tx.c; Linux 5.3 to 6.12 at least). A reader gets bytes that nobody
// wrote. Whether the peer's device is a siw is not known, so on iWARP all who ask
// for such bytes ask twice.
const (
	siwShort = 32   // MAX_HDR_INLINE
	siwPage  = 4096 // the smallest: the end of any other is the end of such a one
)

// siwSplit is how many bytes of n at an address have to go alone; 0: none.
func siwSplit(addr uint64, n int) int {
	first := int(siwPage - addr%siwPage)
	if n > siwShort || first >= n {
		return 0
	}
	return first
}
