package shm

import (
	"fmt"
	"syscall"
)

// Whether a process that has died had read everything. TCP tells the other end: a socket
// that goes with something unread sends a reset. Here who survives finds out, by two
// positions in the sides' notes, modulo 2³²:
//
//	due   of the writer: the end of the last message that is not control
//	done  of the reader: all before it was dropped or released. It is exact; the head,
//	      which tells a writer of room, is up to headBatch behind
//
// They are plain stores into cache lines that nobody else touches; atomic ones, for each
// message, take a twentieth of a round trip, and due beside the tail a fiftieth. The other
// side's done is read when the kernel has said that its process is dead, and so behind all
// that it has stored. This side's due may be stored at the same moment: that message counts
// or not, like a Write that crosses a reset.

var errPeerDeaf = fmt.Errorf("shm: the peer's process ended and had not read all: %w", syscall.ECONNRESET)

// unread says so of a peer whose process is dead. It can have written anything there, and
// decides nothing by it but how this connection ends.
func (e *endpoint) unread() bool {
	n := &e.control.notes
	return int32(n[e.side].due-n[1-e.side].done) > 0
}
