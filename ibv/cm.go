package ibv

import (
	"fmt"
	"net/netip"
	"sync"
	"syscall"
	"time"
)

// EventChannel delivers the events of connection manager ids.
type EventChannel struct {
	h      handle
	poller *poller
	// taking: the library may be using the queue pair of an event's id, or asks the
	// kernel about that id, by a number that the kernel gives to the next one that is
	// made as soon as the id has gone.
	taking sync.Mutex
}

// NewEventChannel makes an event channel.
func NewEventChannel() (*EventChannel, error) {
	if err := Available(); err != nil {
		return nil, err
	}
	h, fd, errno := sysCMCreateChannel()
	if errno != 0 {
		return nil, verbError("rdma_create_event_channel", "", errno)
	}
	p, err := newPoller(fd, "rdma_cm event channel")
	if err != nil {
		sysCMDestroyChannel(h)
		return nil, err
	}
	return &EventChannel{h: h, poller: p}, nil
}

// Event sleeps in the runtime's poller until there is an event, then takes, copies and
// acknowledges it. Events of ids that were closed meanwhile are dropped; a request
// to a listener that was closed is refused.
//
// Taking an event is part of connecting: the library brings the dialer's queue
// pair up, and tells the acceptor, when the dialer takes Established.
//
// The error wraps os.ErrClosed after Close and os.ErrDeadlineExceeded after the
// deadline; after any other error the channel can go on. One goroutine at a time.
func (ch *EventChannel) Event() (Event, error) {
	for {
		child := &ID{}
		child.token = objects.add(child)
		var raw cmEvent
		var errno int
		err := ch.poller.wait(func(uintptr) bool {
			ch.taking.Lock()
			defer ch.taking.Unlock()
			raw, errno = sysCMGetEvent(ch.h, child.token)
			return errno != errnoAgain
		})
		if err == nil {
			err = verbError("rdma_get_cm_event", "", errno)
		}
		if err != nil || raw.child == 0 {
			objects.remove(child.token)
		}
		if err != nil {
			return Event{}, err
		}
		ev := Event{Type: raw.typ, Status: raw.status, Param: raw.param}
		if raw.child != 0 {
			child.h, child.channel = raw.child, ch
			ev.ID = child
			ev.Listener, _ = objects.get(raw.listener).(*ID)
			if ev.Listener == nil {
				child.Close()
				continue
			}
			child.Owner = ev.Listener.Owner
		} else if ev.ID, _ = objects.get(raw.id).(*ID); ev.ID == nil {
			continue
		}
		return ev, nil
	}
}

// SetDeadline makes Event return at t; the zero time: never.
func (ch *EventChannel) SetDeadline(t time.Time) error { return ch.poller.setDeadline(t) }

// Close wakes Event and frees the channel. Its ids must be closed before.
func (ch *EventChannel) Close() error {
	ch.poller.close()
	if ch.h != 0 {
		sysCMDestroyChannel(ch.h)
		ch.h = 0
	}
	return nil
}

// EventType is enum rdma_cm_event_type.
type EventType uint32

const (
	AddrResolved    EventType = 0
	AddrError       EventType = 1
	RouteResolved   EventType = 2
	RouteError      EventType = 3
	ConnectRequest  EventType = 4 // at a listener
	ConnectResponse EventType = 5
	ConnectError    EventType = 6
	Unreachable     EventType = 7 // also, harmless, on established connections
	Rejected        EventType = 8
	Established     EventType = 9
	Disconnected    EventType = 10
	DeviceRemoval   EventType = 11
	AddrChange      EventType = 14
	TimewaitExit    EventType = 15
)

var eventTypeNames = map[EventType]string{
	AddrResolved: "address resolved", AddrError: "address error", RouteResolved: "route resolved",
	RouteError: "route error", ConnectRequest: "connect request", ConnectResponse: "connect response",
	ConnectError: "connect error", Unreachable: "unreachable", Rejected: "rejected", Established: "established",
	Disconnected: "disconnected", DeviceRemoval: "device removal", AddrChange: "address change",
	TimewaitExit: "timewait exit",
}

func (t EventType) String() string { return name(t, eventTypeNames, "event") }

// Event is an event of the connection manager.
type Event struct {
	Type EventType
	// Status is 0, a negative errno (-ETIMEDOUT …), or, in Rejected on InfiniBand
	// and RoCE, the positive reason of the CM protocol: 28 by the peer's
	// [ID.Reject], 8 where nobody listens. iWARP has a negative errno in both.
	Status   int
	ID       *ID       // ConnectRequest: a new id, the caller's to accept or close
	Listener *ID       // ConnectRequest only
	Param    ConnParam // ConnectRequest, Established, Rejected: the peer's
}

// Errno is the status as an error, nil if it is none.
func (e Event) Errno() error {
	if e.Status < 0 {
		return syscall.Errno(-e.Status)
	}
	return nil
}

// ConnParam is what the two sides of a connection tell each other
// (struct rdma_conn_param).
type ConnParam struct {
	// PrivateData is the application's: at most 56 bytes to Connect, 196 to Accept and
	// 148 to Reject, which is what InfiniBand's CM messages leave after the header of the
	// TCP port space. iWARP has more room. What arrives may be longer than what was sent,
	// filled up with zeros.
	PrivateData        []byte
	ResponderResources uint8  // RDMA reads that this side serves at a time
	InitiatorDepth     uint8  // that it issues at a time
	RetryCount         uint8  // 0 … 7, Connect only; 7 is for ever on rxe
	RNRRetryCount      uint8  // 0 … 7: what the *peer's* queue pair will use
	QPNum              uint32 // without a queue pair of ID.CreateQP only
}

// ID is a connection manager id: a listener, or one end of a connection.
type ID struct {
	Owner any // the caller's; a connect request's id inherits the listener's
	QP    *QP // of CreateQP

	h       handle
	channel *EventChannel
	token   uint64
}

// NewID makes an id in the TCP port space.
func (ch *EventChannel) NewID() (*ID, error) {
	id := &ID{channel: ch}
	id.token = objects.add(id)
	var errno int
	// An answer about this id, which has no device yet, to a question about
	// another takes rdma_get_cm_event to a null pointer.
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
	if id.h == 0 {
		return nil
	}
	if id.QP != nil {
		id.QP.Close()
	}
	errno := sysCMDestroyID(id.h)
	if errno == 0 {
		id.h = 0
		objects.remove(id.token)
	}
	return verbError("rdma_destroy_id", "", errno)
}

// Bind binds to a local address. A wildcard address stands for all devices, and
// fails with EADDRINUSE when it fails for one of them.
func (id *ID) Bind(addr netip.AddrPort) error {
	return verbError("rdma_bind_addr", addr.String(), sysCMBind(id.h, addr))
}

// ResolveAddr finds the device and the source address for dst, and ends in
// AddrResolved or AddrError. A zero src is chosen by the route. With a cold neighbour
// entry the answer comes only at the end of the timeout: best use a short one and
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

// CreateQP makes the id's queue pair, after AddrResolved or ConnectRequest, in
// state INIT; the connection manager brings it up. PD and queues must be of
// [ID.Context].
func (id *ID) CreateQP(cfg QPConfig) (*QP, error) {
	q, err := createQP(id, cfg)
	if err != nil {
		return nil, err
	}
	id.QP = q
	return q, nil
}

// forgetQP keeps the library away from the id's queue pair, which is about to
// be destroyed: taking an event may mean to change its state.
func (id *ID) forgetQP() {
	id.channel.taking.Lock()
	defer id.channel.taking.Unlock()
	sysCMForgetQP(id.h)
}

// Connect asks for the connection, and ends in Established, Rejected,
// Unreachable or ConnectError. Post receives before. On iWARP it may block for
// most of a minute.
func (id *ID) Connect(p ConnParam) error {
	if err := checkPrivate("rdma_connect", p.PrivateData); err != nil {
		return err
	}
	return verbError("rdma_connect", id.RemoteAddr().String(), sysCMConnect(id.h, p))
}

// Accept answers a ConnectRequest, and ends in Established. Post receives before.
// The depths have to fit the request's.
func (id *ID) Accept(p ConnParam) error {
	if err := checkPrivate("rdma_accept", p.PrivateData); err != nil {
		return err
	}
	return verbError("rdma_accept", id.RemoteAddr().String(), sysCMAccept(id.h, p))
}

// Reject answers a ConnectRequest; the id still has to be closed.
func (id *ID) Reject(private []byte) error {
	if err := checkPrivate("rdma_reject", private); err != nil {
		return err
	}
	return verbError("rdma_reject", id.RemoteAddr().String(), sysCMReject(id.h, private))
}

// checkPrivate rejects a length that C would truncate to eight bits. The kernel checks
// the transport's limit.
func checkPrivate(verb string, data []byte) error {
	if len(data) > 255 {
		return verbError(verb, fmt.Sprintf("with %d bytes of private data", len(data)), int(syscall.EINVAL))
	}
	return nil
}

// Disconnect brings the queue pair into the error state, which flushes it, and
// tells the peer. The side that gets Disconnected has to call it as well.
func (id *ID) Disconnect() error {
	return verbError("rdma_disconnect", id.RemoteAddr().String(), sysCMDisconnect(id.h))
}

// optionAckTimeout is RDMA_OPTION_ID_ACK_TIMEOUT of rdma_cma.h.
const optionAckTimeout = 3

// SetAckTimeout sets [QPAttr.Timeout] of the connection, 1 … 31. Before Connect
// or Accept. Not on iWARP.
func (id *ID) SetAckTimeout(exponent uint8) error {
	return verbError("rdma_set_option", "ACK_TIMEOUT", sysCMSetOption(id.h, optionAckTimeout, []byte{exponent}))
}

// Context is the device that the id is bound to, nil before that (and for a
// wildcard listener). All ids of a device share one Context.
func (id *ID) Context() *Context { return cmContext(id.info().context) }

// LocalAddr is the address that the id is bound to.
func (id *ID) LocalAddr() netip.AddrPort { return id.info().local }

// RemoteAddr is the peer's address.
func (id *ID) RemoteAddr() netip.AddrPort { return id.info().remote }

func (id *ID) info() cmInfo {
	if id.h == 0 {
		return cmInfo{}
	}
	return sysCMInfo(id.h)
}

// cmInfo is what an id knows of itself.
type cmInfo struct {
	context       handle
	local, remote netip.AddrPort
}

// cmEvent is an event as the shim hands it over: tokens instead of ids.
type cmEvent struct {
	id, listener uint64
	child        handle
	typ          EventType
	status       int
	param        ConnParam
}
