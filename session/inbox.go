package session

// The inbox: memory of the provider that this peer alone may write to, until it leaves
// the inbox. Writes of moderate size come through it (outbox.go). It is a ring: Fill
// says how many more bytes are there, and Emptied how many have been read.

// inbox is guarded by rx.mu. Positions count bytes since it was opened.
type inbox struct {
	buf  []byte // nil: there is none
	desc Descriptor
	left bool // the peer writes nothing more to it

	filled  int64 // up to here the peer has filled it
	emptied int64 // … it has been read
	told    int64 // … the peer knows that it has been read
}

const (
	// A box, which stays registered, is at most 1/boxShare of MaxExpose: small where
	// little memory can be registered.
	boxShare = 4
	// The peer is told after each 1/toldShare of the inbox was read.
	toldShare = 4
	// maxBox keeps lengths and positions within an int of 32 bits.
	maxBox = 1 << 30
)

// askedForInbox opens the inbox, or tells the peer that it cannot.
func (s *Session) askedForInbox() {
	in := &s.rx.inbox
	if in.buf != nil && !in.left {
		s.violation("it asks for a second inbox")
		return
	}
	answer := control{t: msgInbox}
	if in.buf == nil && s.caps&capGrant != 0 && !s.rx.closed {
		if buf := s.allocBox(s.cfg.ReceiveBudget); buf != nil {
			clear(buf) // a lying Fill must not reveal the last user's data
			s.rx.heavy += lookMost / 4
			if d, err := s.mem.Expose(buf, RemoteWrite); err == nil {
				*in = inbox{buf: buf, desc: d}
				answer.desc = d
			} else {
				s.mem.Free(buf)
			}
		}
	}
	s.sendControl(answer)
}

// fill counts the bytes that a Fill announces; false: it breaks the protocol.
func (s *Session) fill(m []byte) bool {
	in := &s.rx.inbox
	if len(m) < fillLen || in.buf == nil || in.left {
		s.violation("a Fill of %d bytes out of place", len(m))
		return false
	}
	n := int64(le.Uint32(m[headerLen:]))
	if n == 0 || n > int64(len(in.buf))-(in.filled-in.emptied) {
		s.violation("it fills %d bytes of an inbox of %d that has %d unread", n, len(in.buf), in.filled-in.emptied)
		return false
	}
	in.filled += n
	s.rx.offerBytes += uint64(n)
	return true
}

// takeFill copies from the inbox what the oldest kept message, the Fill m, announced.
func (s *Session) takeFill(p []byte, m []byte) (n int, ok bool) {
	rx := &s.rx
	in := &rx.inbox
	var total int64
	if len(m) >= fillLen {
		total = int64(le.Uint32(m[headerLen:]))
	}
	rest := total - int64(rx.off)
	if rest <= 0 || rest > in.filled-in.emptied { // on shared memory the peer can have changed it
		s.violation("a message changed after it was sent")
		return 0, false
	}
	p = p[:min(int64(len(p)), rest)]
	at := int(in.emptied % int64(len(in.buf)))
	n = copy(p, in.buf[at:])
	n += copy(p[n:], in.buf)
	rx.off += n
	if int64(rx.off) == total {
		rx.off = 0
		s.release()
	}
	s.empty(int64(n))
	return n, true
}

// empty counts n bytes as read, or thrown away.
func (s *Session) empty(n int64) {
	in := &s.rx.inbox
	in.emptied += n
	switch {
	case in.left:
		s.closeInbox()
	case in.emptied-in.told >= int64(max(len(in.buf)/toldShare, 1)):
		in.told = in.emptied
		s.sendControl(control{t: msgEmptied, desc: Descriptor{Addr: uint64(in.told)}})
	}
}

// leftByPeer handles LeaveInbox: the peer writes nothing more to the inbox.
func (s *Session) leftByPeer() {
	in := &s.rx.inbox
	if s.rx.closed {
		return // Close implied it: see leftForGood
	}
	if in.buf == nil || in.left {
		s.violation("it leaves an inbox that it does not have")
		return
	}
	in.left = true
	s.closeInbox()
}

// leftForGood closes the inbox after the peer's Close or Abort.
func (s *Session) leftForGood() {
	if in := &s.rx.inbox; in.buf != nil && !in.left {
		in.left = true
		s.closeInbox()
	}
}

// closeInbox gives the memory back once all of it has been read. Revoking may
// block, so a worker does it.
func (s *Session) closeInbox() {
	in := &s.rx.inbox
	if in.emptied < in.filled || !s.startWorker() {
		return
	}
	old := *in
	*in = inbox{}
	go func() {
		defer s.workers.Done()
		s.mem.Revoke(old.desc)
		s.mem.Free(old.buf)
	}()
}

// freeInbox gives the memory back, after the endpoint and all operations have ended.
func (s *Session) freeInbox() {
	if buf := s.rx.inbox.buf; buf != nil {
		s.rx.inbox = inbox{}
		s.mem.Free(buf)
	}
}
