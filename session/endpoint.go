package session

import (
	"errors"
	"time"
)

// Endpoint is one connection of a SAN service provider, as the session uses
// it: messages through pre-registered buffers, remote access to memory, and a
// way to sleep. It knows nothing of the session protocol. Providers implement
// it; see the package endpointtest for the contract as tests, and twin for an
// implementation without a kernel.
//
// Concurrency. The methods come in four groups. The session calls the methods
// of one group from one goroutine at a time, those of different groups
// concurrently:
//
//   - sending: Reserve, Commit
//   - receiving: Poll, Drop, Keep, Front, Release
//   - remote access, any goroutine at any time: Expose, Revoke, Read, Write, Alloc, Free
//   - the rest, any goroutine at any time: Limits, Start, Arm, Disarm, Err, Close, Abort
//
// After Close or Abort the session calls nothing but Err, Limits, Alloc and Free;
// Expose, which then fails; and, then without effect, Revoke, Arm, Disarm, Close and
// Abort. No method but Revoke, Close and Abort may block, and those
// only for a bound that the provider documents.
type Endpoint interface {
	// Limits describes the endpoint. It does not change during its life.
	Limits() Limits

	// Start names who is to be woken. It is called once, before any other
	// method but Limits; no Wake comes before it.
	Start(Waker)

	// Reserve gives room for one message in a pre-registered buffer: at least
	// min bytes, at most max (min ≤ max ≤ Limits.MaxMessage). The session
	// fills it from the front and then calls Commit, with no other Reserve in
	// between; or abandons it by the next Reserve. A nil result means that
	// there is no room now (back-pressure; a SendReady event follows once Arm
	// asked for it) or that Err is not nil.
	//
	// Control messages may use room that is held back from data, so that
	// they flow when data is blocked: at least ControlReserve messages of up
	// to MaxControl bytes.
	Reserve(min, max int, control bool) []byte

	// Commit sends the first n bytes of what Reserve gave. Messages arrive
	// whole, once and in the order of their Commits. An error of the
	// connection shows in Err, not here.
	Commit(n int)

	// Poll takes the next event, if there is one, without blocking and
	// without allocation. After a Message event the session calls exactly one
	// of Drop or Keep before the next Poll. What had arrived before the peer
	// vanished is still handed out; only when Poll returns false with
	// Err() != nil was that all.
	Poll(*Event) bool

	// Drop says that the message of the last Poll has been dealt with: its
	// buffer is posted again (the ring's head may move), at the next Poll at the
	// latest, which the Window allows for.
	Drop()

	// Keep leaves the message of the last Poll in its buffer, behind those
	// kept before.
	Keep()

	// Front is the oldest kept message, nil if there is none. A provider on
	// shared memory takes bounds from its own memory and not twice from the
	// peer's; the content may have changed and is checked again by the
	// session.
	Front() []byte

	// Release gives the oldest kept message's buffer back.
	Release()

	// Expose makes b accessible to the peer of this connection alone, exact in
	// range and rights, until Revoke. The peer may use it when it has a
	// message that was committed afterwards. b stays alive and unmoved until
	// Revoke: the caller sees to it. An error means that this memory cannot be
	// exposed (too large, ENOMEM, EFAULT, …): the session sends its bytes
	// otherwise.
	Expose(b []byte, rights Rights) (Descriptor, error)

	// Revoke takes the access away. After it returned nothing of the peer's
	// touches the memory, and a peer that uses the descriptor gets an error
	// and no byte. With Limits.ExactRevoke, taken is how many bytes the peer's
	// reads have got, from the front, and that count is final on both sides: a
	// Read by the peer that did not become part of it fails there with
	// ErrRevoked. Otherwise taken means nothing, and the session asks the peer
	// to stop first.
	Revoke(Descriptor) (taken int)

	// Read starts an RDMA read of len(into) bytes at offset off of the peer's
	// descriptor, Write an RDMA write. A completion event with the id
	// follows, in order per kind; into and from stay untouched by the session
	// until then. ErrWouldBlock: the queue is full, try after the next event.
	// Another error: not started; the memory at this end cannot be used.
	// A Write is in the peer's memory by the time that the peer sees a message
	// committed after it was started, not before. One that the peer refuses may
	// complete before that is known; the connection then ends with an error, and
	// so it does, in bounded time, behind a Write that completes with one.
	// Where its owner has ExactRevoke, the reads of one descriptor are posted in
	// order and without gaps.
	Read(into []byte, from Descriptor, off int, id uint32) error
	Write(from []byte, to Descriptor, off int, id uint32) error

	// Alloc gives n bytes of memory that the provider owns and that Read and
	// Write take without further work, unless it was let go meanwhile for those
	// who need RLIMIT_MEMLOCK more; nil when the budget is used up, or n would
	// leave too little for other connections: less may be had then. It may
	// be exposed, and holds whatever its last user left there. Free gives it
	// back.
	Alloc(n int) []byte
	Free([]byte)

	// Arm asks for one Wake when one of these events may have happened. The
	// session arms, then polls (or reserves) once more, then sleeps, and arms
	// again before each further sleep. A Wake too many is harmless, a missing
	// one is not. Disarm says that no Wake is needed any more; it may be
	// ignored.
	Arm(Events)
	Disarm(Events)

	// Err says how the connection ended, nil while it lives. It wraps
	//   - io.EOF: the peer's process ended, every byte that it committed is here
	//     or will come from Poll, and it had dropped or released all that was
	//     committed here, control aside;
	//   - syscall.EPIPE: the peer closed its endpoint in order;
	//   - syscall.ECONNRESET, ETIMEDOUT, …: bytes may be missing, here or there.
	Err() error

	// Close ends an endpoint whose session has said all it has to say:
	// committed messages still arrive, everything that the endpoint holds is
	// given back. Abort ends it now: committed messages may be lost, the peer
	// finds ECONNRESET. After either returned, no RDMA touches this process's
	// memory. Both are idempotent.
	Close() error
	Abort()
}

// Limits of an endpoint, and what its provider prefers (WSD rule C9).
type Limits struct {
	Provider string // "shm", "verbs", …: what Info.Provider shows

	MaxMessage int // largest message in bytes, header included; at least MaxControl
	MaxRDMA    int // largest Read or Write in bytes
	MaxExpose  int // largest slice for Expose in bytes; 0: memory cannot be exposed

	// Threshold is the size in bytes from which the provider prefers
	// rendezvous to payload in messages; 0: never.
	Threshold int

	// Inbox is the size in bytes from which the provider prefers that the
	// session copies a Write that is below Threshold to memory from Alloc and
	// writes it by RDMA to memory that the peer keeps exposed for that; 0:
	// never. Not used where Buffered.
	Inbox int

	// InboxTo is the size in bytes below which that pays even above Threshold,
	// as exposing memory of a Write costs as much as the copy; 0: it does not.
	// A Threshold that was asked for (Config) is not affected.
	InboxTo int

	CanRead  bool // Read works: the peer may offer memory for us to read
	CanWrite bool // Write works: the peer may grant memory for us to write

	// ExactRevoke is true where Revoke knows what the peer's reads have got.
	ExactRevoke bool

	// Window is the number of receive buffers posted: the peer never has more
	// messages under way. 0: the provider has flow control of its own
	// (a ring) and the session spends no credits. Otherwise at least MinWindow.
	Window int

	// Buffered is true where a committed byte is stored in the provider (a
	// ring) and stays there whatever becomes of this process. The session
	// then keeps no backlog of its own, and Close need not wait.
	Buffered bool

	// Liveness is true where the provider finds a dead peer by itself, so
	// that the session sends no keepalives.
	Liveness bool

	// Worker is true where what moves the bytes is a thread of this host's kernel (the
	// driver of a software device), which may need the processor of who polls.
	Worker bool

	// Spin is how long polling pays before sleeping; 0: never poll in a loop.
	Spin time.Duration
}

const (
	// MaxControl is the largest message in bytes that a Reserve for control
	// asks for: the negotiation message's limit (N2) is the largest.
	MaxControl = 256

	// ControlReserve is the number of messages that only control may use, of
	// the window and of the provider's send room. Control is acted on as soon
	// as it is seen, so it flows on as long as the peer looks.
	ControlReserve = 8

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

// Descriptor names exposed memory to the peer. Its content is the provider's;
// on the wire it is three little-endian 64-bit words.
type Descriptor struct {
	Addr uint64
	Key  uint64
	Len  uint64
}

// Event is something that Poll found.
type Event struct {
	Kind EventKind
	Msg  []byte // Message: valid until Drop, Release
	ID   uint32 // ReadDone, WriteDone: as given to Read, Write
	Err  error  // ReadDone, WriteDone: nil, ErrRevoked (a Read), or why the bytes did not move: Err follows
	Last bool   // Message: nothing else had come when the endpoint last looked; not said where looking is cheap
}

// EventKind tells Events apart.
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

// Waker is told of events that Arm asked for, and of the end of the connection
// whether asked or not. Wake does not block and may be called from any
// goroutine.
type Waker interface {
	Wake(Events)
}

var (
	// ErrWouldBlock: the queue is full now.
	ErrWouldBlock = errors.New("session: queue is full")
	// ErrRevoked: the peer has taken its memory back.
	ErrRevoked = errors.New("session: remote memory was revoked")
)
