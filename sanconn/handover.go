package sanconn

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/sanconn/san/session"
)

// handover is the state of a connection between its two carriers, TCP and a session over a
// SAN. It decides, and does nothing: Conn calls it under its lock, and does what it returns.
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
// The dialer commits when it sends its proposal, the acceptor when it answers that: so it knows
// that the dialer has committed. From its own commit on an end never ends its stream by TCP
// alone, so a FIN that comes without an end of the session's stream is a cut. Over shm the end of a
// process that is killed is such an end, too, if it had read everything and was in no Write: where
// no begin of its has come by then, all its bytes went by TCP, whose end is the stream's.
// From both ends' commits on, each direction moves: its writer tells at which position of TCP's
// stream the session takes over (begin), which the reader has to have read before it turns to
// the session.
//
// Both ends leave the session together: see leave.go.
type handover struct {
	phase   phase
	pinned  bool // the program uses TCP's descriptor: no commit any more
	bounded bool // proposed: the answer is waited for no longer than silentTimeout
	over    bool // on the SAN, and leaving: the session has ended
	asked   bool // leaving: this end's application wants that
	both    bool // leaving, or behind that in vain: the peer leaves as well, behind so many bytes of the session: until
	hasLeft bool // on TCP, and flushing: the last session, which has ended in no other way

	// lost: a session has ended before the peer's direction has moved, after this end's
	// commit, and not whole. The peer may have moved, and what it sent may be lost.
	lost bool

	failed syscall.Errno // of TCP, which reports it once; kept until a Read returns it

	out, in direction

	until uint64
	least uint64 // so many bytes of the peer's will have gone by TCP at least: they were returned to it
}

type phase uint8

const (
	onTCP    phase = iota // no session, or one about which neither end has committed
	proposed              // the dialer has committed, and waits for the answer
	onSAN                 // both ends have committed
	leaving               // going back to TCP
	flushing              // on TCP again, which is sent what came back before anything else
)

func (p phase) String() string {
	return [...]string{"TCP", "proposed", "SAN", "leaving", "flushing"}[p]
}

// direction is one of the two streams.
type direction struct {
	shut   bool // it has been shut here: by CloseWrite or CloseRead
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

// stays is why a connection does not commit to a session now.
func stays(why string) error {
	return &session.Unavailable{Reason: session.ReasonStays, Err: errors.New(why)}
}

// commit is the dialer's proposal, or the acceptor's answer.
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

// answered is the answer to a proposal, or that it was withdrawn.
func (h *handover) answered(agreed bool) error {
	if h.phase != proposed {
		return errNotAgreed
	}
	h.phase = onTCP
	if agreed {
		h.phase = onSAN
		h.lost = false // the peer had not committed to the session that was lost
	}
	return nil
}

// begin moves this end's direction, which has had so many bytes on TCP, and returns the position that
// the peer is told. Where TCP has ended, it is one that TCP never reaches: the peer finds a cut there, as
// what the failed Write had left must not be passed over.
func (h *handover) begin(at uint64) uint64 {
	if h.out.broken {
		at++
	}
	h.out.begun, h.out.at = true, at
	return at
}

// peerBegins is the peer's begin, when so many bytes have been read from TCP.
func (h *handover) peerBegins(at, read uint64) error {
	read = max(read, h.least)
	switch {
	case h.phase != onSAN && h.phase != leaving:
		return errNotAgreed
	case h.in.begun:
		return errBeginTwice
	case at < read, at >= toTheEnd: // what is returned is added to it
		return fmt.Errorf("%w: %d, and %d were read", errBegin, at, read)
	}
	h.in.begun, h.in.at = true, at
	return nil
}

// turns reports whether the reader turns from TCP to what comes behind it.
func (h *handover) turns(read uint64) bool { return h.in.begun && read == h.in.at }

// beyond reports whether more has come by TCP than the peer has put there.
func (h *handover) beyond(read uint64) bool { return h.in.begun && read > h.in.at }

// endOfTCP is what TCP's end means to a reader that has read so many bytes from it.
type endOfTCP uint8

const (
	endIsEnd endOfTCP = iota // the stream's
	endIsCut                 // the peer vanished
	endOpen                  // not known yet: look again when something has changed
	endTurns                 // the session goes on
)

func (h *handover) endOf(read uint64) endOfTCP {
	switch {
	case h.turns(read):
		return endTurns
	case h.lost, h.in.begun, read < h.least:
		return endIsCut
	case h.phase != onTCP && !(h.phase == onSAN && h.over): // else without a begin
		return endOpen
	case h.failed != 0:
		return endIsCut
	}
	return endIsEnd
}

// tcpFailed keeps an error of TCP until a Read returns it: the operation that has met it may be
// another one.
func (h *handover) tcpFailed(err error) {
	var errno syscall.Errno
	if errors.As(err, &errno) && errno != syscall.EPIPE { // of a stream that had ended in order
		h.failed = errno
	}
}

// byTCP reports whether TCP carries the connection, and nothing has been proposed.
func (h *handover) byTCP() bool { return h.phase == onTCP || h.phase == flushing }

// goesBack reports whether the connection is on its way from the session to TCP.
func (h *handover) goesBack() bool { return h.phase == leaving || h.phase == flushing }

// sessionOver is the session's end. whole: all that the peer has sent by it has come. It reports
// whether the connection is over with it; if both ends leave the session, that is not known.
func (h *handover) sessionOver(whole bool) (over bool) {
	switch h.phase {
	case proposed: // without an answer
		h.phase = onTCP
		h.lost = h.lost || !whole
	case onSAN:
		h.over = true
		h.lost = h.lost || !whole && !h.in.begun
		return !h.both // else the peer may have left, and TCP's end would be the stream's to it
	case leaving:
		h.over = true
	}
	return false
}

// hasMoved is nil once both directions have moved, which they have had to before both ends leave;
// errLook: not yet. both: they are on the session.
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

// leave begins to leave. asked: as this end's application wants it.
func (h *handover) leave(asked bool) error {
	if h.phase != onSAN {
		return errNotAgreed
	}
	h.phase, h.asked, h.both = leaving, asked, false
	return nil
}

// peerLeaves is the peer's note that it leaves, behind so many bytes of the session.
func (h *handover) peerLeaves(until uint64) error {
	if h.phase != leaving || h.both {
		return errNotAgreed
	}
	h.both, h.until = true, until
	return nil
}

// mayLeave reports whether it is known where the peer's bytes end, on TCP and on the session.
func (h *handover) mayLeave() bool { return h.both && h.in.begun }

// leftInVain is the end of leaving in vain: the session has ended. It reports what sessionOver does.
func (h *handover) leftInVain() (over bool) {
	h.phase = onSAN
	return h.sessionOver(false)
}

// readElsewhere: what is read from TCP, by the descriptor, is not counted any more. So from then on
// the end of the stream is that of TCP, even if the peer dies before it has sent again what was
// returned to it, or bytes may have been lost: a reader of the descriptor cannot tell either.
func (h *handover) readElsewhere() { h.least = 0 }

// left is the end of leaving; returned: so many of the peer's bytes were returned to it, and
// come by TCP; cameBack: some of this end's were, and go by it.
func (h *handover) left(returned uint64, cameBack bool) {
	*h = handover{
		hasLeft: true,
		failed:  h.failed,
		out:     direction{shut: h.out.shut, broken: h.out.broken, at: h.out.at}, // at: for hasMoved
		in:      direction{shut: h.in.shut, broken: h.in.broken, at: h.in.at},
		least:   h.in.at + returned,
	}
	if cameBack {
		h.phase = flushing
	}
}

// flushed is the end of flushing.
func (h *handover) flushed() { h.phase = onTCP }
