package san

// RDMA is how connections over RDMA are made. Listener and dialer must agree on
// it. The zero value means what the operator has set (SAN_IWARP_OFFSET, SAN_RDMACM),
// or else the defaults.
type RDMA struct {
	// IWARPOffset is added to the TCP port to get the port to use on iWARP, where
	// RDMA and TCP share their ports. Default 10000; the sum wraps around within
	// 1024 … 65535. Negative: iWARP is not used.
	IWARPOffset int

	// WithoutCM sets connections up by a TCP connection, to the port that iWARP
	// would use, instead of by rdma_cm, which does not work in some containers.
	// InfiniBand and RoCE only.
	WithoutCM bool
}
