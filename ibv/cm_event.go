package ibv

import (
	"fmt"
	"sync"
	"syscall"
	"time"
)

// EventChannel delivers the events of connection manager ids.
type EventChannel struct {
	h      cObject
	poller *poller
	// taking is held while an event is taken. The library may then be using the queue pair of the
	// event's id, or querying the kernel about the id by its number, which the kernel gives to the next
	// new id as soon as this one is closed.
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
// Taking an event is part of connecting: when the dialer takes Established, the library
// brings the dialer's queue pair up and notifies the acceptor.
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
			listener, _ := objects.get(raw.listener).(*ID)
			if listener == nil {
				child.Close()
				continue
			}
			child.Owner = listener.Owner
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
	// [ID.Reject], 8 where there is no listener. iWARP has a negative errno in both.
	Status int
	ID     *ID       // ConnectRequest: a new id, the caller's to accept or close
	Param  ConnParam // ConnectRequest, Established, Rejected: the peer's
}

// Errno returns the status as an error, or nil if it is 0 or positive.
func (e Event) Errno() error {
	if e.Status < 0 {
		return syscall.Errno(-e.Status)
	}
	return nil
}

// Err returns the event as an error, with its status in words. It wraps Errno.
func (e Event) Err() error {
	switch {
	case e.Status < 0:
		return fmt.Errorf("%v: %w", e.Type, e.Errno())
	case e.Status > 0 && e.Type == Rejected:
		return fmt.Errorf("%v: %s (reason %d)", e.Type, name(uint32(e.Status), rejectReasons, "reject"), e.Status)
	}
	return fmt.Errorf("%v, status %d", e.Type, e.Status)
}

// rejectReasons are the reasons of the CM protocol (IBTA specification volume 1, 12.6.7.2; enum
// ib_cm_rej_reason of Linux).
var rejectReasons = map[uint32]string{
	1: "no queue pair", 2: "no end-to-end context", 3: "no resources", 4: "timeout", 5: "unsupported request",
	6: "invalid communication ID", 7: "invalid communication instance", 8: "nobody listens (invalid service ID)",
	9: "invalid transport service type", 10: "stale connection", 11: "no such RDC", 12: "invalid primary GID",
	13: "invalid primary LID", 14: "invalid primary service level", 15: "invalid primary traffic class",
	16: "invalid primary hop limit", 17: "invalid primary packet rate", 18: "invalid alternate GID",
	19: "invalid alternate LID", 20: "invalid alternate service level", 21: "invalid alternate traffic class",
	22: "invalid alternate hop limit", 23: "invalid alternate packet rate", 24: "CM redirected", 25: "port redirected",
	26: "invalid path MTU", 27: "insufficient responder resources", 28: "by the program there", 29: "invalid RNR retry count",
	30: "duplicate communication ID", 31: "invalid class version", 32: "invalid primary flow label",
	33: "invalid alternate flow label", 35: "vendor option not supported",
}

// cmEvent is an event as the shim returns it, with tokens in place of ids.
type cmEvent struct {
	id, listener uint64
	child        cObject
	typ          EventType
	status       int
	param        ConnParam
}
