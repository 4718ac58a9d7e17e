package session

import "github.com/sanconn/san/session/internal/wire"

// inbox is memory of the provider that this peer alone may write to, until it leaves the
// inbox. Bytes of the peer's box come through it (outbox.go). It is a ring: Fill announces
// how many more bytes are there, and Emptied reports how many have been read. Positions
// count bytes since it was opened.
type inbox struct {
	buf   []byte // nil: there is none
	desc  Descriptor
	left  bool // the peer writes nothing more to it
	asked bool // … but wants another, once all has been read

	filled   int64 // up to here the peer has filled it
	emptied  int64 // … it has been read
	reported int64 // … the peer knows that it has been read
}

const (
	// A box, which stays registered, is at most 1/boxShare of MaxExpose: small where
	// little memory can be registered.
	boxShare = 4
	// Emptied is sent after each 1/reportShare of the inbox, and each reportMost bytes: a
	// Close at the other end then sees each second (closeWait) that this end goes on
	// reading, if it reads as much.
	reportShare = 4
	reportMost  = 128 << 10
	// maxBox keeps lengths and positions within an int of 32 bits.
	maxBox = 1 << 30
)

func (in *inbox) unread() int64 { return in.filled - in.emptied }

// next returns the next bytes, up to where the ring wraps and up to most.
func (in *inbox) next(most int64) []byte {
	at := in.emptied % int64(len(in.buf))
	return in.buf[at:min(at+most, int64(len(in.buf)))]
}

// boxSize is the size of a box or inbox within a budget; 0: it would be of no use.
func boxSize(lim *Limits, budget int) int {
	size := min(budget, lim.MaxExpose/boxShare, maxBox)
	if size < max(lim.Inbox, minFragment) {
		return 0
	}
	return size
}

// allocBox allocates memory for a box or inbox, less where memory is short; nil: too little
// to be of use.
func allocBox(mem Memory, lim *Limits, budget int) []byte {
	size := boxSize(lim, budget)
	if size == 0 {
		return nil
	}
	buf := mem.Alloc(size)
	for buf == nil && size > boxUnit {
		size /= 2
		buf = mem.Alloc(size)
	}
	return buf
}

// inboxWanted handles AskInbox: it opens the inbox, or reports that there is no memory.
func (rx *receiver) inboxWanted() {
	in := &rx.inbox
	switch {
	case in.buf != nil && !in.left || in.asked:
		rx.violation("it asks for a second inbox")
	case in.buf != nil:
		in.asked = true
	default:
		rx.openInbox()
	}
}

func (rx *receiver) openInbox() {
	var answer wire.Inbox
	if rx.caps&wire.CapInbox != 0 && !rx.closed {
		if buf := allocBox(rx.mem, rx.lim, rx.budget); buf != nil {
			clear(buf) // a false Fill must not reveal the last user's data
			if d, err := rx.mem.Expose(buf, RemoteWrite); err == nil {
				rx.inbox = inbox{buf: buf, desc: d}
				answer.Memory = d
			} else {
				rx.mem.Free(buf)
			}
		}
	}
	rx.send(answer.Control())
}

// filled counts the n bytes that a Fill announces; false: it breaks the protocol.
func (rx *receiver) filled(m []byte) (n int64, ok bool) {
	in := &rx.inbox
	fill, err := wire.ParseFill(m)
	if err != nil || in.buf == nil || in.left {
		rx.violation("a Fill of %d bytes out of place", len(m))
		return 0, false
	}
	n = int64(fill.Length)
	if n == 0 || n > int64(len(in.buf))-in.unread() {
		rx.violation("it fills %d bytes of an inbox of %d that has %d unread", n, len(in.buf), in.unread())
		return 0, false
	}
	in.filled += n
	rx.boxedBytes += uint64(n)
	return n, true
}

// emptied counts n bytes as read, or thrown away.
func (rx *receiver) emptied(n int64) {
	in := &rx.inbox
	in.emptied += n
	switch {
	case in.left && in.unread() == 0:
		rx.closeInbox()
	case rx.closed:
	case in.emptied-in.reported >= int64(max(min(len(in.buf)/reportShare, reportMost), 1)):
		in.reported = in.emptied
		rx.send(wire.Emptied{Count: uint64(in.reported)}.Control())
	}
}

// inboxLeft handles LeaveInbox: the peer writes nothing more to the inbox.
func (rx *receiver) inboxLeft() {
	in := &rx.inbox
	if rx.closed {
		return // Close implied it: see leftForGood
	}
	if in.buf == nil || in.left {
		rx.violation("it leaves an inbox that it does not have")
		return
	}
	in.left = true
	rx.closeInbox()
}

// leftForGood closes the inbox after the peer's Close or Abort.
func (rx *receiver) leftForGood() {
	if in := &rx.inbox; in.buf != nil && !in.left {
		in.left = true
		rx.closeInbox()
	}
}

// closeInbox has the memory given back once all of it has been read, and opens the next one
// if the peer has asked for it.
func (rx *receiver) closeInbox() {
	if in := &rx.inbox; in.unread() == 0 {
		asked := in.asked && !rx.gone
		rx.do.close = *in
		if *in = (inbox{}); asked {
			rx.openInbox()
		}
	}
}
