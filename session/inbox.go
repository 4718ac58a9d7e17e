package session

import "github.com/sanconn/san/session/internal/wire"

// inbox is memory of the provider that only this peer may write to, until the peer leaves it. The bytes
// of the peer's send buffer come through it (sendbuffer.go). It is a ring: Fill announces how many more
// bytes are there, and Emptied reports how many have been read. Positions count bytes since it was
// opened.
type inbox struct {
	mem  Memory
	size int // in bytes, unless memory is short; 0: no inbox is opened
	do   *receiverDo

	exposed
	state inboxState
	last  bool // the peer has closed: no further inbox is opened

	filled   int64 // up to here the peer has filled it
	emptied  int64 // … it has been read
	reported int64 // … Emptied has reported it as read
}

// exposed is memory that the peer may write to.
type exposed struct {
	buf  []byte
	desc Descriptor
}

// inboxState is how the peer uses the inbox: none → open (open) → left (left) → again (requested). Once
// all has been read, left → none, and again → open (close).
type inboxState uint8

const (
	inboxNone  inboxState = iota
	inboxOpen             // the peer writes to it
	inboxLeft             // … no more
	inboxAgain            // … but requests another
)

const (
	// bufferShare: a send buffer, which stays registered while it is used, has at most 1/bufferShare of
	// MaxExpose, so that it is small if little memory can be registered.
	bufferShare = 4
	// Emptied is sent after each 1/reportShare of the inbox, and after each reportMost bytes. So a
	// Close at the other end sees each second (closeWait) that this end goes on reading, if it reads as
	// much.
	reportShare = 4
	reportMost  = 128 << 10
	// maxBuffer keeps lengths and positions within an int of 32 bits. This implementation's buffers
	// have at most mostBuffer, by any configuration: so a reader knows how much a peer that stops has
	// left.
	maxBuffer  = 1 << 30
	mostBuffer = defaultBudget
)

func (in *inbox) unread() int64 { return in.filled - in.emptied }

// contiguous returns the next bytes, up to where the ring wraps and up to most.
func (in *inbox) contiguous(most int64) []byte {
	at := in.emptied % int64(len(in.buf))
	return in.buf[at:min(at+most, int64(len(in.buf)))]
}

// bufferSize returns the size of a send buffer or inbox within a budget; 0: it would be of no use.
func bufferSize(lim *Limits, budget int) int {
	size := min(budget, lim.MaxExpose/bufferShare, mostBuffer)
	if size < max(lim.Inbox, minFragment) {
		return 0
	}
	return size
}

// allocBuffer allocates memory of this size for a send buffer or inbox, or less if memory is short, or
// returns nil if there is too little.
func allocBuffer(mem Memory, size int) []byte {
	buf := mem.Alloc(size)
	for buf == nil && size > copyLeast {
		size /= 2
		buf = mem.Alloc(size)
	}
	return buf
}

// requested handles AskInbox: it opens the inbox, or reports that there is no memory.
func (in *inbox) requested() {
	switch in.state {
	case inboxNone:
		in.open()
	case inboxLeft:
		in.state = inboxAgain
	default:
		in.do.violation("it asks for a second inbox")
	}
}

func (in *inbox) open() {
	var memory Descriptor
	if in.size > 0 && !in.last {
		if buf := allocBuffer(in.mem, in.size); buf != nil {
			clear(buf) // a false Fill must not reveal the last user's data
			in.do.long = true
			if d, err := in.mem.Expose(buf, RemoteWrite); err == nil {
				in.exposed, in.state = exposed{buf, d}, inboxOpen
				memory = d
			} else {
				in.mem.Free(buf)
			}
		}
	}
	in.do.send(wire.Inbox(memory))
}

// fill counts the n bytes that a Fill announces. It returns false if the Fill breaks the protocol.
func (in *inbox) fill(m []byte) (n int64, ok bool) {
	length, err := wire.ParseFill(m)
	if err != nil || in.state != inboxOpen {
		in.do.violation("a Fill of %d bytes out of place", len(m))
		return 0, false
	}
	n = int64(length)
	if n == 0 || n > int64(len(in.buf))-in.unread() {
		in.do.violation("it fills %d bytes of an inbox of %d that has %d unread", n, len(in.buf), in.unread())
		return 0, false
	}
	in.filled += n
	return n, true
}

// countRead counts n bytes as read or thrown away.
func (in *inbox) countRead(n int64) {
	in.emptied += n
	switch {
	case in.state >= inboxLeft && in.unread() == 0:
		in.close()
	case in.last:
	case in.emptied-in.reported >= int64(max(min(len(in.buf)/reportShare, reportMost), 1)):
		in.reported = in.emptied
		in.do.send(wire.Emptied(uint64(in.reported)))
	}
}

// left handles LeaveInbox: the peer writes nothing more to the inbox.
func (in *inbox) left() {
	switch {
	case in.last: // Close has implied it
	case in.state != inboxOpen:
		in.do.violation("it leaves an inbox that it does not have")
	default:
		in.state = inboxLeft
		in.close()
	}
}

// leftForGood is left for the peer's Close or Abort.
func (in *inbox) leftForGood() {
	if in.state == inboxOpen {
		in.left()
	}
	in.last = true
}

// close starts to give the memory back once all of it has been read, and opens the next inbox if the
// peer has requested it.
func (in *inbox) close() {
	if in.unread() > 0 {
		return
	}
	again := in.state == inboxAgain
	in.do.revoke = in.exposed
	*in = inbox{mem: in.mem, size: in.size, do: in.do, last: in.last}
	if again {
		in.open()
	}
}
