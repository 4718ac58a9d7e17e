package verbs

import "github.com/sanconn/san/ibv"

// rxe says whether the device is the kernel's Soft-RoCE. Each packet is a piece of work
// for one of the kernel's threads (rxe_task.c).
func (d *device) rxe() bool { return d.caps.VendorID == rxeVendor }

const rxeVendor = 0xffffff // RXE_VENDOR_ID in rxe_param.h

// mayHaveDropped says whether a receive of a shared queue may be lost: rxe takes it for the
// first packet of a message, and when the queue pair ends before the last one nobody hears
// of it (flush_recv_queue in rxe_resp.c says LAST_WQE_REACHED, and no more). mu is held.
func (e *Endpoint) mayHaveDropped() bool {
	return e.dev.rxe() && !e.parted && e.cfg.BufferSize > smallestMTU
}

const smallestMTU = 256 // IBTA: a message of that size is one packet, whatever the path

// rxeWithInv is what rxe sets instead of WCWithInv. Elsewhere that bit speaks of
// checksums.
const rxeWithInv ibv.WCFlags = 1 << 2
