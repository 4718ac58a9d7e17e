package session

import (
	"errors"
	"time"

	"github.com/sanconn/san/session/internal/credit"
	"github.com/sanconn/san/session/internal/wire"
)

// Endpoint is one connection of a SAN service provider, as the session uses it: messages through
// pre-registered buffers, a way to sleep, and access to remote memory if the provider has it. It does
// not use the session protocol. Providers implement it; package endpointtest has the contract as tests,
// and package twin is an implementation without a kernel.
//
// Concurrency: the session calls the sending methods from one goroutine at a time, likewise the
// receiving methods, and all other methods at any time from any goroutine.
//
// After Close or Abort the session calls only Err, Limits, Retire, and Memory's Alloc, Free,
// PaysToOffer, PaysToFill, Revoke, and Expose, which then fails; also Arm, Disarm, Close and Abort,
// which then have no effect. After Retire it calls only Limits and Memory. Only Revoke, Close and Abort
// may block, at most as long as the provider documents.
type Endpoint interface {
	Messages
	Waiting

	// Limits describes the endpoint. It does not change during its life.
	Limits() Limits

	// Memory is the access to remote memory, or nil if the provider has none, as all bytes go through
	// messages.
	Memory() Memory

	// Err returns how the connection has ended, or nil while it lives. The error wraps one of:
	//   - io.EOF: the peer's process ended; every byte that it committed is here
	//     or will come from Poll, and it had dropped or released everything
	//     committed here except control messages;
	//   - syscall.EPIPE: the peer closed its endpoint in order;
	//   - syscall.ECONNRESET, ETIMEDOUT, …: bytes may be missing, here or there. Unless it wraps
	//     ErrLost as well, what the peer has committed on a ring is here or will come from Poll.
	Err() error

	// Close ends an endpoint whose session has nothing more to send: committed
	// messages still arrive. Abort ends it at once: committed messages may be lost, and
	// the peer sees ECONNRESET. Once either has returned, no RDMA touches this process's
	// memory. Both are idempotent.
	Close() error
	Abort()

	// Retire releases what the endpoint has, once, after Close or Abort. Until then reserved and kept
	// memory stays in place, and is not reused.
	Retire()
}

// ErrLost: a ring has failed at this end, so that some of what the peer has committed may not come.
var ErrLost = errors.New("messages of the peer may be lost")

// Messages are sent and received whole, once and in the order of their Commits.
//
//   - sending: Reserve, Commit, ReserveControl, CommitControl
//   - receiving: Poll, Drop, Keep, Front, Release
type Messages interface {
	// Reserve returns room for one message in a pre-registered buffer: at least min bytes, at most max
	// (min ≤ max ≤ Limits.MaxMessage). The session fills it from the front and then calls Commit. Nil
	// means that there is no room now (back-pressure; SendReady follows if Arm requested it) or that
	// Err is not nil.
	Reserve(min, max int) []byte

	// Commit sends the first n bytes of what Reserve returned. With 0 nothing is sent, and the room is
	// free again. Err returns connection errors.
	Commit(n int)

	// ReserveControl returns room for a control message of n ≤ MaxControl bytes, even between a Reserve
	// and its Commit: then the message goes before the one that is being filled. For at least
	// ControlReserve messages it has room that data cannot use, so that control flows when data is
	// blocked.
	ReserveControl(n int) []byte

	// CommitControl sends the n bytes of what ReserveControl returned. Another ReserveControl abandons
	// the room instead.
	CommitControl(n int)

	// Poll takes the next event, if there is one, without blocking and without allocation. After a
	// Message event the session calls exactly one of Drop or Keep before the next Poll. What arrived
	// before the peer vanished is still returned: nothing is left when Poll returns false and Err() !=
	// nil.
	Poll(*Event) bool

	// Drop ends the use of the last Poll's message. Its room is free again (the ring's head moves) at
	// the next Poll at the latest. A provider with more receive buffers than the Window may post the
	// buffer again later, together with others.
	Drop()

	// Keep leaves the message of the last Poll in its buffer, after those kept before.
	Keep()

	// Front returns the oldest kept message, or nil. A provider on shared memory has the message's
	// bounds in private memory, and does not read them again. The content may have changed, and the
	// session checks it again.
	Front() []byte

	// Release ends the use of the oldest kept message: its buffer is free again.
	Release()
}

// Waiting is how a session sleeps until the endpoint has something for it.
type Waiting interface {
	// Start sets the Waker. It is called once, before any other method but
	// Limits and Memory; no Wake comes before it.
	Start(Waker)

	// Arm requests one Wake when one of these events may have happened. The session arms, then polls
	// (or reserves) once more, then sleeps, and arms again before each further sleep. A superfluous
	// Wake is harmless, a missing one is not. Disarm means that no Wake is needed any more; it may be
	// ignored.
	Arm(Events)
	Disarm(Events)
}

// Withdrawer is implemented by an endpoint that exists before the peer's process has seen it.
type Withdrawer interface {
	// Withdraw takes the connection back, so that the peer never looks at what was sent; then Abort
	// follows. It returns false if the peer has looked, or may look: then the peer answers, or ends the
	// connection.
	Withdraw() bool
}

// Starver is implemented by an endpoint whose room depends on memory that other connections of the
// process may have used up.
type Starver interface {
	// Starved, one of the sending methods, reports whether the last Reserve found no room for lack of
	// such memory. Two ends that write before they read would then wait for each other.
	Starved() bool

	// Spare returns how many bytes, of all connections of the process together, the layer above may
	// take from sessions for that reason, and hold. They are in memory of the peers until then.
	Spare() int64
}

// Sleeper is implemented by an endpoint at which a sleeping operation can itself wait for events,
// without a goroutine that passes them on. Its methods may be called at any time from any goroutine,
// Rouse and Rest also after Retire. While no call of Sleep is in progress, and Rest is not called,
// Wakes may be late.
type Sleeper interface {
	// Sleep takes a token from wake, which holds one, and returns when it has it. Meanwhile it may call
	// the Waker of any endpoint.
	Sleep(wake chan struct{})

	// Rouse puts a token into the channel of a Sleep, which ends the Sleep. A token that is put there
	// in another way ends only a Sleep that has not begun.
	Rouse(wake chan struct{})

	// Rest ensures that Wakes come without a sleeper.
	Rest()
}

// Memory is this end's access to the peer's memory, and the peer's to memory here.
type Memory interface {
	// Expose makes b, and nothing else, accessible to the peer of this connection only, with these
	// rights, until Revoke. The peer may use it once it has a message that was committed afterwards.
	// The caller keeps b alive and in place until Revoke. An error means that this memory cannot be
	// exposed (too large, ENOMEM, EFAULT, …); the session then sends the bytes in another way. If the
	// descriptor is Returnable, the peer may give its access back by CommitReturn, so that Revoke has
	// little left to do.
	Expose(b []byte, rights Rights) (Descriptor, error)

	// Revoke ends the access. Once it has returned, the peer does not access the memory any more, and a
	// use of the descriptor fails and moves no byte. It is called once for each Expose, even if the
	// access was given back.
	Revoke(Descriptor)

	// CommitReturn is CommitControl, one of the sending methods, for a message with which this end
	// gives back its access to the peer's memory from. from is Returnable, and no Read or Write of it
	// is in progress. A provider that cannot give access back sends only the message.
	CommitReturn(n int, from Descriptor)

	// PaysToOffer reports whether it is better to offer a Write of b, of Limits.Threshold or more, than
	// to send it through the inbox: exposing b costs less than copying it. PaysToFill reports whether
	// it is better to read into b, the slice of a Read, than to copy to it. PaysToOffer is called once
	// for a Write; PaysToFill once for each Read of an offer, until it returns false. Each may note
	// that b was used, and does not block. An error means that b cannot be registered at any cost.
	// Neither is called if Config sets a Threshold.
	PaysToOffer(b []byte) (bool, error)
	PaysToFill(b []byte) (bool, error)

	// Read starts an RDMA read of len(into) bytes at offset off of the peer's descriptor, Write an RDMA
	// write. A completion event with the id follows, in order per kind; until then the session does not
	// access into or from. ErrWouldBlock: the queue is full, try again after the next event. Any other
	// error: the transfer was not started, as the memory at this end cannot be used.
	//
	// A message committed after a Write was started is seen by the peer only when the Write is in its
	// memory. A Write that the peer refuses may complete before that is known; then the connection ends
	// with an error. It also does, within bounded time, after a Write that completes with an error.
	Read(into []byte, from Descriptor, off int, id uint32) error
	Write(from []byte, to Descriptor, off int, id uint32) error

	// Alloc returns n bytes of the provider's memory, which Read and Write use without registering it,
	// unless its registration was given up for another user of RLIMIT_MEMLOCK. Nil means that the
	// budget is used up, or that n would leave too little for other connections; then less may still be
	// available. The memory may be exposed, and holds whatever its last user left there. Free gives it
	// back.
	Alloc(n int) []byte
	Free([]byte)
}

// Limits are the limits of an endpoint and the preferences of its provider (C9).
type Limits struct {
	Provider string // "shm", "verbs", …: what Info.Provider shows

	MaxMessage int // largest message in bytes, header included; at least MaxControl

	// Window is the number of receive buffers posted: the peer never has more messages in flight; at
	// least MinWindow. 0: the provider is a ring. It has flow control of its own, so the session uses
	// no credits; a committed byte is stored in it and outlives this process, so Close need not wait
	// for the peer; and it detects a dead peer itself, so the session sends no keepalives.
	Window int

	// Spin is how long polling pays before sleeping; 0: do not poll in a loop.
	Spin time.Duration

	// The fields below are about Memory, and zero without Memory.

	MaxRDMA   int // largest Read or Write in bytes
	MaxExpose int // largest slice for Expose in bytes; 0: memory cannot be exposed

	// Threshold is the size in bytes from which the provider prefers rendezvous to messages; 0: never.
	Threshold int

	// Inbox is the size in bytes from which the provider prefers that a Write below Threshold is copied
	// to memory from Alloc, and written by RDMA to an inbox, memory that the peer keeps exposed for
	// this; 0: never.
	Inbox int

	// InboxAfter is how many bytes such Writes must amount to before an inbox is requested, unless
	// bytes find no credit: opening one does not pay for an occasional Write. 0: the first Write is
	// enough.
	InboxAfter int

	CanRead  bool // Read works: the peer may offer memory for this end to read
	CanWrite bool // Write works: the peer may open an inbox for this end
}

// Ring reports whether the provider is a ring; see Window.
func (l Limits) Ring() bool { return l.Window == 0 }

const (
	// MaxControl is the largest n of ReserveControl, in bytes: the negotiation message's limit (N2).
	MaxControl = 256

	// ControlReserve is how many messages of the window, and of the provider's send room, are reserved
	// for control. Control messages are acted on as soon as they are seen, so they keep flowing as long
	// as the peer polls.
	ControlReserve = credit.Control

	// MinWindow is the least Window: ControlReserve buffers each for Credit messages, for control, and
	// for data.
	MinWindow = 3 * ControlReserve
)

// Rights of the peer to exposed memory (R3: read-only cannot be written,
// write-only cannot be read).
type Rights uint8

const (
	RemoteRead Rights = 1 << iota
	RemoteWrite
)

// Descriptor names exposed memory to the peer. The provider defines its content.
type Descriptor = wire.Descriptor

// Event is something that Poll found.
type Event struct {
	Kind EventKind
	Msg  []byte // Message: valid until Drop or Release
	ID   uint32 // ReadDone, WriteDone: the id given to Read or Write
	Err  error  // ReadDone, WriteDone: nil, or why the bytes did not move; then Err follows
	Last bool   // Message: nothing more had come when the endpoint last looked; not set by endpoints for which looking is cheap
}

// EventKind is an Event's type.
type EventKind uint8

const (
	Message EventKind = iota + 1
	ReadDone
	WriteDone
)

// Events is a set of events to be woken for.
type Events uint8

const (
	RecvReady Events = 1 << iota // Poll may have something
	SendReady                    // Reserve, Read or Write may have room
)

// Waker gets the events that Arm requested, and the connection's end if Arm requested any events. Wake
// does not block and may be called from any goroutine.
type Waker interface {
	Wake(Events)
}

// ErrWouldBlock means that an endpoint's queue is full; try again later.
var ErrWouldBlock = errors.New("session: queue is full")
