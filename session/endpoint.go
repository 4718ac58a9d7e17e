package session

import (
	"errors"
	"time"

	"github.com/sanconn/san/session/internal/credit"
	"github.com/sanconn/san/session/internal/wire"
)

// Endpoint is one connection of a SAN service provider, as the session uses it:
// messages through pre-registered buffers, a way to sleep, and, where the provider can
// access remote memory, that. It does not use the session protocol. Providers
// implement it; see the package endpointtest for the contract as tests, and twin for an
// implementation without a kernel.
//
// Concurrency: the session calls the sending methods from one goroutine at a time,
// likewise the receiving ones, and all others at any time from any goroutine.
//
// After Close or Abort the session calls only Err, Limits, Retire, and of Memory Alloc,
// Free, PaysToOffer, PaysToFill, Expose, which then fails, and Revoke; and Arm, Disarm, Close
// and Abort, which then have no effect. After Retire it calls only Limits and Memory. Only
// Revoke, Close and Abort may block, for no longer than a bound that the provider documents.
type Endpoint interface {
	Messages
	Waiting

	// Limits describes the endpoint. It does not change during its life.
	Limits() Limits

	// Memory is access to remote memory; nil where the provider has none, as all bytes go
	// through messages.
	Memory() Memory

	// Err returns how the connection ended, nil while it lives. It wraps
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

	// Retire gives back what the endpoint holds, once, after Close or Abort. Until then the
	// memory of what was reserved or kept stays in place, and is not reused.
	Retire()
}

// ErrLost is that a ring has failed at this end: not all that the peer has committed there may come.
var ErrLost = errors.New("messages of the peer may be lost")

// Messages are sent and received whole, once and in the order of their Commits.
//
//   - sending: Reserve, Commit, ReserveControl, CommitControl
//   - receiving: Poll, Drop, Keep, Front, Release
type Messages interface {
	// Reserve returns room for one message in a pre-registered buffer: at least
	// min bytes, at most max (min ≤ max ≤ Limits.MaxMessage). The session fills it from
	// the front and then calls Commit. Nil means that there is no room now
	// (back-pressure; SendReady follows if Arm requested it) or that Err is not nil.
	Reserve(min, max int) []byte

	// Commit sends the first n bytes of what Reserve returned; 0: none, the room is free
	// again. Connection errors show in Err.
	Commit(n int)

	// ReserveControl returns room for a control message of n ≤ MaxControl bytes, also
	// between a Reserve and its Commit: the message then goes before the one that is being
	// filled. It may use room that is held back from data, so that control flows when data
	// is blocked: at least ControlReserve messages.
	ReserveControl(n int) []byte

	// CommitControl sends the n bytes of what ReserveControl returned. What was reserved
	// may also be abandoned, by another ReserveControl.
	CommitControl(n int)

	// Poll takes the next event, if there is one, without blocking and
	// without allocation. After a Message event the session calls exactly one
	// of Drop or Keep before the next Poll. What arrived before the peer vanished
	// is still handed out; Poll returning false with Err() != nil means that
	// nothing is left.
	Poll(*Event) bool

	// Drop ends the use of the last Poll's message: its buffer is posted again (or the
	// ring's head moves), no later than the next Poll, which the Window allows for.
	Drop()

	// Keep leaves the message of the last Poll in its buffer, behind those
	// kept before.
	Keep()

	// Front returns the oldest kept message, nil if there is none. A provider on
	// shared memory keeps its bounds in memory of its own and does not read the
	// peer's twice; the content may have changed, and the session checks it again.
	Front() []byte

	// Release gives the oldest kept message's buffer back.
	Release()
}

// Waiting is how a session sleeps until the endpoint has something for it.
type Waiting interface {
	// Start sets the Waker. It is called once, before any other method but
	// Limits and Memory; no Wake comes before it.
	Start(Waker)

	// Arm requests one Wake when one of these events may have happened. The
	// session arms, then polls (or reserves) once more, then sleeps, and arms
	// again before each further sleep. A Wake too many is harmless, a missing
	// one is not. Disarm means that no Wake is needed any more; it may be
	// ignored.
	Arm(Events)
	Disarm(Events)
}

// Withdrawer is implemented by an endpoint that is there before the peer's process has seen it.
type Withdrawer interface {
	// Withdraw takes the connection back, so that the peer never looks at what was sent: then
	// Abort follows. It returns false if the peer has looked, or may: then it answers, or ends it.
	Withdraw() bool
}

// Starver is implemented by an endpoint whose room is up to memory that other connections of the
// process may have used up.
type Starver interface {
	// Starved, one of the sending methods, reports whether the last Reserve found no room for
	// lack of such memory. Two ends that write before they read then wait for each other.
	Starved() bool

	// Spare is how many bytes the layer above may hold, of all connections of the process, that it
	// takes from sessions for that reason. The peers have written them, where no memory of this
	// process's was used.
	Spare() int64
}

// Sleeper is implemented by an endpoint whose events need not be handed on by a goroutine of
// its own: a sleeper waits for them itself. Its methods may be called at any time,
// Rouse and Rest also after Retire, from any goroutine; while no call is in Sleep, and Rest is
// not called, Wakes may be late.
type Sleeper interface {
	// Sleep returns when there is a token in wake, which holds one, and takes it.
	// Meanwhile it may call the Waker of any endpoint.
	Sleep(wake chan struct{})

	// Rouse puts a token into the channel of a Sleep, which ends by it. Another way to put
	// it there is good enough only before the Sleep.
	Rouse(wake chan struct{})

	// Rest makes sure of the Wakes without a sleeper.
	Rest()
}

// Memory is access to the peer's memory, and the peer's to memory here.
type Memory interface {
	// Expose makes b, and nothing else, accessible to the peer of this connection
	// alone, with these rights, until Revoke. The peer may use it once it has a
	// message that was committed afterwards. The caller keeps b alive and in
	// place until Revoke. An error means that this memory cannot be exposed (too
	// large, ENOMEM, EFAULT, …); the session then sends the bytes in another way.
	// A Returnable descriptor is one of which the peer may give its access back by
	// CommitReturn, so that Revoke has little left to do.
	Expose(b []byte, rights Rights) (Descriptor, error)

	// Revoke takes the access away. Once it has returned, the peer no longer
	// touches the memory, and its use of the descriptor fails and moves no byte.
	// It is called once for each Expose, also if the access was given back.
	Revoke(Descriptor)

	// CommitReturn is CommitControl, one of the sending methods, for a message with which
	// this end gives back its access to the peer's memory from, which is Returnable, and to
	// which no Read or Write is under way. A provider that cannot do so sends the message
	// alone.
	CommitReturn(n int, from Descriptor)

	// PaysToOffer reports whether a Write of b, of Limits.Threshold or more, had better be
	// offered than go through the inbox: exposing b costs less than copying it. PaysToFill
	// reports whether b, of a Read, had better be read into than be copied to. The first is
	// called once for a Write, the second once for each Read of an offer, until it reports
	// false. Each may note that b was used, and does not block. An error means that b cannot
	// be registered, whatever that would cost. Not used if Config sets a Threshold.
	PaysToOffer(b []byte) (bool, error)
	PaysToFill(b []byte) (bool, error)

	// Read starts an RDMA read of len(into) bytes at offset off of the peer's
	// descriptor, Write an RDMA write. A completion event with the id follows, in
	// order per kind; until then the session does not touch into or from.
	// ErrWouldBlock: the queue is full, try again after the next event. Any other
	// error: not started, as the memory at this end cannot be used.
	// A message committed after a Write was started is seen by the peer only when
	// the Write is in its memory. A Write that the peer refuses may complete before
	// that is known: the connection then ends with an error. It does so too, within
	// bounded time, after a Write that completes with an error.
	Read(into []byte, from Descriptor, off int, id uint32) error
	Write(from []byte, to Descriptor, off int, id uint32) error

	// Alloc returns n bytes of the provider's memory, which Read and Write take
	// without registering it, unless the registration was given up for another
	// user of RLIMIT_MEMLOCK. Nil means that the budget is used up, or that
	// n would leave too little for other connections: less may be had then. The
	// memory may be exposed, and holds whatever its last user left there. Free
	// gives it back.
	Alloc(n int) []byte
	Free([]byte)
}

// Limits are the limits of an endpoint and what its provider prefers (C9).
type Limits struct {
	Provider string // "shm", "verbs", …: what Info.Provider shows

	MaxMessage int // largest message in bytes, header included; at least MaxControl

	// Window is the number of receive buffers posted: the peer never has more
	// messages under way; at least MinWindow. 0: the provider is a ring. It has flow
	// control of its own, so the session uses no credits; a committed byte is stored in
	// it and survives this process, so Close need not wait for the peer; and it
	// detects a dead peer itself, so the session sends no keepalives.
	Window int

	// Spin is how long polling pays before sleeping; 0: never poll in a loop.
	Spin time.Duration

	// The rest is about Memory, and zero where there is none.

	MaxRDMA   int // largest Read or Write in bytes
	MaxExpose int // largest slice for Expose in bytes; 0: memory cannot be exposed

	// Threshold is the size in bytes from which the provider prefers
	// rendezvous to payload in messages; 0: never.
	Threshold int

	// Inbox is the size in bytes from which the provider prefers that a Write
	// below Threshold is copied to memory from Alloc, and written by RDMA to an
	// inbox, memory that the peer keeps exposed for this; 0: never.
	Inbox int

	// InboxAfter is how many bytes such Writes amount to before an inbox is requested,
	// unless bytes find no credit: an occasional one is not worth the opening. 0: the
	// first one is.
	InboxAfter int

	CanRead  bool // Read works: the peer may offer memory for us to read
	CanWrite bool // Write works: the peer may open an inbox for us
}

// Ring reports whether the provider is a ring; see Window.
func (l Limits) Ring() bool { return l.Window == 0 }

const (
	// MaxControl is the largest n of ReserveControl, in bytes: the negotiation
	// message's limit (N2).
	MaxControl = 256

	// ControlReserve is how many messages, of the window and of the provider's
	// send room, are reserved for control. Control is acted on as soon as it is
	// seen, so it keeps flowing as long as the peer polls.
	ControlReserve = credit.Control

	// MinWindow is the least Window: a reserve's worth each for Credit
	// messages, for control, and for data.
	MinWindow = 3 * ControlReserve
)

// Rights of the peer to exposed memory (R3: read-only cannot be written,
// write-only cannot be read).
type Rights uint8

const (
	RemoteRead Rights = 1 << iota
	RemoteWrite
)

// Descriptor names exposed memory to the peer. Its content is the provider's.
type Descriptor = wire.Descriptor

// Event is something that Poll found.
type Event struct {
	Kind EventKind
	Msg  []byte // Message: valid until Drop, Release
	ID   uint32 // ReadDone, WriteDone: as given to Read, Write
	Err  error  // ReadDone, WriteDone: nil, or why the bytes did not move: Err follows
	Last bool   // Message: nothing else had come when the endpoint last looked; never set where looking is cheap
}

// EventKind is an Event's type.
type EventKind uint8

const (
	Message EventKind = iota + 1
	ReadDone
	WriteDone
)

// Events is a set of things to be woken for.
type Events uint8

const (
	RecvReady Events = 1 << iota // Poll may have something
	SendReady                    // Reserve, Read or Write may have room
)

// Waker gets the events that Arm requested, and the connection's end if Arm requested any.
// Wake does not block and may be called from any goroutine.
type Waker interface {
	Wake(Events)
}

// ErrWouldBlock means that an endpoint's queue is full; try again later.
var ErrWouldBlock = errors.New("session: queue is full")
