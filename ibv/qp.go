package ibv

import (
	"cmp"
	"syscall"
)

// SRQ is a shared receive queue: queue pairs of one protection domain take their
// receives from it.
type SRQ struct {
	PD    *PD
	Owner any // the caller's, see CQ.Owner

	h     handle
	token uint64
}

// CreateSRQ makes a shared receive queue of at least maxWR work requests with
// maxSGE elements each.
func (pd *PD) CreateSRQ(maxWR, maxSGE int) (*SRQ, error) {
	s := &SRQ{PD: pd}
	s.token = objects.add(s)
	var errno int
	s.h, errno = sysCreateSRQ(pd.h, s.token, maxWR, maxSGE)
	if errno != 0 {
		objects.remove(s.token)
		return nil, verbError("ibv_create_srq", pd.Context.Name, errno)
	}
	return s, nil
}

// PostRecv posts receives in order and returns how many were posted; on an error
// the rest was not. It does not allocate.
func (s *SRQ) PostRecv(wrs []RecvWR) (int, error) {
	if len(wrs) == 0 {
		return 0, nil
	}
	n, errno := sysPostSRQRecv(s.h, wrs)
	if errno != 0 {
		return n, verbError("ibv_post_srq_recv", s.PD.Context.Name, errno)
	}
	return n, nil
}

// Arm asks for one [EventSRQLimit] when fewer than limit receives are left.
func (s *SRQ) Arm(limit int) error {
	return verbError("ibv_modify_srq", s.PD.Context.Name, sysArmSRQ(s.h, limit))
}

// Close frees the queue. EBUSY: a queue pair still uses it.
func (s *SRQ) Close() error {
	if s.h == 0 {
		return nil
	}
	errno := sysDestroySRQ(s.h)
	if errno == 0 {
		s.h = 0
		objects.remove(s.token)
	}
	return verbError("ibv_destroy_srq", s.PD.Context.Name, errno)
}

// QPCap is the size of a queue pair (struct ibv_qp_cap).
type QPCap struct {
	SendWR     uint32 // work requests in the send queue, binds and invalidations too
	RecvWR     uint32
	SendSGE    uint32
	RecvSGE    uint32
	InlineData uint32 // bytes
}

// QPConfig says what queue pair to make. Both queues may share a CQ.
type QPConfig struct {
	PD     *PD
	SendCQ *CQ
	RecvCQ *CQ
	SRQ    *SRQ // nil: a receive queue of its own
	Cap    QPCap
}

// QP is a reliable-connected queue pair.
type QP struct {
	PD    *PD
	Num   uint32
	Cap   QPCap // as granted; InlineData is the limit, of some devices less than was asked for
	Owner any   // the caller's, see CQ.Owner

	h     handle
	cm    *ID // that it belongs to, or nil
	token uint64
}

// CreateQP makes a queue pair in state RESET, to be connected without rdma_cm:
// see [QP.Init]. With it, use [ID.CreateQP].
func CreateQP(cfg QPConfig) (*QP, error) { return createQP(nil, cfg) }

func createQP(id *ID, cfg QPConfig) (*QP, error) {
	verb := "ibv_create_qp"
	var cm handle
	if id != nil {
		verb, cm = "rdma_create_qp", id.h
	}
	if cfg.PD == nil || cfg.SendCQ == nil || cfg.RecvCQ == nil {
		return nil, verbError(verb, "without PD or CQ", int(syscall.EINVAL))
	}
	q := &QP{PD: cfg.PD, Cap: cfg.Cap, cm: id}
	q.token = objects.add(q)
	var srq handle
	if cfg.SRQ != nil {
		srq = cfg.SRQ.h
	}
	var errno int
	q.h, q.Num, errno = sysCreateQP(cm, cfg.PD.h, q.token, cfg.SendCQ.h, cfg.RecvCQ.h, srq, &q.Cap)
	if errno != 0 {
		objects.remove(q.token)
		return nil, verbError(verb, cfg.PD.Context.Name, errno)
	}
	return q, nil
}

// PostSend posts work requests in order, as one list for up to 32 of them, and
// returns how many were posted. On an error the rest were not, and with EIO perhaps
// none will be carried out. ENOMEM: the send queue is full. EINVAL: the request is
// wrong (see for example [MW.Invalidate]). It does not allocate itself, but wrs
// escapes to the heap: best reuse it.
func (q *QP) PostSend(wrs []SendWR) (int, error) {
	if len(wrs) == 0 {
		return 0, nil
	}
	n, errno := sysPostSend(q.h, wrs)
	if errno != 0 {
		return n, verbError("ibv_post_send", q.PD.Context.Name, errno)
	}
	return n, nil
}

// PostRecv posts receives in order and returns how many were posted; on an error
// the rest was not. As with PostSend.
func (q *QP) PostRecv(wrs []RecvWR) (int, error) {
	if len(wrs) == 0 {
		return 0, nil
	}
	n, errno := sysPostRecv(q.h, wrs)
	if errno != 0 {
		return n, verbError("ibv_post_recv", q.PD.Context.Name, errno)
	}
	return n, nil
}

// Close destroys the queue pair. Completions that nobody polled are lost; what
// it was doing to memory has ended when Close returns. Windows bound on it must
// be closed before. An id's queue pair must not be closed while a method of the id
// runs, but events may be taken meanwhile.
func (q *QP) Close() error {
	if q.h == 0 {
		return nil
	}
	if q.cm != nil {
		q.cm.forgetQP()
	}
	errno := sysDestroyQP(q.h)
	if errno == 0 {
		q.h = 0
		objects.remove(q.token)
	}
	return verbError("ibv_destroy_qp", q.PD.Context.Name, errno)
}

// QPState is enum ibv_qp_state.
type QPState uint32

const (
	QPReset QPState = 0
	QPInit  QPState = 1
	QPRTR   QPState = 2 // ready to receive
	QPRTS   QPState = 3 // ready to send
	QPSQD   QPState = 4
	QPSQE   QPState = 5
	QPError QPState = 6
)

func (s QPState) String() string {
	return name(s, map[QPState]string{QPReset: "RESET", QPInit: "INIT", QPRTR: "RTR", QPRTS: "RTS", QPSQD: "SQD", QPSQE: "SQE", QPError: "ERR"}, "state")
}

// QPMask says which fields of a QPAttr count (enum ibv_qp_attr_mask).
type QPMask uint32

const (
	MaskState             QPMask = 1 << 0
	MaskAccess            QPMask = 1 << 3
	MaskPKeyIndex         QPMask = 1 << 4
	MaskPort              QPMask = 1 << 5
	MaskAV                QPMask = 1 << 7 // the address: DGID … SL, Port
	MaskPathMTU           QPMask = 1 << 8
	MaskTimeout           QPMask = 1 << 9
	MaskRetryCount        QPMask = 1 << 10
	MaskRNRRetry          QPMask = 1 << 11
	MaskRQPSN             QPMask = 1 << 12
	MaskMaxReadAtomic     QPMask = 1 << 13
	MaskMinRNRTimer       QPMask = 1 << 15
	MaskSQPSN             QPMask = 1 << 16
	MaskMaxDestReadAtomic QPMask = 1 << 17
	MaskDestQPN           QPMask = 1 << 20
)

// QPAttr holds attributes of a queue pair (struct ibv_qp_attr).
type QPAttr struct {
	State             QPState
	PathMTU           MTU
	RQPSN             uint32 // packet sequence number that the peer starts at
	SQPSN             uint32 // that we start at
	DestQPN           uint32
	Access            Access // what peers may do: RemoteRead, RemoteWrite
	DGID              GID
	DLID              uint16 // InfiniBand
	Global            uint8  // 1: DGID and SGIDIndex count; always on RoCE
	SGIDIndex         uint8
	HopLimit          uint8
	Port              uint8
	MaxReadAtomic     uint8 // RDMA reads that we issue at a time
	MaxDestReadAtomic uint8 // that we serve at a time
	MinRNRTimer       uint8 // code of what we tell peers to wait: 0 is 655 ms, 1 is 10 µs
	Timeout           uint8 // exponent: 4.096 µs × 2^Timeout to an acknowledgement
	RetryCount        uint8 // 0 … 7; 7 is for ever on rxe
	RNRRetry          uint8 // 0 … 7; 7 is for ever
}

// Modify changes the attributes in mask (ibv_modify_qp). To [QPError]: what was
// posted is flushed, and completes with [WRFlushErr].
func (q *QP) Modify(attr QPAttr, mask QPMask) error {
	return verbError("ibv_modify_qp", q.PD.Context.Name, sysModifyQP(q.h, &attr, mask))
}

// Query asks for the attributes in mask (ibv_query_qp); devices may fill more.
func (q *QP) Query(mask QPMask) (QPAttr, error) {
	attr, errno := sysQueryQP(q.h, mask)
	return attr, verbError("ibv_query_qp", q.PD.Context.Name, errno)
}

// hopLimit is IP's default time to live (ip(7)).
const hopLimit = 64

// The way to a connection without rdma_cm, on InfiniBand and RoCE: the two
// sides tell each other their QPPeer by other means, then each calls Init, posts
// its first receives, and calls ReadyToReceive and ReadyToSend. iWARP cannot.

// QPPeer is what a side needs to know of the other.
type QPPeer struct {
	QPNum uint32
	PSN   uint32 // that its first packet will have, 24 bits, best random
	GID   GID
	LID   uint16 // InfiniBand only
}

// QPPath is the rest: our own end and how the connection shall behave.
type QPPath struct {
	Port           uint8  // local, from 1
	GIDIndex       uint8  // local: of the entry with our address, RoCE v2
	PSN            uint32 // that our first packet has
	MTU            MTU    // both sides the same: the smaller of the two active ones
	ReadsIssued    uint8  // at most what the peer serves
	ReadsServed    uint8
	MinRNRTimer    uint8 // see QPAttr; 0 means 1, as 655 ms serve nobody
	Timeout        uint8 // see QPAttr; 0 means 14 (67 ms), as no timeout means to hang
	RetryCount     uint8
	PeerIsOnSubnet bool // InfiniBand: address by LID alone
}

// Init brings a queue pair from RESET to INIT: receives may be posted.
func (q *QP) Init(port uint8, peers Access) error {
	return q.Modify(QPAttr{State: QPInit, Port: port, Access: peers}, MaskState|MaskPKeyIndex|MaskPort|MaskAccess)
}

// ReadyToReceive brings a queue pair from INIT to RTR: it answers the peer.
func (q *QP) ReadyToReceive(path QPPath, peer QPPeer) error {
	attr := QPAttr{
		State: QPRTR, PathMTU: path.MTU, DestQPN: peer.QPNum, RQPSN: peer.PSN,
		MaxDestReadAtomic: path.ReadsServed, MinRNRTimer: cmp.Or(path.MinRNRTimer, 1),
		Port: path.Port, DLID: peer.LID,
	}
	if !path.PeerIsOnSubnet {
		attr.Global, attr.DGID, attr.SGIDIndex = 1, peer.GID, path.GIDIndex
		attr.HopLimit = hopLimit
	}
	return q.Modify(attr, MaskState|MaskAV|MaskPathMTU|MaskDestQPN|MaskRQPSN|MaskMaxDestReadAtomic|MaskMinRNRTimer)
}

// ReadyToSend brings a queue pair from RTR to RTS.
func (q *QP) ReadyToSend(path QPPath) error {
	return q.Modify(QPAttr{
		State: QPRTS, SQPSN: path.PSN, MaxReadAtomic: path.ReadsIssued,
		Timeout: cmp.Or(path.Timeout, 14), RetryCount: path.RetryCount,
	}, MaskState|MaskTimeout|MaskRetryCount|MaskRNRRetry|MaskSQPSN|MaskMaxReadAtomic)
}
