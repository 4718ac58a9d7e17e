package ibv

// AsyncEventType is enum ibv_event_type. Event types without a constant here have no user in this
// module.
type AsyncEventType uint32

const (
	EventCQErr       AsyncEventType = 0 // overrun: everything on it is lost
	EventQPFatal     AsyncEventType = 1
	EventQPReqErr    AsyncEventType = 2
	EventQPAccessErr AsyncEventType = 3
	EventCommEst     AsyncEventType = 4
	EventDeviceFatal AsyncEventType = 8 // also: removed
	EventPortActive  AsyncEventType = 9
	EventPortErr     AsyncEventType = 10
)

var asyncNames = map[AsyncEventType]string{
	EventCQErr: "CQ error", EventQPFatal: "QP fatal", EventQPReqErr: "QP request error",
	EventQPAccessErr: "QP access error", EventCommEst: "communication established",
	EventDeviceFatal: "device fatal", EventPortActive: "port active", EventPortErr: "port error",
}

func (t AsyncEventType) String() string { return name(t, asyncNames, "async event") }

// AsyncEvent is something that happened to a device or to an object of it.
type AsyncEvent struct {
	Type AsyncEventType
	CQ   *CQ // for CQ events, and QP likewise; nil if the object was closed meanwhile
	QP   *QP // for QP events
}

// AsyncChannel delivers a device's asynchronous events. There is one stream of them per [Context], and
// each event goes to one reader only. So two channels of a context share its events, and for a context
// of [ID.Context] the whole process does.
type AsyncChannel struct {
	Context *Context
	poller  *poller
}

// AsyncChannel makes a channel for the device's events.
func (c *Context) AsyncChannel() (*AsyncChannel, error) {
	p, err := newPoller(c.asyncFD, "async events of "+c.Name)
	if err != nil {
		return nil, err
	}
	return &AsyncChannel{Context: c, poller: p}, nil
}

// Event sleeps in the runtime's poller until there is an event, and takes and
// acknowledges it. The error wraps os.ErrClosed after Close. One goroutine at a time.
func (ch *AsyncChannel) Event() (AsyncEvent, error) {
	var typ AsyncEventType
	var token uint64
	var errno int
	err := ch.poller.wait(func(uintptr) bool {
		typ, token, errno = sysGetAsync(ch.Context.h)
		return errno != errnoAgain
	})
	if err == nil {
		err = verbError("ibv_get_async_event", ch.Context.Name, errno)
	}
	if err != nil {
		return AsyncEvent{}, err
	}
	ev := AsyncEvent{Type: typ}
	switch o := objects.get(token).(type) {
	case *CQ:
		ev.CQ = o
	case *QP:
		ev.QP = o
	}
	return ev, nil
}

// Close wakes Event. It must be called before the context's Close.
func (ch *AsyncChannel) Close() error {
	ch.poller.close()
	return nil
}
