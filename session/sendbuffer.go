package session

import (
	"sync/atomic"
	"time"

	"github.com/sanconn/san/session/internal/wire"
)

// sendBuffer is the buffer of this end's direction, if the endpoint is not a ring itself: a ring of
// bytes that Writes have copied to memory of the provider, on their way to the peer (D8). RDMA writes
// take the bytes to the peer's inbox (inbox.go), another ring. The Fill after each RDMA write announces
// them; their place in the stream is that of the Fill. The send buffer is opened once the peer has an
// inbox, and given back together with it.
//
// Positions only grow.
type sendBuffer struct {
	state bufferState
	buf   []byte // in bufferOpen and bufferPlain

	written int64 // the room before it is free again
	sent    int64 // … the bytes before it have been sent, as far as this end is concerned
	tail    int64 // … the bytes before it have been written

	inbox   Descriptor // the peer's, from bufferGranted on
	filled  int64      // bytes announced by Fill since the inbox was opened
	emptied int64      // … read by the peer
	skip    int        // Writes until the next AskInbox, after memory was short
	short   bool       // … for the inbox or the send buffer itself, and not for registering it
	without int        // bytes of Writes, since there was an inbox, that one would have served

	writes    fifo[int]     // lengths of RDMA writes in progress
	reads     *atomic.Int32 // the receiver's count of RDMA reads in progress
	queueFull atomic.Bool   // the queue was full: no RDMA write is tried until a write or a read has completed
	inWrite   bool          // a Write goes on after the end of the send buffer
	resting   bool          // the timer of Session.leaveIfIdle is running
}

// bufferState is how far the send buffer has come: none → asked (wantInbox) → granted, or none again
// (inboxByPeer) → open (openBuffer) → plain (bufferToInbox); and from granted, open and plain → none
// (leaveInbox).
type bufferState uint8

const (
	bufferNone    bufferState = iota
	bufferAsked               // AskInbox was sent
	bufferGranted             // the peer has an inbox
	bufferOpen                // … and there is a send buffer
	bufferPlain               // … which cannot be registered: its bytes leave in messages, and then it is given back
)

const (
	// Bytes are copied and then sent in pieces: as many at a time as are in flight, but at least
	// copyLeast, and at most copyMost or half of the rest of the Write. So some bytes are in flight
	// while the last piece is copied.
	copyLeast = 128 << 10
	copyMost  = 512 << 10
	// skipShort is how many Writes do without a send buffer after memory was short here or at the peer;
	// skipLong after it could not be registered, because each attempt costs the process all its idle
	// registrations.
	skipShort = 32
	skipLong  = 1024
	// bufferRest is the time between checks for use: idle buffers are kept for one to two
	// seconds.
	bufferRest = time.Second
)

func (o *sendBuffer) unsent() int { return int(o.tail - o.sent) }

func (o *sendBuffer) used() int { return int(o.tail - o.written) }

func (o *sendBuffer) unused() int { return len(o.buf) - o.used() }

// copyIn copies bytes from the front of p, and returns how many; more: the Write goes on after p.
func (o *sendBuffer) copyIn(p []byte, more bool) int {
	if o.state != bufferOpen {
		return 0
	}
	n := min(len(p), o.unused(), max(copyLeast, min(copyMost, int(o.sent-o.written), len(p)/2)))
	if n == 0 {
		return 0
	}
	at := int(o.tail % int64(len(o.buf)))
	copy(o.buf, p[copy(o.buf[at:], p[:n]):n])
	o.tail += int64(n)
	o.inWrite = more || n < len(p)
	return n
}

// contiguousRoom returns room after the tail, in one piece, at most most bytes, or nil if there is
// none.
func (o *sendBuffer) contiguousRoom(most int) []byte {
	n := min(most, o.unused())
	if n == 0 {
		return nil
	}
	at := int(o.tail % int64(len(o.buf)))
	n = min(n, len(o.buf)-at)
	return o.buf[at : at+n : at+n]
}

// next returns bytes that were not sent, up to where the ring wraps.
func (o *sendBuffer) next() []byte {
	at := int(o.sent % int64(len(o.buf)))
	return o.buf[at:min(at+o.unsent(), len(o.buf))]
}

// flags returns the flags of a message with the bytes before sent.
func (o *sendBuffer) flags() uint8 { return wire.More(o.unsent() > 0 || o.inWrite) }

// reset empties the buffer, and returns its memory.
func (o *sendBuffer) reset() (buf []byte) {
	buf = o.buf
	o.state, o.buf = bufferNone, nil
	o.written, o.sent, o.tail = 0, 0, 0
	return buf
}

// drainBuffer sends what the send buffer has, as far as there is credit, and room in the peer's inbox
// and in the queue.
func (t *sender) drainBuffer() {
	for sent := true; sent && t.buffer.unsent() > 0; {
		if t.buffer.state == bufferPlain {
			sent = t.bufferToMessage()
		} else {
			sent = t.bufferToInbox()
		}
	}
}

// bufferToMessage sends bytes of the send buffer in a message, once none of its bytes is in flight by
// RDMA, because room becomes free in order.
func (t *sender) bufferToMessage() bool {
	o := &t.buffer
	if o.sent != o.written {
		return false
	}
	b := o.next()
	room := t.room(min(len(b), minFragment), len(b))
	if room == nil {
		return false
	}
	n := copy(room[wire.HeaderLen:], b)
	o.sent += int64(n)
	o.written += int64(n)
	t.commitMessage(room, wire.TypeData, o.flags(), wire.HeaderLen+n)
	return true
}

// bufferToInbox starts an RDMA write of bytes of the send buffer, and announces them. What is sent
// later arrives later.
func (t *sender) bufferToInbox() bool {
	o := &t.buffer
	b := o.next()
	to := int(o.filled % int64(o.inbox.Len))
	n := min(len(b), int(o.inbox.Len)-to, int(o.inbox.Len)-int(o.filled-o.emptied), t.terms.maxRDMA)
	if n == 0 || o.queueFull.Load() {
		return false
	}
	room := t.room(wire.FillLen-wire.HeaderLen, wire.FillLen-wire.HeaderLen)
	if room == nil {
		return false
	}
	if err := t.mem.Write(b[:n], o.inbox, to, 0); err != nil {
		t.msgs.Commit(0)
		if err == ErrWouldBlock {
			o.queueFull.Store(true) // before the reads are checked, as handleLocked checks it after counting them
			o.queueFull.Store(o.writes.len() > 0 || o.reads.Load() > 0)
			return false
		}
		o.state = bufferPlain // it may have been unregistered in favor of others
		return true
	}
	o.writes.push(n)
	o.sent += int64(n)
	o.filled += int64(n)
	t.stats.bufferedBytes += uint64(n)
	wire.PutFill(room, uint32(n))
	t.commitMessage(room, wire.TypeFill, o.flags(), wire.FillLen)
	return true
}

// writeCompleted handles the completion of an RDMA write to the peer's inbox.
func (t *sender) writeCompleted(err error) {
	o := &t.buffer
	n, ok := o.writes.pop()
	o.queueFull.Store(false)
	if !ok {
		t.do.violation("completion of a write that was not started")
	}
	if !ok || err != nil { // Endpoint.Err follows; what has come before it can still be read
		return
	}
	o.written += int64(n)
	if o.unsent() > 0 {
		t.flush() // as after Emptied
	}
}

// wantInbox requests the peer's inbox if there is none and it pays, for n bytes of a Write and earlier
// ones. n is 0 for a Write that waits for credit, which without an inbox comes only when the peer
// reads. It reports whether there is an inbox, but no send buffer.
func (t *sender) wantInbox(n int) (alloc bool) {
	o := &t.buffer
	if o.state == bufferNone && t.terms.bufferFrom > 0 {
		if n >= t.terms.bufferFrom {
			o.without = min(o.without+min(n, maxBuffer), maxBuffer)
		}
		switch {
		case o.without < t.terms.bufferAfter:
		case o.skip > 0:
			o.skip -= min(n, 1) // a waiting Write calls often, and counts once
		default:
			o.state = bufferAsked
			t.queueControl(wire.Plain(wire.TypeAskInbox))
		}
	}
	return o.state == bufferGranted && t.reserved == nil && !t.closed
}

// openBuffer makes buf the send buffer, or notes that there was no memory for it if buf is nil.
func (t *sender) openBuffer(buf []byte) {
	o := &t.buffer
	o.state, o.buf = bufferOpen, buf
	if buf == nil {
		t.stats.noBox++
		t.leaveInbox()
		o.skip, o.short = skipShort, true
	}
	t.flush()
}

// leaveInbox ends the use of the peer's inbox, and of the send buffer, which must be empty. It returns
// the send buffer's memory.
func (t *sender) leaveInbox() (buf []byte) {
	o := &t.buffer
	o.skip = 0
	if o.state == bufferPlain {
		o.skip, o.short = skipLong, false
	}
	buf = o.reset()
	o.inbox, o.filled, o.emptied, o.without = Descriptor{}, 0, 0, 0
	t.queueControl(wire.Plain(wire.TypeLeaveInbox))
	return buf
}

// idle reports whether nothing was written since position at, and all bytes have been sent.
func (o *sendBuffer) idle(at int64) bool {
	return o.state >= bufferGranted && o.filled == at && o.used() == 0
}

// inboxByPeer handles the answer to AskInbox; a length of 0: the peer has no memory.
func (o *sendBuffer) inboxByPeer(d Descriptor, do *due, stats *traffic) {
	if o.state != bufferAsked || d.Len > maxBuffer {
		do.violation("an inbox of %d bytes that was not asked for", d.Len)
		return
	}
	if d.Len == 0 {
		stats.noBox++
		o.state, o.skip, o.short = bufferNone, skipShort, true
	} else {
		o.state, o.inbox = bufferGranted, d
		do.wake = true // a waiting Write goes on through the inbox
	}
}

// emptiedByPeer handles Emptied: the peer has read its inbox up to upTo.
func (o *sendBuffer) emptiedByPeer(upTo uint64, do *due) {
	switch {
	case o.state < bufferGranted: // it crossed this end's LeaveInbox
	case upTo > uint64(o.filled) || int64(upTo) < o.emptied:
		do.violation("it has read %d bytes of %d in its inbox, and before that %d", upTo, o.filled, o.emptied)
	default:
		o.emptied = int64(upTo)
	}
}
