package verbs

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"syscall"
	"unsafe"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/session"
)

// remote is access to remote memory, in both directions; it implements session.Memory. An exposure is a
// window on a cached registration (window.go), or a registration of its own, exact in range and rights,
// which is deregistered to revoke it. The cache registers the memory of Reads and Writes at this end.
type remote struct {
	q         *queuePair
	send      *sendQueue
	dev       *device
	dom       *domain
	user      *regcache.User // of the domain's cache
	maxExpose int            // bytes of one exposure
	maxRDMA   int            // bytes of one Read or Write

	// use is read-locked by Expose, Revoke, Read and Write while they use memory of the domain: the
	// endpoint's end waits for calls that began before it.
	use sync.RWMutex

	// Guarded by mu of q:
	reads, writes fifo[transfer] // posted, in order
	done          fifo[transfer] // completed, for Poll
	wr            [2]ibv.SendWR  // wr[1] is used if a transfer takes two requests (quirks.go)

	exposures struct {
		mu sync.Mutex
		m  map[uint64]exposure // by key; nil after the end; guarded by mu
	}
	windows windows
	allocs  regcache.Lent
}

// exposure is memory that the peer may access.
type exposure struct {
	region *regcache.Region
	window *window // nil: by the region's own key
}

// transfer is a Read or a Write.
type transfer struct {
	kind   session.EventKind
	id     uint32
	err    error
	region *regcache.Region // the memory at this end
}

func (r *remote) open(cfg Config, dev *device, dom *domain) {
	r.dev, r.dom, r.user = dev, dom, dom.cache.NewUser()
	r.maxExpose = min(exposeLimit(memlock()), dev.most.registration)
	r.maxRDMA = min(maxRDMA, dev.most.registration, dev.most.transfer)
	r.reads = newFIFO[transfer](maxReads)
	r.writes = newFIFO[transfer](maxWrites)
	r.done = newFIFO[transfer](maxReads + maxWrites)
	r.exposures.m = make(map[uint64]exposure)
	r.windows = windows{q: r.q, pd: dom.pd, may: dev.mayHaveWindows(cfg), trust: &dev.windows}
}

// sends returns how many work requests may be in the send queue.
func (r *remote) sends() int {
	n := r.dev.partsOfTransfer() * (maxReads + maxWrites)
	if r.windows.may {
		n += 2 * maxWindows // a bind and an invalidation for each
	}
	return n
}

// Expose implements session.Memory.
func (r *remote) Expose(b []byte, rights session.Rights) (session.Descriptor, error) {
	if len(b) == 0 || len(b) > r.maxExpose {
		return session.Descriptor{}, fmt.Errorf("verbs: expose %d bytes, at most %d: %w", len(b), r.maxExpose, syscall.EINVAL)
	}
	r.use.RLock()
	defer r.use.RUnlock()
	if r.q.over() {
		return session.Descriptor{}, errOver
	}
	key, x, err := r.expose(b, rights)
	if err != nil {
		return session.Descriptor{}, err
	}
	r.exposures.mu.Lock()
	defer r.exposures.mu.Unlock()
	r.exposures.m[uint64(key)] = x
	returnable := x.window != nil && x.window.returnable
	return session.Descriptor{Addr: uint64(addressOf(b)), Key: uint64(key), Len: uint64(len(b)), Returnable: returnable}, nil
}

func (r *remote) expose(b []byte, rights session.Rights) (key uint32, x exposure, err error) {
	if r.windows.on() {
		key, x, err = r.exposeByWindow(b, rights)
		// In a shared domain a registration's key would serve any connection's peer. So the bytes go by
		// messages.
		if !errors.Is(err, errNoWindow) || r.dom.shared {
			return key, x, err
		}
	}
	var access regcache.Access
	if rights&session.RemoteRead != 0 {
		access |= regcache.RemoteRead
	}
	if rights&session.RemoteWrite != 0 {
		access |= regcache.RemoteWrite | regcache.LocalWrite
	}
	region, err := r.user.Acquire(b, access)
	if err != nil {
		return 0, x, err
	}
	return region.RKey(), exposure{region: region}, nil
}

// PaysToOffer implements session.Memory. It returns true if an offer takes no longer than a copy, and b
// is cached already or will stay cached, because copies of it have cost as much as registering it.
// Without windows each offer takes a registration for the peer as well, which must cost no more than
// the copy that it replaces.
func (r *remote) PaysToOffer(b []byte) (bool, error) {
	if !r.dev.costs.offerPays(len(b)) {
		return false, nil
	}
	local := regcache.BindWindow
	if !r.windows.on() {
		if !r.dev.costs.registersLikeCopies() {
			return false, nil
		}
		local = regcache.LocalRead
	}
	return r.dom.cache.Worth(b, local, r.dev.costs.copiesBefore())
}

// PaysToFill implements session.Memory, like PaysToOffer.
func (r *remote) PaysToFill(b []byte) (bool, error) {
	return r.dom.cache.Worth(b, regcache.LocalWrite, r.dev.costs.copiesBefore())
}

// CommitReturn implements session.Memory: the peer's device invalidates the peer's window with the
// message, if this device can send that.
func (r *remote) CommitReturn(n int, from session.Descriptor) {
	var returns uint32
	if r.dev.returns.Load() && from.Key <= math.MaxUint32 {
		returns = uint32(from.Key)
	}
	r.send.commit(&r.send.control, n, returns)
}

// Revoke implements session.Memory. It blocks until the memory is invalidated, at most 5 s
// (revokeTime), or deregistered, which takes about a millisecond during a transfer.
func (r *remote) Revoke(d session.Descriptor) {
	r.use.RLock()
	defer r.use.RUnlock()
	r.exposures.mu.Lock()
	x, ok := r.exposures.m[d.Key]
	delete(r.exposures.m, d.Key)
	r.exposures.mu.Unlock()
	if !ok {
		return
	}
	if x.window != nil {
		r.windows.unbind(x.window)
	}
	if err := x.region.Release(); err != nil {
		// The peer may still have access, which ends only with the queue pair.
		r.q.fail(deviceError(err))
	}
}

// Read implements session.Memory.
func (r *remote) Read(into []byte, from session.Descriptor, off int, id uint32) error {
	return r.startTransfer(&r.reads, transfer{kind: session.ReadDone, id: id}, into, from, off, regcache.LocalWrite)
}

// Write implements session.Memory.
func (r *remote) Write(from []byte, to session.Descriptor, off int, id uint32) error {
	return r.startTransfer(&r.writes, transfer{kind: session.WriteDone, id: id}, from, to, off, regcache.LocalRead)
}

func (r *remote) startTransfer(q *fifo[transfer], t transfer, b []byte, d session.Descriptor, off int, access regcache.Access) error {
	if len(b) == 0 || len(b) > r.maxRDMA || off < 0 ||
		uint64(off) > d.Len || uint64(len(b)) > d.Len-uint64(off) ||
		d.Addr > math.MaxUint64-d.Len || d.Key > math.MaxUint32 {
		return fmt.Errorf("verbs: %d bytes at %d of a descriptor of %d: %w", len(b), off, d.Len, syscall.EINVAL)
	}
	r.use.RLock()
	defer r.use.RUnlock()
	if err := r.room(q); err != nil {
		return err
	}
	region, err := r.user.Acquire(b, access)
	if err != nil {
		return err
	}
	t.region = region
	if err := r.post(q, t, b, d, off); err != nil {
		region.Release()
		return err
	}
	return nil
}

// room returns why nothing can be posted. It is called before the memory is registered, which would be
// in vain.
func (r *remote) room(q *fifo[transfer]) error {
	r.q.mu.Lock()
	defer r.q.mu.Unlock()
	if r.roomLocked(q) == session.ErrWouldBlock {
		r.q.drainLocked()
	}
	return r.roomLocked(q)
}

// roomLocked also counts completed transfers, as done must have room for all.
func (r *remote) roomLocked(q *fifo[transfer]) error {
	switch {
	case r.q.overLocked():
		return errOver
	case q.n+r.done.n >= len(q.items):
		return session.ErrWouldBlock
	}
	return nil
}

// post posts a transfer, as two work requests if the device needs that.
func (r *remote) post(q *fifo[transfer], t transfer, b []byte, d session.Descriptor, off int) error {
	wr := ibv.SendWR{
		ID: kindWrite, Opcode: ibv.OpWrite, Flags: ibv.Signaled,
		RemoteAddr: d.Addr + uint64(off), RemoteKey: uint32(d.Key),
		SGE: ibv.SGE{Addr: uint64(addressOf(b)), Length: uint32(len(b)), LKey: t.region.LKey()},
	}
	source := wr.SGE.Addr
	if t.kind == session.ReadDone {
		wr.ID, wr.Opcode = kindRead, ibv.OpRead
		source = wr.RemoteAddr
	}
	first := r.dev.firstPart(source, len(b))
	r.q.mu.Lock()
	defer r.q.mu.Unlock()
	if err := r.roomLocked(q); err != nil {
		return err
	}
	wrs := r.wr[:1]
	wrs[0] = wr
	if first > 0 {
		wrs = r.wr[:2]
		split(wrs, uint32(first))
	}
	n, err := r.q.qp.PostSend(wrs)
	switch {
	case n > 0:
		q.push(t)
		if err != nil { // the device has the first request, and the memory, until the queue pair is destroyed
			r.q.failLocked(deviceError(err))
		}
		return nil
	case errors.Is(err, syscall.ENOMEM):
		return session.ErrWouldBlock
	}
	return err
}

// split splits the first work request into two: one for its first bytes, without a completion, and one
// for the rest.
func split(wrs []ibv.SendWR, first uint32) {
	wrs[1] = wrs[0]
	part, rest := &wrs[0], &wrs[1]
	part.ID, part.Flags = kindPart, 0
	part.SGE.Length = first
	rest.RemoteAddr += uint64(first)
	rest.SGE.Addr += uint64(first)
	rest.SGE.Length -= first
}

// transferredLocked queues the completion of the oldest transfer of its kind.
func (r *remote) transferredLocked(wc *ibv.WC, q *fifo[transfer]) {
	if q.n == 0 {
		return
	}
	t := q.pop()
	if wc.Status != ibv.Success {
		t.err = statusError(wc)
	}
	r.done.push(t)
}

const (
	// freely is how many bytes Alloc gives as long as any are left: a session fetches ahead in pieces
	// of that size.
	freely = 256 << 10
	// Above that, Alloc gives at most 1/arenaShare of what is left, so that the first connections that
	// send much leave an inbox for later ones. Later ones get smaller pieces: eighty in 64 MiB; in 1
	// GiB four hundred of 1 MiB or more.
	arenaShare = 16
)

// Alloc implements session.Memory. The memory is of the process's arena, and cached from its first use
// on.
func (r *remote) Alloc(n int) []byte {
	arena := regcache.DefaultArena()
	if n > freely && int64(n) > arena.Left()/arenaShare {
		return nil
	}
	buf, err := arena.Get(n)
	if err != nil {
		return nil
	}
	return r.allocs.Slice(buf)
}

// Free implements session.Memory.
func (r *remote) Free(b []byte) { r.allocs.Put(b) }

// abandonLocked ends all transfers in progress.
func (r *remote) abandonLocked(why error) {
	for _, q := range []*fifo[transfer]{&r.reads, &r.writes} {
		for q.n > 0 {
			t := q.pop()
			t.err = why
			r.done.push(t)
		}
	}
}

// close ends this endpoint's and the peer's use of memory in the domain. The queue pair is destroyed.
// Calls in progress end first.
func (r *remote) close() {
	r.q.mu.Lock()
	r.abandonLocked(nil)
	left := r.done
	r.done = fifo[transfer]{}
	r.q.mu.Unlock()
	for left.n > 0 {
		left.pop().region.Release()
	}
	r.revokeAll()
}

// revokeAll revokes all exposures. The endpoint has ended.
func (r *remote) revokeAll() {
	r.use.Lock() // earlier Revokes have released their exposures; later ones find none
	defer r.use.Unlock()
	r.exposures.mu.Lock()
	exposed := r.exposures.m
	r.exposures.m = nil
	r.exposures.mu.Unlock()
	for _, x := range exposed {
		x.region.Release()
	}
}

// addressOf returns the address of a slice's memory, for the device. The memory belongs to an arena,
// which is outside the Go heap, or is kept alive and in place by the holder of a registration.
func addressOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }
