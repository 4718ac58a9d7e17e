package verbs

import "github.com/sanconn/san/ibv"

// rxe reports whether the device is the kernel's Soft-RoCE, where kernel threads handle
// each packet (rxe_task.c).
func (d *device) rxe() bool { return d.caps.VendorID == rxeVendor }

const rxeVendor = 0xffffff // RXE_VENDOR_ID in rxe_param.h

// mayHaveDropped reports whether a receive of a shared queue may be lost: rxe takes it for
// the first packet of a message, and if the queue pair ends before the last packet it makes
// no completion (flush_recv_queue in rxe_resp.c only says LAST_WQE_REACHED). mu is held.
func (e *Endpoint) mayHaveDropped() bool {
	return e.dev.rxe() && !e.parted && e.cfg.BufferSize > smallestMTU
}

const smallestMTU = 256 // IBTA: a message of that size is one packet, whatever the path

// rxeWithInv is what rxe sets instead of WCWithInv. On other devices that bit is about
// checksums.
const rxeWithInv ibv.WCFlags = 1 << 2
