package ibv

import (
	"fmt"
	"net/netip"
	"syscall"
	"time"
)

// ID is a connection manager id: a listener, or one end of a connection.
type ID struct {
	Owner any // for the caller; the id of a connect request inherits the listener's
	QP    *QP // set by UseQP

	h       cObject
	channel *EventChannel
	token   uint64
}

// NewID makes an id in the TCP port space.
func (ch *EventChannel) NewID() (*ID, error) {
	id := &ID{channel: ch}
	id.token = objects.add(id)
	var errno int
	// rdma_get_cm_event follows a null pointer if the kernel gives the number of a closed id, whose
	// event is being taken, to this new id, which has no device yet.
	ch.taking.Lock()
	id.h, errno = sysCMCreateID(ch.h, id.token)
	ch.taking.Unlock()
	if errno != 0 {
		objects.remove(id.token)
		return nil, verbError("rdma_create_id", "", errno)
	}
	return id, nil
}

// Close destroys the queue pair, if it is still there, and the id; a connection
// that is being made is cancelled, one that is up is cut. On iWARP it may wait
// for a connect that is under way.
func (id *ID) Close() error {
	if id.h != 0 && id.QP != nil {
		id.QP.Close()
	}
	return id.h.closeObject("rdma_destroy_id", "", sysCMDestroyID, id.token)
}

// Bind binds to a local address. A wildcard address stands for all devices, and
// fails with EADDRINUSE when it fails for one of them.
func (id *ID) Bind(addr netip.AddrPort) error {
	return verbError("rdma_bind_addr", addr.String(), sysCMBind(id.h, addr))
}

// ResolveAddr finds the device and the source address for dst, and ends in
// AddrResolved or AddrError. A zero src is chosen by the route. With a cold neighbour
// entry the event comes only at the end of the timeout: best use a short one and
// retry. ENODEV: no device serves that route.
func (id *ID) ResolveAddr(src, dst netip.AddrPort, timeout time.Duration) error {
	return verbError("rdma_resolve_addr", dst.String(), sysCMResolveAddr(id.h, src, dst, millis(timeout)))
}

// ResolveRoute follows AddrResolved, and ends in RouteResolved or RouteError.
func (id *ID) ResolveRoute(timeout time.Duration) error {
	return verbError("rdma_resolve_route", id.RemoteAddr().String(), sysCMResolveRoute(id.h, millis(timeout)))
}

func millis(d time.Duration) int {
	return int(max((d+time.Millisecond-1)/time.Millisecond, 1))
}

// Listen turns requests that arrive into ConnectRequest events. While backlog requests
// have not been taken from the channel, the kernel silently drops further ones.
func (id *ID) Listen(backlog int) error {
	return verbError("rdma_listen", id.LocalAddr().String(), sysCMListen(id.h, backlog))
}

// UseQP gives the id a queue pair in state RESET, after AddrResolved or ConnectRequest, and brings it
// to INIT: then receives may be posted. The connection manager does the later transitions. The queue
// pair must be of [ID.Context]; the library need not have made it.
func (id *ID) UseQP(q *QP) error {
	if errno := sysCMUseQP(id.h, q.h); errno != 0 {
		return verbError("ibv_modify_qp", q.PD.Context.Name, errno)
	}
	id.QP, q.cm = q, id
	return nil
}

// forgetQP keeps the library from the id's queue pair, which is about to be destroyed: taking an event
// may change the queue pair's state.
func (id *ID) forgetQP() {
	id.channel.taking.Lock()
	defer id.channel.taking.Unlock()
	sysCMForgetQP(id.h)
}

// ConnParam is what the two sides of a connection exchange
// (struct rdma_conn_param).
type ConnParam struct {
	// PrivateData is the application's: at most 56 bytes to Connect, 196 to Accept and
	// 148 to Reject, which is what InfiniBand's CM messages leave after the header of the
	// TCP port space. iWARP has more room. What arrives may be longer than what was sent,
	// filled up with zeros.
	PrivateData        []byte
	ResponderResources uint8  // RDMA reads that this side serves at a time
	InitiatorDepth     uint8  // RDMA reads that this side issues at a time
	RetryCount         uint8  // 0 … 7, Connect only; 7 is for ever on rxe
	RNRRetryCount      uint8  // 0 … 7: what the *peer's* queue pair will use
	QPNum              uint32 // only without ID.UseQP
}

// Connect requests the connection, and ends in Established, Rejected,
// Unreachable or ConnectError. Post receives before. On iWARP it may block for
// most of a minute.
func (id *ID) Connect(p ConnParam) error {
	if err := checkPrivate("rdma_connect", p.PrivateData); err != nil {
		return err
	}
	return verbError("rdma_connect", id.RemoteAddr().String(), sysCMConnect(id.h, p))
}

// Accept accepts a ConnectRequest, and ends in Established. Post receives before. The depths must not
// exceed the request's.
func (id *ID) Accept(p ConnParam) error {
	if err := checkPrivate("rdma_accept", p.PrivateData); err != nil {
		return err
	}
	return verbError("rdma_accept", id.RemoteAddr().String(), sysCMAccept(id.h, p))
}

// Reject refuses a ConnectRequest; the id still has to be closed.
func (id *ID) Reject(private []byte) error {
	if err := checkPrivate("rdma_reject", private); err != nil {
		return err
	}
	return verbError("rdma_reject", id.RemoteAddr().String(), sysCMReject(id.h, private))
}

// checkPrivate rejects a length that C would truncate to eight bits. The kernel checks the transport's
// limit.
func checkPrivate(verb string, data []byte) error {
	if len(data) > 255 {
		return verbError(verb, fmt.Sprintf("with %d bytes of private data", len(data)), int(syscall.EINVAL))
	}
	return nil
}

// Disconnect brings the queue pair into the error state, which flushes it, and notifies the peer. The
// side that gets Disconnected must call it as well.
func (id *ID) Disconnect() error {
	return verbError("rdma_disconnect", id.RemoteAddr().String(), sysCMDisconnect(id.h))
}

// Notify passes an EventCommEst to the connection manager. It takes the place of a confirmation by the
// dialer that was lost or is late: Established follows.
func (id *ID) Notify() error {
	return verbError("rdma_notify", id.RemoteAddr().String(), sysCMNotify(id.h))
}

// Options of rdma_cma.h.
const (
	optionTOS        = 0 // RDMA_OPTION_ID_TOS
	optionAckTimeout = 3 // RDMA_OPTION_ID_ACK_TIMEOUT
)

// SetTOS sets [QPAttr.TrafficClass] of the connection on RoCE, at both ends; on InfiniBand
// the subnet manager chooses the path by it. Before ResolveAddr.
func (id *ID) SetTOS(tos uint8) error {
	return verbError("rdma_set_option", "TOS", sysCMSetOption(id.h, optionTOS, []byte{tos}))
}

// SetAckTimeout sets [QPAttr.Timeout] of the connection, 1 … 31. Before Connect
// or Accept. Not on iWARP.
func (id *ID) SetAckTimeout(exponent uint8) error {
	return verbError("rdma_set_option", "ACK_TIMEOUT", sysCMSetOption(id.h, optionAckTimeout, []byte{exponent}))
}

// Context returns the device that the id is bound to, or nil before that (and for a wildcard listener).
// All ids of a device share one Context.
func (id *ID) Context() *Context { return cmContext(id.info().context) }

// LocalAddr returns the address that the id is bound to.
func (id *ID) LocalAddr() netip.AddrPort { return id.info().local }

// RemoteAddr returns the peer's address.
func (id *ID) RemoteAddr() netip.AddrPort { return id.info().remote }

func (id *ID) info() cmInfo {
	if id.h == 0 {
		return cmInfo{}
	}
	return sysCMInfo(id.h)
}

// cmInfo is what an id is bound and connected to.
type cmInfo struct {
	context       cObject
	local, remote netip.AddrPort
}
