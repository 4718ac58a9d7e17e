package verbs

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
	if d.iwarp() && d.caps.VendorID == siwVendor {
		d.filler, _ = d.ctx.CreateCQ(siwForbidden/siwCompletion+1, nil, 0)
	}
}
