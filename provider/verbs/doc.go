// Package verbs is the SAN service provider over RDMA hardware: its Endpoints
// are reliable-connected queue pairs, reached through libibverbs and librdmacm
// (package ibv), on InfiniBand, RoCE and iWARP. Where these libraries or a
// device are missing, Listen and Dial say so with a *session.Unavailable.
//
// It knows nothing of the session protocol or of net.Conn, leaves retries to the
// session where it can decide, and never reads memory that it registers. Package san
// calls Listen, Dial and Serves; the session calls the Endpoint.
//
//	dial.go, listen.go    connecting by rdma_cm
//	hello.go              private data, and what each result of a connect means
//	exchange.go           connecting without rdma_cm
//	attachment.go         the device, port and GID of an address
//	greet.go              the first messages, on iWARP
//	cm.go, blocking.go    connection manager events; calls that may block
//	route_*.go            which destinations an RDMA device serves
//	device.go, domain.go  a device with its waiters; protection domains
//	memlock.go            what fits RLIMIT_MEMLOCK
//	rxe.go, siw.go, mana.go   what Soft-RoCE, Soft-iWARP and Azure's devices need
//	endpoint.go, await.go an endpoint and its completions
//	send.go, receive.go, remote.go, end.go   the groups of its methods
//	window.go, probe.go   memory windows; what a device enforces of them
//	srq.go                shared receive queues
//	spin.go               how long polling pays
package verbs
