package ibv

// MaxSGE is the most scatter/gather elements in a work request. A header and a body
// that wraps around the end of a ring need three. Devices may allow fewer, see
// [Caps].
const MaxSGE = 4

// SGE is a piece of registered local memory.
type SGE struct {
	Addr   uint64
	Length uint32 // bytes
	LKey   uint32
}

// Opcode is what a send work request does (enum ibv_wr_opcode).
type Opcode uint32

const (
	OpWrite        Opcode = 0 // RDMA write
	OpWriteWithImm Opcode = 1 // iWARP has none
	OpSend         Opcode = 2
	OpSendWithImm  Opcode = 3
	OpRead         Opcode = 4
	OpLocalInv     Opcode = 7 // use MW.Invalidate
	OpBindMW       Opcode = 8 // use MW.Bind
	// OpSendWithInv also invalidates InvKey at the peer. A second one for a key
	// panics some peers' kernels.
	OpSendWithInv Opcode = 9
)

// SendFlags is enum ibv_send_flags.
type SendFlags uint32

const (
	Signaled  SendFlags = 1 << 1 // make a completion; failures always make one
	Solicited SendFlags = 1 << 2 // the receive counts as solicited for Notify
	Inline    SendFlags = 1 << 3 // copied when posted; needs no LKey
)

// SendWR is a work request for a send queue. It holds no pointer, so slices of
// it may live anywhere; the zero value is an RDMA write of nothing.
type SendWR struct {
	ID     uint64
	Opcode Opcode
	Flags  SendFlags
	NumSGE uint32

	RemoteKey  uint32
	RemoteAddr uint64

	InvKey     uint32
	bindAccess Access
	mw, mr     uint64
	bindLength uint64

	SGE [MaxSGE]SGE
}

// RecvWR is a work request for a receive queue. It holds no pointer.
type RecvWR struct {
	ID     uint64
	NumSGE uint32
	_      uint32
	SGE    [MaxSGE]SGE
}

// WC is a work completion. Only ID, Status, QPNum and VendorErr mean something
// when Status is not [Success].
type WC struct {
	ID        uint64
	Status    Status
	Opcode    WCOpcode
	VendorErr uint32
	ByteLen   uint32 // of receives and RDMA reads
	_         uint32 // immediate data, or the key that was invalidated
	QPNum     uint32
	_         uint32
	Flags     WCFlags
	_         [2]uint32
}

// WCOpcode is what completed (enum ibv_wc_opcode).
type WCOpcode uint32

const (
	WCSend     WCOpcode = 0
	WCWrite    WCOpcode = 1
	WCRead     WCOpcode = 2
	WCBindMW   WCOpcode = 5
	WCLocalInv WCOpcode = 6
	WCRecv     WCOpcode = 128 // the bit that all receives have
	WCRecvImm  WCOpcode = 129 // receive consumed by an RDMA write with immediate
)

// WCFlags is enum ibv_wc_flags.
type WCFlags uint32

const (
	WCWithImm WCFlags = 1 << 1
	// WCWithInv: a peer's SEND_WITH_INV invalidated a key. rxe sets 1 << 2 instead.
	WCWithInv WCFlags = 1 << 3
)

// Status is how a work request ended (enum ibv_wc_status).
type Status uint32

const (
	Success        Status = 0
	LocLenErr      Status = 1
	LocQPOpErr     Status = 2
	LocProtErr     Status = 4
	WRFlushErr     Status = 5 // the queue pair was in error before its turn
	MWBindErr      Status = 6
	BadRespErr     Status = 7
	LocAccessErr   Status = 8
	RemInvReqErr   Status = 9
	RemAccessErr   Status = 10
	RemOpErr       Status = 11
	RetryExcErr    Status = 12 // the peer did not answer
	RNRRetryExcErr Status = 13 // the peer had no receive posted
	RemAbortErr    Status = 16
	FatalErr       Status = 19
	RespTimeoutErr Status = 20
	GeneralErr     Status = 21
)

var statusNames = map[Status]string{
	Success:        "success",
	LocLenErr:      "local length error",
	LocQPOpErr:     "local QP operation error",
	LocProtErr:     "local protection error",
	WRFlushErr:     "work request flushed",
	MWBindErr:      "memory window bind error",
	BadRespErr:     "bad response",
	LocAccessErr:   "local access error",
	RemInvReqErr:   "remote invalid request",
	RemAccessErr:   "remote access error",
	RemOpErr:       "remote operation error",
	RetryExcErr:    "transport retries exceeded",
	RNRRetryExcErr: "receiver-not-ready retries exceeded",
	RemAbortErr:    "remote aborted",
	FatalErr:       "fatal error",
	RespTimeoutErr: "response timeout",
	GeneralErr:     "general error",
}

func (s Status) String() string { return name(s, statusNames, "status") }

// Error makes a Status other than [Success] an error.
func (s Status) Error() string { return "work completion: " + s.String() }
