package session

import (
	"cmp"
	"fmt"
	"slices"
	"sync/atomic"
	"syscall"

	"github.com/sanconn/san/session/internal/wire"
)

// The fetching half of rendezvous. An offer goes directly into the slice of a waiting Read, if that is
// large enough and it pays; otherwise into chunks of the provider's memory, up to a budget, so that the
// peer's Write ends as it would with TCP's socket buffers.

// fetches are the peer's offers, and the transfers in progress. The bytes of the open offer are
// requested strictly in order. Only an offer that is being read goes into a Read's slice.
type fetches struct {
	mem    Memory
	bounds *bounds
	do     *receiverDo
	stats  *traffic

	waiting fifo[*inOffer] // offers behind kept messages
	cur     *inOffer       // the offer that is being read: its message was released
	open    *inOffer       // the offer that is not over; the peer waits for it

	waitingLen atomic.Int64 // length of the slice of a waiting Read; 0: none waits
	into       target       // that slice, if transfers go there
	reads      reads
	queueFull  atomic.Bool // the last RDMA read found no room in the queue
	inChunks   int         // bytes in chunks, which count against the budget
}

// target is the rest of a Read's slice, for transfers.
type target struct {
	buf    []byte // nil: none
	before int    // bytes of the slice that were filled in another way
	asked  int    // bytes of buf for which a transfer was started
	got    int    // … that have arrived
	stop   bool   // the Read has to end
}

// toStart reports whether another transfer into the target can be started.
func (to *target) toStart() bool { return to.asked < len(to.buf) && !to.stop }

// reads are the RDMA reads in progress.
type reads struct {
	fifo[read]
	posted atomic.Int32 // their number, for the sender: its RDMA writes share their queue
	direct int          // how many of them go into the target
	ahead  int          // bytes of the others
}

type read struct {
	t      *inOffer
	n      int
	direct bool
}

const (
	// chunkSize is about what stays in the caches between fetching and copying.
	chunkSize = 256 << 10
	// chunkFloor is the least number of bytes that a chunk counts against the budget.
	chunkFloor = 4 << 10
	// directMin is the size in bytes of the smallest Read into which RDMA goes directly although the
	// offer is longer. For smaller Reads, a copy costs less than waiting for one transfer after the
	// other.
	directMin = 256 << 10
	// directDepth is how many RDMA reads are posted ahead into a Read's slice, and readAhead how many
	// bytes into chunks.
	directDepth = 4
	readAhead   = 1 << 20
)

// busy reports whether a transfer into the slice of a Read is in progress.
func (f *fetches) busy() bool { return f.reads.direct > 0 }

func (q *reads) add(r read) {
	q.push(r)
	q.count(r, 1)
}

// remove removes the oldest read.
func (q *reads) remove() (r read, ok bool) {
	if r, ok = q.pop(); ok {
		q.count(r, -1)
	}
	return r, ok
}

func (q *reads) count(r read, n int) {
	q.posted.Add(int32(n))
	r.t.reading += n
	if r.direct {
		q.direct += n
	} else {
		q.ahead += n * r.n
	}
}

// setTarget makes p[n:] the target of the transfers that the current offer waits for, if it is large
// enough, pays, and no other transfer is in progress.
func (f *fetches) setTarget(p []byte, n int) {
	t := f.cur
	if t.state == inOfferOver || t.reading > 0 || !t.fits(len(p)-n) {
		return
	}
	if t.noSlice = !f.pays(p[n:]); !t.noSlice {
		f.into = target{buf: p[n:], before: n}
	}
}

// pays reports whether the current offer should go into b, the slice of a Read, rather than into
// chunks.
func (f *fetches) pays(b []byte) bool {
	if !f.bounds.weigh {
		return true
	}
	if f.byBlocks(b) {
		b = b[toBlockEnd(b, f.bounds.maxRDMA):]
	}
	pays, err := f.mem.PaysToFill(b[:min(len(b), f.bounds.maxRDMA)])
	if err != nil {
		f.stats.unregistered++
	}
	return pays
}

// byBlocks reports whether b, the slice of a Read, is filled by blocks.
func (f *fetches) byBlocks(b []byte) bool { return len(b) >= blocksMin*f.bounds.maxRDMA }

// readOut ends the use of the first n bytes that unread of the current offer has returned.
func (f *fetches) readOut(n int) {
	c := &f.cur.chunks[0]
	if c.r += n; c.r == c.n {
		f.freeChunk(f.cur, 0)
	}
}

func (f *fetches) freeChunk(t *inOffer, at int) {
	buf := t.chunks[at].buf
	f.inChunks -= max(len(buf), chunkFloor)
	f.mem.Free(buf)
	t.chunks = slices.Delete(t.chunks, at, at+1)
}

// forget frees the chunks of all offers. A chunk into which an RDMA read is in progress is freed by its
// completion, unless all is set: then no completion comes.
func (f *fetches) forget(all bool) {
	f.waiting.push(f.cur)
	f.cur = nil
	if all {
		f.waiting.push(f.open)
		f.open = nil
	}
	for t, ok := f.waiting.pop(); ok; t, ok = f.waiting.pop() {
		for t != nil && len(t.chunks) > 0 && (all || t.chunks[0].full) {
			f.freeChunk(t, 0)
		}
	}
}

// startReads starts the transfers of the open offer that can be started, into the slice of the Read
// that reads it, or else into chunks. It reports whether it has started any. next: the offer is what
// Read takes next.
func (f *fetches) startReads(next bool) (started bool) {
	t := f.open
	for t.toStart() {
		n := 0
		if to := &f.into; to.buf == nil || t != f.cur {
			n = f.fetchAhead(t, next)
		} else if to.toStart() && f.reads.direct < directDepth {
			n = f.startRead(t, to.buf[to.asked:], true)
			to.asked += n
		}
		if n == 0 {
			break
		}
		started = true
	}
	return started
}

// fetchAhead starts a transfer of n bytes into a chunk, within the budget; 0: it started none.
func (f *fetches) fetchAhead(t *inOffer, next bool) (n int) {
	budget := f.bounds.budget
	if f.reads.ahead >= readAhead || next && f.readerWants(t) || f.inChunks >= budget {
		return 0
	}
	n = min(chunkSize, f.bounds.maxRDMA, t.total-t.asked, max(budget-f.inChunks, chunkFloor))
	buf := f.mem.Alloc(n)
	if buf == nil {
		if f.inChunks == 0 { // otherwise one of these chunks will be freed
			t.state = inOfferNoMem
		}
		return 0
	}
	if n = f.startRead(t, buf[:n], false); n == 0 {
		f.mem.Free(buf)
		return 0
	}
	t.chunks = append(t.chunks, chunk{buf: buf, n: n})
	f.inChunks += max(len(buf), chunkFloor)
	return n
}

// readerWants reports whether a waiting Read can take the transfer into its own slice, and wakes the
// Read for that. If the Read ends without it, the idle poller does it: see readWaiting.
func (f *fetches) readerWants(t *inOffer) bool {
	want := int(f.waitingLen.Load())
	if want == 0 || !t.fits(want) {
		return false
	}
	f.do.wake = true
	return true
}

// startRead starts a transfer of t's next n bytes into b, as many as one operation takes. 0: the queue
// is full, or b cannot be registered. b is the target if direct, otherwise a chunk's memory.
func (f *fetches) startRead(t *inOffer, b []byte, direct bool) (n int) {
	maxRDMA := f.bounds.maxRDMA
	n = min(len(b), t.total-t.asked, maxRDMA)
	if direct && f.byBlocks(f.into.buf) {
		n = min(n, toBlockEnd(b, maxRDMA))
	}
	err := f.mem.Read(b[:n], t.desc, t.asked, t.id)
	f.queueFull.Store(err == ErrWouldBlock)
	switch {
	case err == ErrWouldBlock:
		return 0
	case err != nil && !direct:
		t.state = inOfferNoMem
		return 0
	case err != nil:
		t.noSlice = true
		f.stats.unregistered++
		f.into.stop = true // the Read returns what it has, if anything
		return 0
	}
	f.reads.add(read{t, n, direct})
	t.asked += n
	return n
}

// waits reports whether the Read whose slice is the target has to wait for more.
func (f *fetches) waits() bool {
	if f.busy() {
		return true
	}
	// Otherwise only a full queue has prevented a transfer.
	t := f.cur
	return f.into.toStart() && t != nil && t.toStart()
}

// endDirect ends the use of a Read's slice, and returns how many bytes have arrived in it.
func (f *fetches) endDirect() int {
	n := f.into.before + f.into.got
	f.into = target{}
	f.stats.bytes += uint64(n)
	return n
}

// completed notes that the bytes of a transfer have arrived.
func (f *fetches) completed(r read, gone bool) {
	t := r.t
	t.got += r.n
	f.do.wake = true
	f.tellNearDone(t, r.n)
	if r.direct {
		f.into.got += r.n
		f.stats.directBytes += uint64(r.n)
		return
	}
	f.stats.bufferedBytes += uint64(r.n)
	at := 0
	for t.chunks[at].full {
		at++
	}
	t.chunks[at].full = true
	if gone {
		f.freeChunk(t, at)
	}
}

// tellNearDone sends NearDone when the end of the offer is near, after each RDMA read; n bytes have
// just come. The offerer has slept (writeOffer), and is to be awake at the end.
func (f *fetches) tellNearDone(t *inOffer, n int) {
	each := f.bounds.maxRDMA
	if left := t.total - t.got; left > 0 && left < nearDone(each) && (left+n-1)/each > (left-1)/each {
		f.do.send(wire.Plain(wire.TypeNearDone))
	}
}

// nearDone returns for how many last bytes of an offer the offerer does not sleep: at 50 GB/s they take
// 80 µs, and waking takes half of that.
func nearDone(maxRDMA int) int { return 4 * maxRDMA }

// readCompleted handles the completion of an RDMA read.
func (rx *receiver) readCompleted(ev *Event) {
	r, ok := rx.fetch.reads.remove()
	if !ok || r.t.id != ev.ID {
		rx.do.violation("completion of a read that was not started")
		return
	}
	if ev.Err != nil {
		rx.do.fault = cmp.Or(rx.do.fault, fmt.Errorf("session: RDMA read: %v: %w", ev.Err, syscall.ECONNRESET))
		return
	}
	rx.fetch.completed(r, rx.gone)
	rx.advanceOffer()
}
