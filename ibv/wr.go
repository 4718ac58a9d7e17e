package ibv

// SGE is a piece of registered local memory. With Length 0 it is not used.
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
	Signaled SendFlags = 1 << 1 // make a completion; failures always make one
	Inline   SendFlags = 1 << 3 // copied when posted; needs no LKey
)

// SendWR is a work request for a send queue. It holds no pointer, so slices of
// it may live anywhere; the zero value is an RDMA write of nothing.
type SendWR struct {
	ID     uint64
	Opcode Opcode
	Flags  SendFlags

	RemoteAddr uint64
	RemoteKey  uint32

	InvKey     uint32
	bindAccess Access
	_          uint32
	mw, mr     uint64
	bindLength uint64

	SGE SGE
}

// RecvWR is a work request for a receive queue. It holds no pointer.
type RecvWR struct {
	ID  uint64
	SGE SGE
}
