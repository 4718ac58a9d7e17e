package session

import (
	"cmp"
	"fmt"
	"slices"
	"sync/atomic"
	"syscall"

	"github.com/sanconn/san/session/internal/wire"
)

// The fetching half of rendezvous. The tail of an offer goes straight into the
// slice of a Read that waits for it, if that is large enough; otherwise into
// chunks of the provider's memory, up to a budget, so that the peer's Write
// ends as it would into TCP's socket buffers.

// fetches are the transfers under way. The bytes of the open tail are requested
// strictly in order, and only a tail that is being read goes to a Read's slice.
type fetches struct {
	into   []byte // rest of the slice of a waiting Read, the target; nil: none
	before int    // bytes of that slice that were filled in another way
	got    int    // bytes of into that have arrived
	asked  int    // bytes of into for which a transfer was started
	stop   bool   // that Read has to end

	reads  queue[read]  // under way
	posted atomic.Int32 // … how many, for the sender: its RDMA writes share their queue
	direct int          // how many of them go to into
	ahead  int          // bytes that the others will bring

	full atomic.Bool // the last RDMA read found no room in the queue
	held int         // bytes in chunks, against the budget
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
	// the other.
	directMin = 256 << 10
	// directDepth is how many RDMA reads are posted ahead into a Read's slice,
	// readAhead how many bytes into chunks.
	directDepth = 4
	readAhead   = 1 << 20
)

// busy reports whether a transfer into the slice of a Read is under way.
func (f *fetches) busy() bool { return f.direct > 0 }

func (f *fetches) push(r read) {
	f.reads.push(r)
	f.posted.Add(1)
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
	f.posted.Add(-1)
	r.t.reading--
	if r.direct {
		f.direct--
	} else {
		f.ahead -= r.n
	}
	return r, true
}

// offerSlice makes p[n:] the target of the transfers that the current tail
// waits for, if it is large enough and nothing else is under way.
func (rx *receiver) offerSlice(p []byte, n int) {
	t, f := rx.cur, &rx.fetch
	if len(t.chunks) > 0 || t.over || t.noSlice || t.reading > 0 {
		return
	}
	if room := len(p) - n; room >= directMin || room >= t.total-t.asked {
		f.into, f.before = p[n:], n
		f.asked, f.got, f.stop = 0, 0, false
	}
}

func (rx *receiver) freeChunk(t *tail, at int) {
	c := &t.chunks[at]
	rx.fetch.held -= max(len(c.buf), chunkFloor)
	rx.mem.Free(c.buf)
	*c = chunk{}
	if at == 0 {
		t.chunks = t.chunks[1:]
	} else {
		t.chunks = slices.Delete(t.chunks, at, at+1)
	}
}

// advanceOffer starts the transfers that can be started for the open tail, and ends the offer
// when it is over. It reports whether it started any.
func (rx *receiver) advanceOffer() (started bool) {
	if rx.open == nil || rx.gone || rx.dead || rx.do.fault != nil {
		return false
	}
	started = rx.startTransfers(rx.open)
	rx.endOffer()
	return started
}

// startTransfers starts transfers of the open tail, into the slice of the Read that reads
// it, or else into chunks.
func (rx *receiver) startTransfers(t *tail) (started bool) {
	f := &rx.fetch
	if rx.discard && !rx.leaving { // nobody will read it
		t.got += t.total - t.asked
		t.asked = t.total
	}
	for !t.stopped && !t.noMem && t.asked < t.total && !rx.discard {
		if f.into != nil && t == rx.cur {
			if f.asked == len(f.into) || f.stop || f.direct == directDepth || !rx.start(t, f.into[f.asked:], false) {
				break
			}
		} else if !rx.fetchAhead(t) {
			break
		}
		started = true
	}
	return started
}

// fetchAhead starts a transfer into a chunk, within the budget.
func (rx *receiver) fetchAhead(t *tail) (started bool) {
	f := &rx.fetch
	if f.ahead >= readAhead || rx.readerWants(t) || f.held >= rx.budget {
		return false
	}
	n := min(chunkSize, rx.lim.MaxRDMA, t.total-t.asked, max(rx.budget-f.held, chunkFloor))
	buf := rx.mem.Alloc(n)
	if buf == nil {
		t.noMem = t.noMem || f.held == 0 // otherwise a chunk of ours will be freed
		return false
	}
	t.chunks = append(t.chunks, chunk{buf: buf})
	f.held += max(len(buf), chunkFloor)
	if !rx.start(t, buf[:n], true) {
		rx.freeChunk(t, len(t.chunks)-1)
		return false
	}
	return true
}

// endOffer ends the open offer if it is over, or cannot go on.
func (rx *receiver) endOffer() {
	t := rx.open
	if t.reading > 0 {
		return
	}
	done := wire.ReadDone{ID: t.id, Count: uint64(t.got)}
	switch {
	case t.got == t.total:
		rx.send(done.Control())
		rx.closeOffer(true)
	case rx.leaving || t.stopped:
		if rx.leaving {
			done.Flags = wire.FlagGone
		}
		rx.send(done.Control())
		rx.closeOffer(false)
	case t.noMem && !t.refused:
		t.refused = true
		rx.send(wire.Cancel{Type: wire.TypeRefuse, ID: t.id}.Control())
	}
}

// closeOffer forgets the open offer. If it is not whole, the rest comes as payload, or
// the Write has ended in the middle.
func (rx *receiver) closeOffer(whole bool) {
	rx.open.over = true
	rx.open = nil
	rx.offers++
	rx.cut = rx.cut || !whole
	rx.do.wake = true
}

// readerWants reports whether a waiting Read can take the transfer into its own slice,
// and wakes it for that.
func (rx *receiver) readerWants(t *tail) bool {
	want := int(rx.want.Load())
	if want == 0 || t.noSlice || rx.kept > 0 || rx.cur != nil && len(rx.cur.chunks) > 0 || want < directMin && want < t.total-t.asked {
		return false
	}
	rx.do.wake = true
	return true
}

// start begins a transfer of t's next bytes into b, or of as many as one
// operation takes.
func (rx *receiver) start(t *tail, b []byte, toChunk bool) bool {
	f := &rx.fetch
	n := min(len(b), t.total-t.asked, rx.lim.MaxRDMA)
	err := rx.mem.Read(b[:n], t.desc, t.asked, t.id)
	f.full.Store(err == ErrWouldBlock)
	switch {
	case err == ErrWouldBlock:
		return false
	case err != nil:
		rx.noMemory(t, toChunk)
		return false
	}
	f.push(read{t, n, !toChunk})
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
func (rx *receiver) noMemory(t *tail, toChunk bool) {
	if toChunk {
		t.noMem = true
	} else {
		t.noSlice = true
		rx.unregistered++
		rx.fetch.stop = true // the Read returns what it has, if anything
	}
}

// waits reports whether more is to come for the Read whose slice is the target.
func (rx *receiver) waits() bool {
	f, t := &rx.fetch, rx.cur
	if f.busy() {
		return true
	}
	// Otherwise only a full queue has kept a transfer from being started.
	return f.asked < len(f.into) && t != nil && !t.over && !t.stopped && !t.noMem && t.asked < t.total && !f.stop
}

// endDirect ends the use of the slice of a Read, and returns how many bytes it has got.
func (rx *receiver) endDirect() int {
	f := &rx.fetch
	n := f.before + f.got
	f.into = nil
	rx.bytes += uint64(n)
	return n
}

// stopDirect begins to end transfers into the slice of a Read that has to return, and
// reports whether there is such a slice.
func (rx *receiver) stopDirect() bool {
	f := &rx.fetch
	if f.into == nil {
		return false
	}
	f.stop = true
	return true
}

// transferred notes that a transfer of an open tail has brought n bytes.
func (rx *receiver) transferred(t *tail, n int, direct bool) {
	t.got += n
	rx.do.wake = true
	if direct {
		rx.fetch.got += n
		rx.movedBytes += uint64(n)
		return
	}
	rx.boxedBytes += uint64(n)
	at := 0
	for t.chunks[at].full {
		at++
	}
	if t.chunks[at].full = true; rx.discard {
		rx.freeChunk(t, at)
	}
}

// withdrawnByPeer handles CancelRead: the offerer wants its memory back.
func (rx *receiver) withdrawnByPeer(id uint32) {
	if t := rx.open; t != nil && t.id == id {
		t.stopped = true
		rx.advanceOffer()
	}
}

// readCompleted handles the completion of an RDMA read.
func (rx *receiver) readCompleted(ev *Event) {
	r, ok := rx.fetch.pop()
	if !ok || r.t.id != ev.ID {
		rx.violation("completion of a read that was not started")
		return
	}
	if ev.Err != nil {
		rx.do.fault = cmp.Or(rx.do.fault, fmt.Errorf("session: RDMA read: %v: %w", ev.Err, syscall.ECONNRESET))
		return
	}
	rx.transferred(r.t, r.n, r.direct)
	rx.tellNearDone(r.t, r.n)
	rx.advanceOffer()
}

// tellNearDone tells the offerer that the end is near, after each RDMA read's worth of bytes,
// n of which have just come: it has slept (writeOffer), and is to be awake then.
func (rx *receiver) tellNearDone(t *tail, n int) {
	each := rx.lim.MaxRDMA
	if left := t.total - t.got; left > 0 && left < nearDone(rx.lim) && (left+n-1)/each > (left-1)/each {
		rx.send(wire.Plain(wire.TypeNearDone))
	}
}

// nearDone is how many bytes of an offer the offerer does not sleep for: at 50 GB/s they take
// 80 µs, and to be woken takes half of that.
func nearDone(lim *Limits) int { return 4 * lim.MaxRDMA }
