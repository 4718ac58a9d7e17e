package ibv

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

// QPMask is the set of fields of a QPAttr that count (enum ibv_qp_attr_mask).
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
	RQPSN             uint32 // packet sequence number of the peer's first packet
	SQPSN             uint32 // packet sequence number of this end's first packet
	DestQPN           uint32
	Access            Access // what peers may do: RemoteRead, RemoteWrite
	DGID              GID
	DLID              uint16 // InfiniBand
	Global            uint8  // 1: DGID and SGIDIndex count; always on RoCE
	SGIDIndex         uint8
	HopLimit          uint8
	Port              uint8
	MaxReadAtomic     uint8  // RDMA reads that this end issues at a time
	MaxDestReadAtomic uint8  // RDMA reads that this end serves at a time
	MinRNRTimer       uint8  // code for how long peers wait for a receive here: 0 is 655 ms, 1 is 10 µs
	Timeout           uint8  // exponent: 4.096 µs × 2^Timeout until an acknowledgement
	RetryCount        uint8  // 0 … 7; 7 is for ever on rxe
	RNRRetry          uint8  // 0 … 7; 7 is for ever
	TrafficClass      uint8  // of the GRH; on RoCE v2 the IP header's TOS or traffic class
	SL                uint8  // service level, 0 … 15
	PKeyIndex         uint16 // of the port's table of partition keys
}

// Modify changes the attributes in mask (ibv_modify_qp). A change to [QPError] flushes what was posted,
// which completes with [WRFlushErr].
func (q *QP) Modify(attr QPAttr, mask QPMask) error {
	return verbError("ibv_modify_qp", q.PD.Context.Name, sysModifyQP(q.h, &attr, mask))
}

// Query returns the attributes in mask (ibv_query_qp); devices may fill more.
func (q *QP) Query(mask QPMask) (QPAttr, error) {
	attr, errno := sysQueryQP(q.h, mask)
	return attr, verbError("ibv_query_qp", q.PD.Context.Name, errno)
}
