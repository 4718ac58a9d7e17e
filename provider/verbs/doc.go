// Package verbs is the SAN service provider over RDMA hardware: its Endpoints
// are reliable-connected queue pairs, reached through libibverbs and librdmacm
// (package ibv), on InfiniBand, RoCE and iWARP. Where these libraries or a
// device are missing, Listen and Dial return a *session.Unavailable.
//
// It knows nothing of the session protocol or of net.Conn, leaves retries to the session where that can
// decide, and never reads registered memory itself. Package san calls Listen, Dial and ServedBy; the
// session calls the Endpoint. docs/PROTOCOL.md, "On RDMA", describes what the two ends send each other.
// All functions, and a Listener's methods, may be called concurrently; session.Endpoint documents this
// for an Endpoint's methods.
//
// It is exported for the library's other parts. Its API may change in any version
// (docs/COMPATIBILITY.md).
//
//	dial.go, listen.go    connecting by rdma_cm; the steps of either end
//	listen_addresses.go   which addresses a listener listens on
//	exchange.go, listen_exchange.go   connecting without rdma_cm, in the same steps
//	private_data.go       what the ends exchange in rdma_cm's private data
//	errors.go             what each result of connecting means
//	attachment.go         the device, port and GID of an address
//	iwarp.go              the first messages on iWARP
//	cm.go                 connection manager events; calls that may block
//	route_*.go            which destinations an RDMA device serves
//	device.go, domain.go  a device with its waiters; protection domains
//	hardware.go           what a device takes; quirks.go: what single ones need
//	ready.go              endpoints that are made ahead
//	memlock.go            what fits RLIMIT_MEMLOCK
//	endpoint.go           an endpoint; create.go and end.go: what it has of its device, and its end
//	queuepair.go          its queue pair: waking, failure, the end; completions.go: what completes
//	send.go, receive.go   its messages
//	message_memory.go     the memory that messages take, and each peer's share of it
//	remote.go             its access to remote memory
//	costs.go              when it pays to register a Write's memory
//	window.go, probe.go   memory windows; what a device enforces of them
package verbs
