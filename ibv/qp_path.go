package ibv

import "cmp"

// How to connect without rdma_cm, on InfiniBand and RoCE: the two sides exchange their QPPeer by other
// means. Then each calls Init, posts its first receives, and calls ReadyToReceive and ReadyToSend. On
// iWARP that is not possible.

const (
	hopLimit           = 64 // IP's default time to live (ip(7))
	defaultMinRNRTimer = 1  // 10 µs; 0, which is 655 ms, is of no use
	defaultTimeout     = 14 // 67 ms; with 0, no timeout, a lost packet hangs the connection
)

// QPPeer is what one side must know about the other.
type QPPeer struct {
	QPNum uint32
	PSN   uint32 // of its first packet; 24 bits, preferably random
	GID   GID
	LID   uint16 // InfiniBand only
}

// QPPath is the rest: this side's addresses, and the properties of the connection.
type QPPath struct {
	Port           uint8  // local, from 1
	GIDIndex       uint8  // local: of this side's RoCE v2 address
	PSN            uint32 // of this side's first packet
	MTU            MTU    // the same on both sides: the smaller of the two active MTUs
	ReadsIssued    uint8  // at most what the peer serves
	ReadsServed    uint8
	MinRNRTimer    uint8 // see QPAttr; 0 means 1 (10 µs)
	Timeout        uint8 // see QPAttr; 0 means 14 (67 ms)
	RetryCount     uint8
	RNRRetry       uint8
	TrafficClass   uint8 // see QPAttr
	SL             uint8
	PKeyIndex      uint16 // InfiniBand: of the partition
	PeerIsOnSubnet bool   // InfiniBand: the peer is addressed by its LID alone
}

// Init brings a queue pair from RESET to INIT: receives may be posted.
func (q *QP) Init(path QPPath, peers Access) error {
	return q.Modify(QPAttr{State: QPInit, Port: path.Port, PKeyIndex: path.PKeyIndex, Access: peers}, MaskState|MaskPKeyIndex|MaskPort|MaskAccess)
}

// ReadyToReceive brings a queue pair from INIT to RTR: it receives.
func (q *QP) ReadyToReceive(path QPPath, peer QPPeer) error {
	attr := QPAttr{
		State: QPRTR, PathMTU: path.MTU, DestQPN: peer.QPNum, RQPSN: peer.PSN,
		MaxDestReadAtomic: path.ReadsServed, MinRNRTimer: cmp.Or(path.MinRNRTimer, defaultMinRNRTimer),
		Port: path.Port, DLID: peer.LID, SL: path.SL,
	}
	if !path.PeerIsOnSubnet {
		attr.Global, attr.DGID, attr.SGIDIndex = 1, peer.GID, path.GIDIndex
		attr.HopLimit, attr.TrafficClass = hopLimit, path.TrafficClass
	}
	return q.Modify(attr, MaskState|MaskAV|MaskPathMTU|MaskDestQPN|MaskRQPSN|MaskMaxDestReadAtomic|MaskMinRNRTimer)
}

// ReadyToSend brings a queue pair from RTR to RTS.
func (q *QP) ReadyToSend(path QPPath) error {
	return q.Modify(QPAttr{
		State: QPRTS, SQPSN: path.PSN, MaxReadAtomic: path.ReadsIssued,
		Timeout: cmp.Or(path.Timeout, defaultTimeout), RetryCount: path.RetryCount, RNRRetry: path.RNRRetry,
	}, MaskState|MaskTimeout|MaskRetryCount|MaskRNRRetry|MaskSQPSN|MaskMaxReadAtomic)
}
