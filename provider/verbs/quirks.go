package verbs

import (
	"errors"
	"fmt"
	"math/bits"
	"os"
	"syscall"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/session"
)

// What single devices need or do not do. Paths of drivers are below drivers/infiniband of Linux, those
// of libraries below providers of rdma-core.

const (
	rxeVendor  = 0xffffff // Soft-RoCE: RXE_VENDOR_ID in sw/rxe/rxe_param.h
	siwVendor  = 0x626d74 // Soft-iWARP: SIW_VENDOR_ID in sw/siw/siw.h
	mlxVendor  = 0x02c9   // mlx4 and mlx5: Mellanox's OUI, from the firmware (mlx5_query_mad_ifc_vendor_id in hw/mlx5/mad.c)
	manaVendor = 0x1414   // Azure's: PCI_VENDOR_ID_MICROSOFT, which mana_ib_query_device gives (hw/mana/main.c)
)

func (h *hardware) siw() bool  { return h.iwarp() && h.caps.VendorID == siwVendor }
func (h *hardware) mana() bool { return h.caps.VendorID == manaVendor }

// retries returns how often the device repeats what is not acknowledged.
func (h *hardware) retries() uint8 {
	if h.caps.VendorID == rxeVendor {
		return retryCount - 1 // 7 means for ever there (sw/rxe/rxe_comp.c, as for RNR)
	}
	return retryCount
}

// Inline data. Devices do not report their limit, so queue pairs are created with less and less of it
// until that succeeds:
//  - hns grants less than was requested (hw/hns/hns_roce_qp.c);
//  - others refuse with EINVAL, or with ENOMEM as if memory were short: the library of
//    bnxt_re sets no errno (providers/bnxt_re);
//  - the library of mana ignores IBV_SEND_INLINE (providers/mana/wr.c): the device reads
//    the memory later, when it may already hold the next message.

// inlineSizes are the sizes to try in turn.
func (h *hardware) inlineSizes() []uint32 {
	if h.mana() {
		return []uint32{0}
	}
	return []uint32{maxInline, 128, 64, 0}
}

// The queues of mlx5 are memory of the program, which the kernel pins (ib_umem_get in hw/mlx5/qp.c and
// cq.c) and counts like registered memory. Their sizes are those of providers/mlx5: _sq_overhead,
// mlx5_calc_send_wqe, mlx5_calc_sq_size, mlx5_calc_rq_size in verbs.c, mlx5_alloc_cq_buf in cq.c. Other
// devices use less, or memory of the kernel.
const (
	mlxOverhead = 192 // of a send, which may be a bind with control, UMR, memory key and 64 bytes
	mlxSegment  = 16  // of a scatter or gather list; inline data takes multiples of it
	mlxBlock    = 64  // a send takes a multiple of it
	mlxCQE      = 64
)

// lockedByQueues returns how many bytes of locked memory the queues of an endpoint take.
func (h *hardware) lockedByQueues(sends, receives int) int {
	if h.caps.VendorID != mlxVendor {
		return 0
	}
	const inline = 4 + maxInline // with the length before it
	size := roundUp(mlxOverhead+roundUp(inline, mlxSegment), mlxBlock)
	queue := powerOfTwo(sends*size) + powerOfTwo(receives)*mlxSegment
	page := os.Getpagesize()
	return roundUp(queue, page) + roundUp(powerOfTwo(sends+receives+1)*mlxCQE, page)
}

func roundUp(n, unit int) int { return (n + unit - 1) / unit * unit }
func powerOfTwo(n int) int    { return 1 << bits.Len(uint(n-1)) }

// withoutRC returns what the error of creating a queue pair means. Drivers of mana that have only raw
// packets return EINVAL (mana_ib_create_qp in hw/mana/qp.c, before it had reliable connections), others
// EOPNOTSUPP.
func (h *hardware) withoutRC(err error) error {
	if h.mana() && errors.Is(err, syscall.EINVAL) {
		return unavailable(session.ReasonNotServed, errWithoutErrno{fmt.Errorf("verbs: the driver of %s has no reliable connections: %w", h.ctx.Name, err)})
	}
	return err
}

// reads reports whether the device reads remote memory. On iWARP the response to a read is a write (RFC
// 5040), for which the memory must be registered with RemoteWrite: the peer could write there at any
// time, and the application's memory would have to be registered for each read. So on iWARP the peer
// writes instead, to the inbox. siw does not require RemoteWrite (siw_proc_rresp in
// sw/siw/siw_qp_rx.c).
func (h *hardware) reads() bool {
	return h.caps.MaxQPInitiatorRead > 0 && (!h.iwarp() || h.siw())
}

// siw copies payload of siwShort bytes or less into the packet's header. If the payload crosses a page,
// siw takes the bytes in the second page from beyond the end of the first one instead (siw_try_1seg in
// sw/siw/siw_qp_tx.c; at least Linux 5.3 to 6.12), so that a reader gets bytes that nobody wrote. This
// end does not know whether the peer's device is siw, so on iWARP such transfers are split in two.
const (
	siwShort     = 32   // MAX_HDR_INLINE
	smallestPage = 4096 // all other page sizes are multiples of it
)

// partsOfTransfer returns how many work requests a transfer may take.
func (h *hardware) partsOfTransfer() int {
	if h.iwarp() {
		return 2
	}
	return 1
}

// firstPart returns how many of the n bytes that are sent from addr, at either end, need a work request
// of their own; 0: no split.
func (h *hardware) firstPart(addr uint64, n int) int {
	first := int(smallestPage - addr%smallestPage)
	if !h.iwarp() || n > siwShort || first >= n {
		return 0
	}
	return first
}

// libsiw cannot map a queue that the kernel has put at 0x90000 of the device's file: it takes that
// offset for its failure value (SIW_INVAL_UOBJ_KEY in include/uapi/rdma/siw-abi.h, used in
// providers/siw/siw.c). Offsets are given out from 0 upwards, page by page. So the queue of about the
// seventeenth connection fails, and each one after it, until others end. A completion queue that is
// made first, and lies across that offset, keeps all other queues from it.
const (
	siwForbidden  = 0x90000
	siwCompletion = 32 // bytes
)

// avoidForbidden is called before anything else is made on a device. It returns that completion queue,
// or nil.
func (h *hardware) avoidForbidden() (filler *ibv.CQ) {
	if h.siw() {
		filler, _ = h.ctx.CreateCQ(siwForbidden/siwCompletion+1, nil, 0)
	}
	return filler
}
