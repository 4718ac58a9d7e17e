package sanconn

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/sanconn/san/session"
)

// handover is the state of a connection between its two carriers, TCP and a session over a SAN. It
// decides, and does nothing: Conn calls it with its lock held, and does what it returns.
//
//	        commit               agree                begin, both ways
//	onTCP ─────────▶ proposed ─────────▶ onSAN (each direction at a position of its own)
//	  ▲                 │                   │
//	  ├─────────────────┘ refuse            │ leave
//	  ├───────────────── leaving ◀──────────┘
//	  │        left         │ left, and bytes came back
//	  └──── flushing ◀──────┘
//	 flushed
//
// The dialer commits when it sends its proposal. The acceptor commits when it answers, so it knows that
// the dialer has committed. After its commit an end never ends its stream by TCP alone. So a FIN
// without an end of the session's stream is a cut. Over shm, the end of a killed process is also an end
// of the stream, if the process had read everything and was in no Write. If no begin of its has come by
// then, all its bytes went by TCP, and TCP's end is the end of the stream.
//
// When both ends have committed, each direction moves. Its writer tells the reader at which position of
// TCP's stream the session takes over (begin). The reader turns to the session when it has read TCP up
// to there.
//
// Both ends leave the session together: see leave.go.
type handover struct {
	phase   phase
	pinned  bool // the program uses TCP's descriptor: no further commit
	bounded bool // while proposed: the answer is waited for no longer than silentTimeout
	over    bool // in phases onSAN and leaving: the session has ended
	asked   bool // while leaving: this end's application wants the descriptor
	both    bool // while leaving, or after that has failed: the peer leaves as well, after until bytes of the session
	hasLeft bool // in phases onTCP and flushing: the last session was left in this way

	// lost: a session has ended after this end's commit, before the peer's direction has moved, and not
	// whole. The peer may have moved, and what it has sent may be lost.
	lost bool

	failed syscall.Errno // an error of TCP, which TCP reports once; kept until a Read returns it

	out, in direction

	until uint64
	least uint64 // at least so many of the peer's bytes will have come by TCP, as they were returned to the peer
}

type phase uint8

const (
	onTCP    phase = iota // no session, or one to which neither end has committed
	proposed              // the dialer has committed, and waits for the answer
	onSAN                 // both ends have committed
	leaving               // going back to TCP
	flushing              // on TCP again, which first sends what came back
)

func (p phase) String() string {
	return [...]string{"TCP", "proposed", "SAN", "leaving", "flushing"}[p]
}

// direction is one of the two streams.
type direction struct {
	shut   bool // shut at this end, by CloseWrite or CloseRead
	broken bool // TCP has ended, as a Write or a Read has found
	begun  bool // its begin was sent, or has come
	at     uint64
}

var (
	errClosing    = stays("the connection is being closed")
	errHalfClosed = stays("the stream has ended in one direction")
	errPinned     = stays("the program uses the descriptor")
	errCounts     = stays("TCP has carried bytes that went by the descriptor")
	errKept       = stays("bytes that came by a SAN before have not been read")
	errUnderWay   = stays("a move is under way")
	errByTCP      = stays("bytes of the application went by TCP")
	errBegin      = errors.New("the position at which the peer moves lies behind what has come by TCP")
	errBeginTwice = errors.New("the peer moves twice")
	errLacks      = errors.New("TCP has ended before the position at which the peer moves")
	errBehind     = errors.New("the peer has moved, and more has come by TCP")
	errNotAgreed  = errors.New("a note out of place")
)

// stays returns why a connection does not commit to a session now.
func stays(why string) error {
	return &session.Unavailable{Reason: session.ReasonStays, Err: errors.New(why)}
}

// commit is the transition for the dialer's proposal, or the acceptor's answer.
func (h *handover) commit(to phase) error {
	switch {
	case h.phase != onTCP:
		return errUnderWay
	case h.pinned:
		return errPinned
	case h.out.shut || h.in.shut || h.out.broken || h.in.broken:
		return errHalfClosed
	}
	h.phase, h.hasLeft, h.bounded = to, false, false
	return nil
}

// answered is the transition for the answer to a proposal, or for its withdrawal.
func (h *handover) answered(agreed bool) error {
	if h.phase != proposed {
		return errNotAgreed
	}
	h.phase = onTCP
	if agreed {
		h.phase = onSAN
		h.lost = false // the peer had not committed to the lost session
	}
	return nil
}

// begin moves this end's direction after at bytes on TCP, and returns the position for the peer. If TCP
// has ended, that is a position that TCP never reaches: the peer must find a cut there, and not pass
// over what the failed Write has lost.
func (h *handover) begin(at uint64) uint64 {
	if h.out.broken {
		at++
	}
	h.out.begun, h.out.at = true, at
	return at
}

// peerBegins is the transition for the peer's begin, when read bytes have been read from TCP.
func (h *handover) peerBegins(at, read uint64) error {
	read = max(read, h.least)
	switch {
	case h.phase != onSAN && h.phase != leaving:
		return errNotAgreed
	case h.in.begun:
		return errBeginTwice
	case at < read, at >= toTheEnd: // bounded, as returned bytes are added to it
		return fmt.Errorf("%w: %d, and %d were read", errBegin, at, read)
	}
	h.in.begun, h.in.at = true, at
	return nil
}

// turns reports whether the reader turns from TCP to the session.
func (h *handover) turns(read uint64) bool { return h.in.begun && read == h.in.at }

// beyond reports whether more has come by TCP than the peer has sent there.
func (h *handover) beyond(read uint64) bool { return h.in.begun && read > h.in.at }

// endOfTCP is what TCP's end means for a reader that has read so many bytes from it.
type endOfTCP uint8

const (
	endIsEnd endOfTCP = iota // the end of the stream
	endIsCut                 // the peer has vanished
	endOpen                  // not known yet: look again after a change of state
	endTurns                 // the session goes on
)

func (h *handover) endOf(read uint64) endOfTCP {
	switch {
	case h.turns(read):
		return endTurns
	case h.lost, h.in.begun, read < h.least:
		return endIsCut
	case h.phase != onTCP && !(h.phase == onSAN && h.over): // in the other phases, no begin has come
		return endOpen
	case h.failed != 0:
		return endIsCut
	}
	return endIsEnd
}

// tcpFailed keeps an error of TCP until a Read returns it, as another operation may have met it.
func (h *handover) tcpFailed(err error) {
	var errno syscall.Errno
	if errors.As(err, &errno) && errno != syscall.EPIPE { // EPIPE: the stream had ended in order
		h.failed = errno
	}
}

// byTCP reports whether TCP carries the connection, and nothing was proposed.
func (h *handover) byTCP() bool { return h.phase == onTCP || h.phase == flushing }

// goesBack reports whether the connection is on its way from the session to TCP.
func (h *handover) goesBack() bool { return h.phase == leaving || h.phase == flushing }

// sessionOver is the transition for the session's end. whole: all that the peer has sent by it has
// come. It reports whether the connection is over with it; if both ends leave the session, that is not
// known.
func (h *handover) sessionOver(whole bool) (over bool) {
	switch h.phase {
	case proposed: // without an answer
		h.phase = onTCP
		h.lost = h.lost || !whole
	case onSAN:
		h.over = true
		h.lost = h.lost || !whole && !h.in.begun
		return !h.peerMayHaveLeft() // otherwise the peer may have left, and would take TCP's end for the end of the stream
	case leaving:
		h.over = true
	}
	return false
}

// hasMoved returns nil once both directions have moved, as they must have before both ends leave;
// errLook: not yet. both: both are on the session.
func (h *handover) hasMoved(both bool) error {
	switch {
	case both:
		return nil
	case h.in.at > 0, h.out.at > 0:
		return errByTCP
	case h.hasLeft, h.phase == leaving:
		return nil
	case h.over:
		return errNoSession
	}
	return errLook
}

// leave begins to leave. asked: this end's application wants the descriptor.
func (h *handover) leave(asked bool) error {
	if h.phase != onSAN {
		return errNotAgreed
	}
	h.phase, h.asked, h.both = leaving, asked, false
	return nil
}

// peerLeaves is the transition for the peer's note that it leaves, after until bytes of the session.
func (h *handover) peerLeaves(until uint64) error {
	if h.phase != leaving || h.both {
		return errNotAgreed
	}
	h.both, h.until = true, until
	return nil
}

// mayLeave reports whether it is known where the peer's bytes end, on TCP and on the session.
func (h *handover) mayLeave() bool { return h.both && h.in.begun }

// leftInVain is the transition for leaving that has failed: the session has ended.
func (h *handover) leftInVain() {
	h.phase = onSAN
	h.sessionOver(false)
}

// peerMayHaveLeft reports whether leaving has failed after both ends had begun to leave. To a peer that has
// left, an end of TCP is the stream's, so it must be a reset.
func (h *handover) peerMayHaveLeft() bool { return h.phase == onSAN && h.both }

// readElsewhere: bytes that are read from TCP by the descriptor are not counted any more. So from then
// on the end of TCP is the end of the stream, even if the peer dies before it has sent again what was
// returned to it, or if bytes may have been lost: a reader of the descriptor cannot tell either.
func (h *handover) readElsewhere() { h.least = 0 }

// left is the transition for leaving that has succeeded. returned: so many of the peer's bytes were
// returned to it, and come by TCP. cameBack: bytes of this end came back, and go by TCP.
func (h *handover) left(returned uint64, cameBack bool) {
	*h = handover{
		hasLeft: true,
		failed:  h.failed,
		out:     direction{shut: h.out.shut, broken: h.out.broken, at: h.out.at}, // at is for hasMoved
		in:      direction{shut: h.in.shut, broken: h.in.broken, at: h.in.at},
		least:   h.in.at + returned,
	}
	if cameBack {
		h.phase = flushing
	}
}

// flushed is the transition for the end of flushing.
func (h *handover) flushed() { h.phase = onTCP }
