package sanconn

import (
	"errors"
	"fmt"

	"github.com/sanconn/san/session"
)

// handover is the state of a connection between its two carriers, TCP and a session over a
// SAN. It decides, and does nothing: Conn calls it under its lock, and does what it returns.
//
//	        commit               agree                begin, both ways
//	onTCP ─────────▶ proposed ─────────▶ onSAN (each direction at a position of its own)
//	  ▲                 │                   │
//	  ├─────────────────┘ refuse            │ leave
//	  └───────────────── leaving ◀──────────┘
//	            back
//
// The dialer commits when it sends its proposal, the acceptor when it answers, and learns
// thereby that the dialer has. From its own commit on an end never ends its stream by TCP
// alone, so a FIN that comes without the session's word for it is a cut. Over shm a session has
// that word of a process that is killed, too, if it had read everything and was in no Write.
// From both ends' commits on, each direction moves: its writer tells at which position of TCP's
// stream the session takes over (begin), which the reader has to have read before it turns to
// the session.
//
// Both ends leave the session together: see leave.go.
type handover struct {
	phase  phase
	pinned bool // the program uses TCP's descriptor: no commit any more

	// lost: a session has ended before the peer's direction has moved, after this end's
	// commit. The peer may have moved, and what it sent may be lost. Or TCP was reset behind a
	// way back, and nobody was told.
	lost bool

	out, in direction
}

type phase uint8

const (
	onTCP    phase = iota // no session, or one about which neither end has committed
	proposed              // the dialer has committed, and waits for the answer
	onSAN                 // both ends have committed
	leaving               // going back to TCP
)

func (p phase) String() string { return [...]string{"TCP", "proposed", "SAN", "leaving"}[p] }

// direction is one of the two streams.
type direction struct {
	ended bool // it has been shut here: by CloseWrite or CloseRead
	begun bool // its begin was sent, or has come
	at    uint64
	least uint64 // so many bytes will have gone by TCP at least: the peer has been returned them
}

var (
	errClosing    = stays("the connection is being closed")
	errHalfClosed = stays("the stream has ended in one direction")
	errPinned     = stays("the program uses the descriptor")
	errCounts     = stays("TCP has carried bytes that went by the descriptor")
	errUnderWay   = stays("a move is under way")
	errByTCP      = stays("bytes of the application went by TCP")
	errBegin      = errors.New("the position at which the peer moves lies behind what has come by TCP")
	errBeginTwice = errors.New("the peer moves twice")
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
	case h.out.ended || h.in.ended:
		return errHalfClosed
	}
	h.phase = to
	return nil
}

// answered is the answer to a proposal.
func (h *handover) answered(agreed bool) error {
	if h.phase != proposed {
		return errNotAgreed
	}
	if h.phase = onTCP; agreed {
		h.phase = onSAN
		h.lost = false // the peer had not committed to the session that was lost
	}
	return nil
}

// withdraw takes a commit back of which nothing has been told.
func (h *handover) withdraw() { h.phase = onTCP }

// begin moves this end's direction, which has had so many bytes on TCP.
func (h *handover) begin(at uint64) { h.out.begun, h.out.at = true, at }

// peerBegins is the peer's begin, when so many bytes have been read from TCP.
func (h *handover) peerBegins(at, read uint64) error {
	read = max(read, h.in.least)
	switch {
	case h.in.begun:
		return errBeginTwice
	case at < read:
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
	case h.lost, h.in.begun, read < h.in.least:
		return endIsCut
	case h.phase == onTCP:
		return endIsEnd
	}
	return endOpen
}

// sessionEnded is the session's end, unless that is what both ends leave. whole: all that the
// peer has sent by it has come. It reports whether the connection is over with it.
func (h *handover) sessionEnded(whole bool) (over bool) {
	switch h.phase {
	case proposed: // without an answer
		h.phase = onTCP
		h.lost = h.lost || !whole
	case onSAN:
		h.lost = h.lost || !h.in.begun
		return true
	}
	return false
}

// leave begins to leave.
func (h *handover) leave() error {
	if h.phase != onSAN {
		return errNotAgreed
	}
	h.phase = leaving
	return nil
}

// stays is the end of leaving in vain: the session has ended.
func (h *handover) stays() {
	h.phase = onSAN
	h.sessionEnded(false)
}

// readElsewhere: nobody counts any more what is read from TCP. The end of the stream is that of TCP
// from then on, even if the peer dies before it has sent again what was returned to it: who has the
// descriptor cannot tell.
func (h *handover) readElsewhere() { h.in.least = 0 }

// left is the end of leaving; returned: so many of the peer's bytes were returned to it, and
// come by TCP.
func (h *handover) left(returned uint64) {
	h.phase, h.lost = onTCP, false
	h.out = direction{ended: h.out.ended}
	h.in = direction{ended: h.in.ended, least: h.in.at + returned}
}
