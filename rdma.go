package san

// RDMA is how connections over RDMA are made. Listener and dialer must agree on
// it. The zero value is what the operator has set (SAN_IWARP_OFFSET, SAN_RDMACM)
// or what most networks want.
type RDMA struct {
	// IWARPOffset is added to the TCP port to get the port that is used on
	// iWARP, where RDMA's ports are TCP's own. Default 10000; the sum wraps
	// around within 1024 … 65535. Negative: iWARP is not used.
	IWARPOffset int

	// WithoutCM connects by way of a TCP connection, to the port that iWARP
	// would have, instead of by rdma_cm: for containers where that does not
	// work. InfiniBand and RoCE only.
	WithoutCM bool
}
