package verbs

import "github.com/sanconn/san/ibv"

// rxe says whether the device is the kernel's Soft-RoCE. Each packet is a piece of work
// for one of the kernel's threads (rxe_task.c).
func (d *device) rxe() bool { return d.caps.VendorID == rxeVendor }

const rxeVendor = 0xffffff // RXE_VENDOR_ID in rxe_param.h

// rxeWithInv is what rxe sets instead of WCWithInv. Elsewhere that bit speaks of
// checksums.
const rxeWithInv ibv.WCFlags = 1 << 2
