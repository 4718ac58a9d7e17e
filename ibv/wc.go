package ibv

import "fmt"

// WC is a work completion. Only ID, Status, QPNum and VendorErr mean something
// when Status is not [Success].
type WC struct {
	ID        uint64
	Status    Status
	Opcode    WCOpcode
	VendorErr uint32
	ByteLen   uint32 // of receives and RDMA reads
	InvKey    uint32 // with WCWithInv: the key that was invalidated
	QPNum     uint32
	_         uint32
	Flags     WCFlags
	_         [2]uint32
}

// Err returns the completion as an error, which wraps its Status, or nil after Success. VendorErr is a
// code of the device's maker.
func (wc *WC) Err() error {
	switch {
	case wc.Status == Success:
		return nil
	case wc.VendorErr != 0:
		return fmt.Errorf("queue pair %d: %w (vendor error %#x)", wc.QPNum, wc.Status, wc.VendorErr)
	}
	return fmt.Errorf("queue pair %d: %w", wc.QPNum, wc.Status)
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
	RetryExcErr    Status = 12 // no acknowledgement from the peer
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
