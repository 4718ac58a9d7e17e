package san

// RDMA is how connections over RDMA are made. Listener and dialer must agree on IWARPOffset and
// WithoutCM. Zero fields mean what the operator has set (docs/OPERATING.md), or else the defaults.
type RDMA struct {
	// IWARPOffset is added to the TCP port to get the port to use on iWARP, where RDMA and TCP share
	// their ports. Default 10000. The sum wraps around within 1024 … 65535. Negative: iWARP is not
	// used, and WithoutCM nothing moves.
	IWARPOffset int

	// WithoutCM sets connections up over a TCP connection, to the port that iWARP would use, instead of
	// by rdma_cm, which does not work in some containers. It is for RoCE, and for InfiniBand with or
	// without IPoIB.
	WithoutCM bool

	// TrafficClass is the TOS or traffic class of packets on RoCE, by which switches choose a lossless
	// queue; other programs call it NCCL_IB_TC. The dialer's value is used for both directions;
	// WithoutCM, each end's value for its own packets. Default: the socket's, as a Control hook has set
	// it, or else the network's default. On InfiniBand the subnet manager may choose a path's service
	// level by it.
	TrafficClass uint8

	// ServiceLevel is InfiniBand's service level, 0 … 15, of what this end sends on connections made
	// WithoutCM. With rdma_cm, the subnet manager chooses it.
	ServiceLevel uint8

	// AckTimeout bounds the wait for an acknowledgement, as an exponent: 4.096 µs × 2^n on InfiniBand
	// and RoCE, 1 … 31. After eight of these, or up to four times as long on some devices, a silent
	// network ends the connection. Default 19, which is 2.1 s for one and 17 to 70 s for eight, longer
	// than a subnet manager or a bond takes to find another path.
	AckTimeout uint8
}
