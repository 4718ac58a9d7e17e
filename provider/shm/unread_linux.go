package shm

import (
	"fmt"
	"syscall"
)

// Had a process that died read everything? TCP tells the other end: a socket closed with
// unread data sends a reset. Here the survivor finds out from two positions in the sides'
// notes, modulo 2³²:
//
//	due   the writer's: the end of the last message that is not control
//	done  the reader's: everything before it was dropped or released. It is exact, unlike
//	      the head, which may lag by headBatch
//
// Both are plain stores into cache lines that nobody else touches. Atomic stores would cost
// a twentieth of a round trip for each message, and due beside the tail a fiftieth. The
// peer's done is read after the kernel has reported its death, hence after all its stores.
// This side's due may be stored at the same moment: that message counts or not, like a
// Write that crosses a reset.

var errPeerDeaf = fmt.Errorf("shm: the peer's process ended and had not read all: %w", syscall.ECONNRESET)

// unread reports whether a dead peer left data unread. The peer can have written anything
// there, but it decides only how this connection ends.
func (e *endpoint) unread() bool {
	n := &e.control.notes
	return int32(n[e.side].due-n[1-e.side].done) > 0
}

// follow keeps due within 2³¹ of the tail, however much control a side sends that sends
// nothing else. What lies further back than the ring is long has been dropped.
func (n *notes) follow(tail uint64) {
	const far = 1 << 30 // in time: a message is shorter than the other half
	if at := uint32(tail); at-n.due > far {
		n.due = at - ringSize
	}
}
