package session

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"sync/atomic"
	"syscall"
	"time"
)

// The fetching half of rendezvous. The tail of an offer goes straight into the
// slice of a Read that waits for it, if that is large enough; otherwise into
// chunks of the provider's memory, up to a budget, so that the peer's Write
// ends as it would into TCP's socket buffers. All of it is guarded by rx.mu.

// tail is the part of an offered Write that did not come with the offer's message.
type tail struct {
	id      uint32
	byWrite bool       // the peer writes it to memory that we grant
	desc    Descriptor // otherwise: where it is
	total   int
	asked   int // bytes, from the front, for which a transfer was started
	got     int // … completed
	reading int // RDMA reads under way
	over    bool
	stopped bool // the peer has withdrawn it: start no more transfers
	noMem   bool // there is no memory for it: give it up when nothing is under way
	refused bool // the peer was asked to withdraw it
	noSlice bool // a Read's slice could not be registered: use chunks only
	chunks  []chunk
}

// chunk is a part of a tail that is fetched ahead of any Read.
type chunk struct {
	buf  []byte // from Alloc
	n    int    // bytes of it that hold, or will hold, data
	r    int    // bytes already read
	full bool   // the transfer to it has completed
}

// fetches are the transfers under way. The bytes of the open tail are requested
// strictly in order, and only a tail that is being read goes to a Read's slice.
type fetches struct {
	into   []byte // rest of the slice of a waiting Read, the target; nil: none
	before int    // bytes of that slice that were filled in another way
	got    int    // bytes of into that have arrived
	asked  int    // bytes of into for which a transfer was started
	stop   bool   // that Read has to end

	reads  queue[read] // under way
	direct int         // how many of them go to into
	ahead  int         // bytes that the others will bring

	full    atomic.Bool // the last RDMA read found no room in the queue
	granted bool        // the peer has a grant
	toChunk bool        // … of a chunk
	grant   Descriptor
	size    int // bytes of the grant

	held int // bytes in chunks, against the budget
}

// read is an RDMA read under way.
type read struct {
	t      *tail
	n      int
	direct bool
}

const (
	// chunkSize is about what stays in cache between fetching and copying.
	chunkSize = 256 << 10
	// chunkFloor is the least, in bytes, that a chunk counts against the budget.
	chunkFloor = 4 << 10
	// directMin is the smallest Read, in bytes, that RDMA goes to directly although
	// the tail is longer. Below, a copy costs less than waiting for one transfer after
	// the other, which costs a sixth of the rate with Reads of 64 KiB on rxe.
	directMin = 256 << 10
	// directDepth is how many RDMA reads are posted ahead into a Read's slice,
	// readAhead how many bytes into chunks.
	directDepth = 4
	readAhead   = 1 << 20
	// maxOffer keeps offered lengths in an int, whatever the peer says: 2⁴⁰-1
	// bytes, or 2³¹-1 where an int has 32 bits.
	maxOffer = math.MaxInt & (1<<40 - 1)
)

func newTail(t msgType, m []byte) (*tail, error) {
	body, length := offerReadLen, uint64(0)
	if t == msgOfferWrite {
		body = offerWriteLen
	}
	if len(m) < body {
		return nil, fmt.Errorf("an offer of %d bytes", len(m))
	}
	tl := &tail{id: le.Uint32(m[headerLen:]), byWrite: t == msgOfferWrite}
	if tl.byWrite {
		length = le.Uint64(m[headerLen+idLen:])
	} else {
		tl.desc = getDesc(m[headerLen+idLen:])
		length = tl.desc.Len
	}
	if length == 0 || length > maxOffer {
		return nil, fmt.Errorf("an offer of %d bytes of memory", length)
	}
	tl.total = int(length)
	return tl, nil
}

// needs is the capability of this end that the offer assumes.
func (t *tail) needs() uint32 {
	if t.byWrite {
		return capGrant
	}
	return capRead
}

// takeTail copies what has been fetched of the current tail into p, and drops the
// tail at its end.
func (s *Session) takeTail(p []byte) (n int) {
	t := s.rx.cur
	for n < len(p) && len(t.chunks) > 0 && t.chunks[0].full {
		c := &t.chunks[0]
		k := copy(p[n:], c.buf[c.r:c.n])
		n += k
		if c.r += k; c.r == c.n {
			s.freeChunk(t, 0)
		}
	}
	if len(t.chunks) == 0 && t.over {
		s.rx.cur = nil
	}
	return n
}

// offerSlice makes p[n:] the target of the transfers that the current tail
// waits for, if it is large enough and nothing else is under way.
func (s *Session) offerSlice(p []byte, n int) {
	t, f := s.rx.cur, &s.rx.fetch
	if len(t.chunks) > 0 || t.over || t.noSlice || t.reading > 0 || f.granted {
		return
	}
	if room := len(p) - n; room >= directMin || room >= t.total-t.asked {
		f.into, f.before = p[n:], n
		f.asked, f.got, f.stop = 0, 0, false
	}
}

func (s *Session) freeChunk(t *tail, at int) {
	c := &t.chunks[at]
	s.rx.fetch.held -= max(len(c.buf), chunkFloor)
	s.mem.Free(c.buf)
	*c = chunk{}
	if at == 0 {
		t.chunks = t.chunks[1:]
	} else {
		t.chunks = slices.Delete(t.chunks, at, at+1)
	}
}

// pump starts the transfers that can be started for the open tail, and ends the offer
// when it is over. It reports whether it started any.
func (s *Session) pump() (started bool) {
	if s.rx.open == nil || s.gone || s.failure.Load() != nil {
		return false
	}
	started = s.feed(s.rx.open)
	s.endOffer()
	return started
}

// feed starts transfers of the open tail.
func (s *Session) feed(t *tail) (started bool) {
	f := &s.rx.fetch
	if s.rx.discard && !s.rx.leaving && !t.byWrite { // nobody will read it
		t.got += t.total - t.asked
		t.asked = t.total
	}
	for !t.stopped && !t.noMem && !f.granted && t.asked < t.total && !s.rx.discard {
		if f.into != nil && t == s.rx.cur {
			if f.asked == len(f.into) || f.stop || f.direct == directDepth || !s.start(t, f.into[f.asked:], false) {
				break
			}
			started = true
			continue
		}
		if f.ahead >= readAhead || s.readerWants(t) || f.held >= s.cfg.ReceiveBudget {
			break
		}
		n := min(chunkSize, t.total-t.asked, max(s.cfg.ReceiveBudget-f.held, chunkFloor))
		buf := s.mem.Alloc(n)
		if buf == nil {
			if f.held == 0 { // no chunk of ours will be freed
				t.noMem = true
			}
			break
		}
		t.chunks = append(t.chunks, chunk{buf: buf})
		f.held += max(len(buf), chunkFloor)
		if !s.start(t, buf[:n], true) {
			s.freeChunk(t, len(t.chunks)-1)
			break
		}
		started = true
	}
	return started
}

// endOffer ends the open offer if it is over, or cannot go on.
func (s *Session) endOffer() {
	rx := &s.rx
	t := rx.open
	gone := byte(0)
	if rx.leaving {
		gone = flagGone
	}
	switch done := (control{t: msgReadDone, flags: gone, id: t.id, desc: Descriptor{Addr: uint64(t.got)}}); {
	case t.reading > 0 || rx.fetch.granted: // something is under way
	case t.got == t.total:
		if !t.byWrite {
			done.flags = 0
			s.sendControl(done)
		}
		s.closeOffer(true)
	case t.byWrite && (rx.leaving || rx.discard || t.stopped || t.noMem):
		flags := gone
		if rx.discard && !rx.leaving {
			flags = flagTaken
		}
		if flags != 0 || !t.stopped {
			s.sendControl(control{t: msgGrant, flags: flags, id: t.id})
		}
		s.closeOffer(false)
	case rx.leaving || t.stopped:
		s.sendControl(done)
		s.closeOffer(false)
	case t.noMem && !t.refused:
		t.refused = true
		s.sendControl(control{t: msgRefuse, id: t.id})
	}
}

// closeOffer forgets the open offer. If it is not whole, the rest comes as payload, or
// the Write has ended in the middle.
func (s *Session) closeOffer(whole bool) {
	rx := &s.rx
	rx.open.over = true
	rx.open = nil
	rx.offers++
	rx.cut = rx.cut || !whole
	s.readable()
}

// readerWants reports whether a waiting Read can take the transfer into its own slice,
// and wakes it for that.
func (s *Session) readerWants(t *tail) bool {
	want := int(s.rx.want.Load())
	if want == 0 || t.noSlice || s.rx.kept > 0 || s.rx.cur != nil && len(s.rx.cur.chunks) > 0 || want < directMin && want < t.total-t.asked {
		return false
	}
	s.readable()
	return true
}

// start begins a transfer of t's next bytes into b, or of as many as one
// operation takes.
func (s *Session) start(t *tail, b []byte, toChunk bool) bool {
	f := &s.rx.fetch
	n := min(len(b), t.total-t.asked)
	if t.byWrite {
		n = min(n, s.lim.MaxExpose)
		if toChunk {
			clear(b[:n]) // a lying WriteDone must not reveal the last user's data
		}
		d, err := s.mem.Expose(b[:n], RemoteWrite)
		if err != nil {
			s.noMemory(t, toChunk)
			return false
		}
		f.granted, f.toChunk, f.grant, f.size = true, toChunk, d, n
		s.sendControl(control{t: msgGrant, id: t.id, desc: d})
	} else {
		n = min(n, s.lim.MaxRDMA)
		err := s.mem.Read(b[:n], t.desc, t.asked, t.id)
		f.full.Store(err == ErrWouldBlock)
		switch {
		case err == ErrWouldBlock:
			return false
		case err != nil:
			s.noMemory(t, toChunk)
			return false
		}
		f.push(read{t, n, !toChunk})
	}
	t.asked += n
	if toChunk {
		t.chunks[len(t.chunks)-1].n = n
	} else {
		f.asked += n
	}
	return true
}

// noMemory notes that memory of a chunk or a Read's slice cannot be registered, so that
// no transfer to it could be started.
func (s *Session) noMemory(t *tail, toChunk bool) {
	if toChunk {
		t.noMem = true
	} else {
		t.noSlice = true
		s.rx.fetch.stop = true // the Read returns what it has, if anything
	}
}

// busy reports whether a transfer into the slice of a Read is under way.
func (f *fetches) busy() bool { return f.direct > 0 || f.granted && !f.toChunk }

func (f *fetches) push(r read) {
	f.reads.push(r)
	r.t.reading++
	if r.direct {
		f.direct++
	} else {
		f.ahead += r.n
	}
}

// pop takes the oldest read that is under way.
func (f *fetches) pop() (r read, ok bool) {
	if r, ok = f.reads.pop(); !ok {
		return r, false
	}
	r.t.reading--
	if r.direct {
		f.direct--
	} else {
		f.ahead -= r.n
	}
	return r, true
}

// directDone ends a Read whose slice is the target, and returns its result; (0, nil)
// while transfers are under way.
func (s *Session) directDone() (int, error) {
	f, t := &s.rx.fetch, s.rx.cur
	if s.failure.Load() == nil && s.ep.Err() == nil {
		s.pump()
		if f.busy() {
			return 0, nil
		}
		if f.asked < len(f.into) && t != nil && !t.over && !t.stopped && !t.noMem && t.asked < t.total && !f.stop {
			return 0, nil // the queue was full
		}
	} else if f.busy() {
		// The slice is still the target of transfers: see brokenDirect.
		return 0, nil
	}
	n := f.before + f.got
	f.into = nil
	s.rx.bytes += uint64(n)
	s.poll() // what did not go to the slice can go to chunks
	if n == 0 {
		return 0, s.streamEnd()
	}
	return n, nil
}

// stopDirect ends transfers into the slice of a Read that has to return, and
// returns how many bytes it got. rx.mu must not be held. If the peer does not stop
// in time, the connection is aborted (D12).
func (s *Session) stopDirect(w *waiter) (n int) {
	s.rx.mu.Lock()
	if s.rx.fetch.into == nil {
		s.rx.mu.Unlock()
		return 0
	}
	s.rx.fetch.stop = true
	if f := &s.rx.fetch; f.granted && !f.toChunk {
		s.sendControl(control{t: msgCancelWrite, id: s.rx.open.id})
	}
	s.rx.mu.Unlock()
	limit := time.AfterFunc(s.cfg.CancelTimeout, func() {
		s.kill(fmt.Errorf("session: a transfer that was cancelled did not end: %w", syscall.ETIMEDOUT))
	})
	defer limit.Stop()
	for {
		s.rx.mu.Lock()
		if !s.gone {
			s.poll()
			n, _ = s.directDone()
			s.serviceTx()
		}
		busy := s.rx.fetch.into != nil
		s.rx.mu.Unlock()
		if !busy {
			return n
		}
		if n, broken := s.brokenDirect(); broken {
			return n
		}
		s.pause(w, &s.rd, s.readEvents())
	}
}

// brokenDirect checks whether the connection has ended while a Read's slice is the
// target of transfers. If so it aborts the endpoint, which ends them, and n is what
// had arrived by then. No lock but rd.op may be held.
func (s *Session) brokenDirect() (n int, broken bool) {
	s.rx.mu.Lock()
	f := &s.rx.fetch
	switch {
	case f.into == nil:
	case s.gone:
		broken = true
	case s.failure.Load() != nil || s.ep.Err() != nil:
		// Events that came since the last poll, by this Read or anybody else, may have
		// ended them. If there are more than one poll takes, the Read polls again.
		broken = s.poll() < lookMost && f.busy()
	}
	s.rx.mu.Unlock()
	if !broken {
		return 0, false
	}
	s.kill(fmt.Errorf("session: the connection ended in the middle of a transfer: %w", syscall.ECONNRESET))
	s.rx.mu.Lock()
	n = f.before + f.got
	f.into = nil
	s.rx.bytes += uint64(n)
	s.rx.mu.Unlock()
	return n, true
}

// arrived notes that a transfer of an open tail has brought n bytes; 0: it failed.
func (s *Session) arrived(t *tail, n int, direct bool) {
	f := &s.rx.fetch
	t.got += n
	s.rx.offerBytes += uint64(n)
	if direct {
		f.got += n
	} else {
		at := 0
		for t.chunks[at].full {
			at++
		}
		if t.chunks[at].n, t.chunks[at].full = n, true; n == 0 || s.rx.discard {
			s.freeChunk(t, at)
		}
	}
	s.readable()
}

// withdrawnByPeer handles CancelRead: the offerer wants its memory back.
func (s *Session) withdrawnByPeer(id uint32) {
	if t := s.rx.open; t != nil && t.id == id && !t.byWrite {
		t.stopped = true
		s.pump()
	}
}

func (s *Session) readCompleted(ev *Event) {
	r, ok := s.rx.fetch.pop()
	if !ok || r.t.id != ev.ID {
		s.violation("completion of a read that was not started")
		return
	}
	switch {
	case ev.Err == nil:
		s.arrived(r.t, r.n, r.direct)
	case errors.Is(ev.Err, ErrRevoked):
		r.t.stopped = true
		s.arrived(r.t, 0, r.direct)
	default:
		s.fail(fmt.Errorf("session: RDMA read: %v: %w", ev.Err, syscall.ECONNRESET))
		return
	}
	s.pump()
}

func (s *Session) writeDoneByPeer(id uint32, count uint64, last bool) {
	f := &s.rx.fetch
	t := s.rx.open
	if t == nil || t.id != id || !t.byWrite {
		return // it crossed our end of the offer
	}
	if count > uint64(f.size) || count > 0 && !f.granted {
		s.violation("it has written %d bytes into a grant of %d", count, f.size)
		return
	}
	if f.granted {
		s.mem.Revoke(f.grant)
		f.granted = false
		t.asked -= f.size - int(count)
		if !f.toChunk {
			f.asked -= f.size - int(count)
		}
		s.arrived(t, int(count), !f.toChunk)
	}
	if last {
		t.stopped = true
	} else if count == 0 && !f.stop && !t.noMem && !s.rx.discard {
		s.violation("it gives a grant back that was not cancelled")
		return
	}
	s.pump()
}
