package session

import (
	"errors"
	"fmt"
	"syscall"
	"time"
)

// The offering half of rendezvous: a Write whose bytes stay where they are
// until the peer has fetched them (D6), or has granted memory to write them to
// (D7). The other half is in fetch.go. Nothing of the stream follows an open offer
// until it is over, and a Write ends with an offer that the peer cut short.

// outOffer is the offer of the current Write. Guarded by tx.mu.
type outOffer struct {
	active bool
	id     uint32
	total  int // bytes offered
	taken  int // bytes that the peer has, from the front
	over   bool

	cancelled bool // by RDMA read: CancelRead was sent

	// by RDMA write
	grant   Descriptor // memory that the peer granted
	granted bool
	refused bool // the peer wants the rest as payload
	stop    bool // the peer wants its memory back
	posted  int  // of the grant, bytes in RDMA writes started
	written int  // of the grant, bytes completed
	failed  int  // of the grant, bytes of RDMA writes that have failed
}

// offerInline is how many bytes of an offered Write go with the offer itself
// (D5): enough for a protocol's header, so that the reader can start.
const offerInline = 1 << 10

// plan decides how large Writes go, once both ends' abilities are known.
func (tx *sender) plan(s *Session) {
	t := s.cfg.Threshold
	if t == 0 {
		t = s.lim.Threshold
	}
	off := s.cfg.Disable
	tx.byRead = s.lim.MaxExpose > 0 && s.peer.caps&capRead != 0 && off&FeatureRDMARead == 0
	byWrite := s.lim.CanWrite && s.peer.caps&capGrant != 0 && off&FeatureRDMAWrite == 0
	if off&FeatureInline != 0 {
		t = 1 // offer all that can be offered
	}
	if t > 0 && (tx.byRead || byWrite) {
		tx.threshold = max(t, 2) // an offer has at least one byte behind it
		if off&FeatureInline == 0 {
			tx.threshold = max(tx.threshold, minOffer)
		}
	}
	if byWrite && s.lim.Inbox > 0 && off&FeatureInline == 0 {
		tx.boxMin = s.lim.Inbox
		if tx.threshold > 0 && s.cfg.Threshold == 0 {
			tx.threshold = max(tx.threshold, s.lim.InboxTo)
		}
	}
}

// minOffer is the least threshold in bytes, well above the part that goes with the
// offer.
const minOffer = 2 * offerInline

// writeOffered writes p by offers, and as payload what cannot be offered.
func (s *Session) writeOffered(p []byte, more bool) (n int, err error) {
	noInline := s.cfg.Disable&FeatureInline != 0
	for len(p)-n >= s.tx.threshold {
		k, err := s.offer(p[n:], more)
		n += k
		if errors.Is(err, errNotTaken) {
			s.poke(true) // if the peer refuses because it closes, that comes next
			if noInline && s.writeBlocked() == nil {
				return n, fmt.Errorf("session: %w: %w", err, syscall.ENOBUFS)
			}
			break
		}
		if n == len(p) {
			return n, nil // complete, even if the offer ended with an error
		}
		if err != nil {
			return n, err
		}
	}
	return s.writeInline(p, n, more)
}

// errNotTaken: memory could not be exposed here, or the peer could not reach it.
var errNotTaken = errors.New("memory cannot be registered for RDMA")

// offer offers as much of p as one exposure takes, and waits until the peer
// has it. It returns how many bytes of p are the peer's.
func (s *Session) offer(p []byte, more bool) (n int, err error) {
	tx := &s.tx
	first := min(offerInline, tx.maxMsg-offerReadLen)
	if s.cfg.Disable&FeatureInline != 0 || first >= len(p) {
		first = 0
	}
	tail := p[first:]
	var desc Descriptor
	if tx.byRead {
		tail = tail[:min(len(tail), s.lim.MaxExpose)]
		if desc, err = s.mem.Expose(tail, RemoteRead); err != nil {
			return 0, fmt.Errorf("%w: %w", errNotTaken, err)
		}
	}

	var w waiter
	defer s.doneWaiting(&w, &s.wr)
	exposed := tx.byRead
	for !s.sendOffer(p[:first], desc, len(tail), more || first+len(tail) < len(p)) {
		if err = s.writeBlocked(); err != nil {
			if tx.byRead {
				s.mem.Revoke(desc)
			}
			return 0, err
		}
		s.waitWrite(&w)
	}
	for {
		over, moved := s.driveOffer(tail)
		if over {
			break
		}
		if err = s.writeBlocked(); err != nil {
			exposed = !s.withdraw(desc, tail, &w) && exposed
			break
		}
		if moved {
			w.progress(&s.wr)
		}
		s.waitWrite(&w)
	}
	taken := tx.offerEnded(first)
	n = first + taken
	if exposed {
		s.mem.Revoke(desc)
	}
	if taken == len(tail) {
		return n, err
	}
	if err == nil {
		if err = s.writeBlocked(); err == nil {
			err = errNotTaken
		}
	}
	return n, err
}

// offerEnded forgets the offer, which is over, and counts the bytes that the peer has
// of it, and the first bytes that went with its message. It returns the former.
func (tx *sender) offerEnded(first int) (taken int) {
	tx.mu.Lock()
	defer tx.mu.Unlock()
	taken = tx.out.taken
	tx.out = outOffer{}
	tx.offers++
	tx.offerBytes += uint64(taken)
	tx.bytes += uint64(first + taken)
	return taken
}

// sendOffer opens the offer, if there is room for its message.
func (s *Session) sendOffer(first []byte, d Descriptor, total int, more bool) bool {
	tx := &s.tx
	tx.mu.Lock()
	defer tx.mu.Unlock()
	if s.gone || s.failure.Load() != nil || tx.last != 0 {
		return false
	}
	if tx.pending() {
		s.flushLocked()
	}
	if tx.backlogged() > 0 || tx.outbox.unsent() > 0 {
		return false
	}
	t, n := msgOfferWrite, offerWriteLen
	if tx.byRead {
		t, n = msgOfferRead, offerReadLen
	}
	n += len(first)
	room := s.reserveData(n-headerLen, n-headerLen)
	if room == nil {
		return false
	}
	le.PutUint64(room[headerLen:], uint64(tx.newID()))
	if tx.byRead {
		putDesc(room[headerLen+idLen:], d)
	} else {
		le.PutUint64(room[headerLen+idLen:], uint64(total))
	}
	copy(room[n-len(first):], first)
	s.commit(room, t, moreFlag(more), n)
	tx.out = outOffer{active: true, id: tx.nextID, total: total}
	return true
}

func (tx *sender) newID() uint32 {
	if tx.nextID++; tx.nextID == boxID {
		tx.nextID++
	}
	return tx.nextID
}

// driveOffer does what the open offer needs from this end: nothing where the
// peer reads; where it granted memory, RDMA writes.
func (s *Session) driveOffer(tail []byte) (over, moved bool) {
	tx := &s.tx
	tx.mu.Lock()
	defer tx.mu.Unlock()
	o := &tx.out
	if o.over {
		return true, true
	}
	if s.gone || !o.granted {
		return false, false
	}
	size := int(o.grant.Len)
	for !o.stop && !o.refused && o.posted < size {
		n := min(size-o.posted, s.lim.MaxRDMA)
		from := tail[o.taken+o.posted:][:n]
		err := s.mem.Write(from, o.grant, o.posted, o.id)
		if errors.Is(err, ErrWouldBlock) {
			return false, moved
		}
		if err != nil {
			o.refused = true // our memory cannot be registered: the rest goes as payload
			break
		}
		tx.writes.push(n)
		o.posted += n
		moved = true
	}
	if o.written < o.posted {
		return false, moved
	}
	// The grant is used up, or has to be given back.
	o.taken += o.written
	o.granted, o.over = false, o.taken == o.total || o.refused
	c := control{t: msgWriteDone, id: o.id, desc: Descriptor{Addr: uint64(o.written)}}
	if o.over {
		c.flags = flagLast
	}
	o.posted, o.written, o.stop = 0, 0, false
	s.owe(c)
	return o.over, true
}

// withdraw ends the open offer before the peer has all of it (D12); tx.out.taken then
// says how much it has. If the peer does not answer within CancelTimeout, the
// connection is aborted. revoked: the memory has been revoked.
func (s *Session) withdraw(d Descriptor, tail []byte, w *waiter) (revoked bool) {
	tx := &s.tx
	if s.failure.Load() != nil || s.ep.Err() != nil {
		return s.withdrawEnded(d)
	}
	tx.mu.Lock()
	switch o := &tx.out; {
	case o.over, tx.byRead:
	case o.granted:
		o.stop, o.refused = true, true
	default:
		o.over = true
		s.owe(control{t: msgWriteDone, flags: flagLast, id: o.id})
	}
	tx.mu.Unlock()
	limit := time.AfterFunc(s.cfg.CancelTimeout, func() {
		s.kill(fmt.Errorf("session: the peer did not give up a transfer that was cancelled: %w", syscall.ETIMEDOUT))
	})
	defer limit.Stop()
	for {
		if over, _ := s.driveOffer(tail); over {
			return false
		}
		if tx.byRead {
			tx.mu.Lock()
			s.takeBack(tx.out.id)
			tx.mu.Unlock()
		}
		if s.failure.Load() != nil || s.ep.Err() != nil {
			return s.withdrawEnded(d)
		}
		s.waitWrite(w)
	}
}

// withdrawEnded is withdraw on a connection that has ended. It avoids aborting it where
// it can, so that what has arrived can still be read.
func (s *Session) withdrawEnded(d Descriptor) (revoked bool) {
	tx := &s.tx
	if s.failure.Load() == nil && tx.byRead {
		s.mem.Revoke(d)
		return true
	}
	s.poke(true) // for completions of posted writes, and what came before them
	tx.mu.Lock()
	idle := tx.out.posted == tx.out.written+tx.out.failed
	tx.mu.Unlock()
	if tx.byRead || !idle { // the peer may still read our memory, or our own writes may
		s.kill(fmt.Errorf("session: the connection ended in the middle of a transfer: %w", syscall.ECONNRESET))
	}
	return false
}

// The methods below handle the peer's messages about our offers, and completions.
// rx.mu is held, except for takeBack.

func (s *Session) readDoneByPeer(id uint32, count uint64, flags byte) {
	tx := &s.tx
	gone := flags&flagGone != 0
	tx.mu.Lock()
	defer tx.mu.Unlock()
	if gone {
		s.wr.set(stPeerClosed)
	}
	o := &tx.out
	switch {
	case !o.active || !tx.byRead || o.id != id || o.over: // it crossed our own end of that offer
		return
	case count > uint64(o.total) || count < uint64(o.total) && !o.cancelled && !gone:
		s.violation("it says that it has read %d bytes of %d", count, o.total)
		return
	default:
		o.taken, o.over = int(count), true
	}
	s.wr.signal()
}

func (s *Session) refusedByPeer(id uint32) {
	s.tx.mu.Lock()
	s.takeBack(id)
	s.tx.mu.Unlock()
}

// takeBack asks the peer to give the open offer up. tx.mu is held.
func (s *Session) takeBack(id uint32) {
	if o := &s.tx.out; o.active && s.tx.byRead && o.id == id && !o.over && !o.cancelled {
		o.cancelled = true
		s.owe(control{t: msgCancelRead, id: id})
	}
}

func (s *Session) grantByPeer(id uint32, d Descriptor, flags byte) {
	s.tx.mu.Lock()
	defer s.tx.mu.Unlock()
	o := &s.tx.out
	gone := flags&flagGone != 0
	if gone {
		s.wr.set(stPeerClosed)
	}
	if !o.active || o.id != id || o.over {
		return
	}
	if s.tx.byRead || o.granted || d.Len > uint64(o.total-o.taken) {
		s.violation("it grants %d bytes for an offer of %d", d.Len, o.total-o.taken)
		return
	}
	if taken := flags&flagTaken != 0; d.Len == 0 && (taken || gone) {
		if taken {
			o.taken = o.total
		}
		o.over = true
		s.wr.signal()
		return
	}
	o.grant, o.granted = d, true
	o.refused = o.refused || d.Len == 0
	s.wr.signal()
}

func (s *Session) cancelByPeer(id uint32) {
	s.tx.mu.Lock()
	defer s.tx.mu.Unlock()
	if o := &s.tx.out; o.active && o.id == id && o.granted {
		o.stop = true
		s.wr.signal()
	}
}

func (s *Session) writeCompleted(ev *Event) {
	s.tx.mu.Lock()
	defer s.tx.mu.Unlock()
	n, ok := s.tx.writes.pop()
	switch o := &s.tx.out; {
	case !ok || ev.ID != boxID && (!o.active || o.id != ev.ID):
		s.violation("completion of a write that was not started")
	case ev.Err != nil: // Endpoint.Err follows; what has come before it can still be read
		if ev.ID != boxID {
			o.failed += n
		}
	case ev.ID == boxID:
		s.boxed(n)
	default:
		o.written += n
		s.wr.signal()
	}
}
