// Package ibv is a thin Go binding of libibverbs and librdmacm, the user-space
// libraries of RDMA: devices, protection domains, memory regions and windows,
// completion queues, reliable-connected queue pairs, and rdma_cm.
//
// It has only the verbs: no protocol, no policy, no buffers of its own. provider/verbs and "sanperf
// devices" use it. Call [Available] first, then [Open] for one of [Devices], or use an [ID] of rdma_cm,
// which finds its device by an address.
//
// It is exported for the library's other parts. Its API may change in any version
// (docs/COMPATIBILITY.md).
//
// The libraries are opened at run time, on first use; no header of rdma-core is
// needed to build, and none of its libraries to run a program that imports this
// package. Where they cannot be used (another system than Linux, CGO_ENABLED=0,
// a static binary, rdma-core not installed) everything still builds, [Available]
// returns the reason, and every constructor fails with that error. Errors of calls
// wrap the errno that C has returned.
//
// # Concurrency
//
// Verbs on one object may be called from several goroutines at once, as in C,
// with these exceptions, each noted at its method: Events and Event of one
// channel serve one goroutine at a time; PostSend of work requests with memory
// windows must not run concurrently on one window. Close must be the last call
// on an object; a call during it or after it is the caller's bug. After it, the
// methods of a [QP] or [CQ] fail with EBADF, a second Close does nothing, and
// others may end the process. The exceptions are [CompChannel], [EventChannel] and
// [AsyncChannel], whose Close wakes a goroutine that waits.
//
// # Blocking
//
// Nothing here blocks except the methods that wait for events, which sleep in the
// runtime's poller, and, on iWARP, some calls of the connection manager
// ([ID.Connect], [ID.Disconnect], [ID.Close]), which may occupy their thread for
// most of a minute.
//
// # Memory
//
// The device reads and writes registered memory by physical page. For memory of
// the Go heap the caller has to keep the object alive for as long as it is
// registered; this package keeps no reference. Work requests and completions
// hold no pointers and may live anywhere: the libraries' own structs are made
// from them on the C stack, a batch at a time.
package ibv
