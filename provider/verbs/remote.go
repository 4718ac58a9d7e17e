package verbs

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"syscall"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/session"
)

// Remote access. An exposure is a window on a cached registration (window.go) or
// a registration of its own, exact in range and rights; deregistering is what
// takes that back. The memory of Reads and Writes at this end is registered by
// the cache.
type remoteState struct {
	// use is read-locked by Expose, Revoke, Read and Write while they hold memory of
	// the domain: free waits for those that began before the end.
	use sync.RWMutex

	reads, writes fifo[transfer] // posted, in order
	done          fifo[transfer] // completed, for Poll
	wrRDMA        [2]ibv.SendWR  // the second, if one takes two (siw.go)

	exposures struct {
		mu sync.Mutex
		m  map[uint64]exposure // by key; nil after the end. Guarded by mu
	}
	windows windows
	allocs  struct {
		mu sync.Mutex
		m  map[*byte]*regcache.Buffer // guarded by mu
	}
}

// exposure is memory that the peer may reach.
type exposure struct {
	region *regcache.Region
	window *window // nil: by the region's own key
}

// transfer is a Read or a Write.
type transfer struct {
	kind   session.EventKind
	id     uint32
	err    error
	region *regcache.Region // of the memory at this end
}

func (e *Endpoint) initRemote() {
	e.reads = newFIFO[transfer](maxReads)
	e.writes = newFIFO[transfer](maxWrites)
	e.done = newFIFO[transfer](maxReads + maxWrites)
	e.exposures.m = make(map[uint64]exposure)
}

// Expose implements session.Endpoint.
func (e *Endpoint) Expose(b []byte, rights session.Rights) (session.Descriptor, error) {
	if len(b) == 0 || len(b) > e.limits.MaxExpose {
		return session.Descriptor{}, fmt.Errorf("verbs: expose %d bytes, at most %d: %w", len(b), e.limits.MaxExpose, syscall.EINVAL)
	}
	e.use.RLock()
	defer e.use.RUnlock()
	if e.err.Load() != nil {
		return session.Descriptor{}, errEnded
	}
	key, x, err := e.expose(b, rights)
	if err != nil {
		return session.Descriptor{}, err
	}
	e.exposures.mu.Lock()
	defer e.exposures.mu.Unlock()
	e.exposures.m[uint64(key)] = x
	return session.Descriptor{Addr: uint64(addressOf(b)), Key: uint64(key), Len: uint64(len(b))}, nil
}

func (e *Endpoint) expose(b []byte, rights session.Rights) (key uint32, x exposure, err error) {
	if e.windows.on {
		key, x, err = e.exposeByWindow(b, rights)
		// In a domain that is shared a registration's key would serve any peer:
		// its bytes go by messages.
		if !errors.Is(err, errNoWindow) || e.dom.shared {
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
	r, err := e.dom.cache.Acquire(b, access)
	if err != nil {
		return 0, x, err
	}
	return r.RKey(), exposure{region: r}, nil
}

// Revoke implements session.Endpoint. It blocks until the memory is invalidated, for
// at most 5 s (revokeTime), or deregistered, about a millisecond in the middle of a
// transfer.
func (e *Endpoint) Revoke(d session.Descriptor) {
	e.use.RLock()
	defer e.use.RUnlock()
	e.exposures.mu.Lock()
	x, ok := e.exposures.m[d.Key]
	delete(e.exposures.m, d.Key)
	e.exposures.mu.Unlock()
	if !ok {
		return
	}
	if x.window != nil {
		e.unbind(x.window)
	}
	if err := x.region.Release(); err != nil {
		// The peer may still have access: only the end of the queue pair ends it.
		e.broken(deviceError(err))
	}
}

// Read implements session.Endpoint.
func (e *Endpoint) Read(into []byte, from session.Descriptor, off int, id uint32) error {
	access := regcache.LocalWrite
	if e.dev.iwarp() && !e.dev.siw() {
		access |= regcache.RemoteWrite // iWARP's read response is a write (RFC 5040)
	}
	return e.move(&e.reads, transfer{kind: session.ReadDone, id: id}, into, from, off, access)
}

// Write implements session.Endpoint.
func (e *Endpoint) Write(from []byte, to session.Descriptor, off int, id uint32) error {
	return e.move(&e.writes, transfer{kind: session.WriteDone, id: id}, from, to, off, regcache.LocalRead)
}

func (e *Endpoint) move(q *fifo[transfer], t transfer, b []byte, d session.Descriptor, off int, access regcache.Access) error {
	if len(b) == 0 || len(b) > maxRDMA || off < 0 ||
		uint64(off) > d.Len || uint64(len(b)) > d.Len-uint64(off) ||
		d.Addr > math.MaxUint64-d.Len || d.Key > math.MaxUint32 {
		return fmt.Errorf("verbs: %d bytes at %d of a descriptor of %d: %w", len(b), off, d.Len, syscall.EINVAL)
	}
	e.use.RLock()
	defer e.use.RUnlock()
	if full, err := e.queueFull(q); full || err != nil {
		return orWouldBlock(err)
	}
	r, err := e.dom.cache.Acquire(b, access)
	if err != nil {
		return err
	}
	if err := e.postMove(q, t, r, b, d, off); err != nil {
		r.Release()
		return err
	}
	return nil
}

// queueFull is asked before the memory is registered, which would be in vain.
func (e *Endpoint) queueFull(q *fifo[transfer]) (bool, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if q.n+e.done.n >= len(q.items) {
		e.drain()
	}
	if e.gone || e.failing != nil {
		return false, errEnded
	}
	return q.n+e.done.n >= len(q.items), nil
}

func orWouldBlock(err error) error {
	if err == nil {
		return session.ErrWouldBlock
	}
	return err
}

func (e *Endpoint) postMove(q *fifo[transfer], t transfer, r *regcache.Region, b []byte, d session.Descriptor, off int) error {
	t.region = r
	remote, local := d.Addr+uint64(off), uint64(addressOf(b))
	source := local
	if t.kind == session.ReadDone {
		source = remote
	}
	first := 0
	if e.dev.iwarp() {
		first = siwSplit(source, len(b))
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.gone || e.failing != nil:
		return errEnded
	case q.n+e.done.n >= len(q.items):
		return session.ErrWouldBlock
	}
	wrs := e.wrRDMA[:1]
	wr := &wrs[0]
	*wr = ibv.SendWR{
		ID: kindWrite, Opcode: ibv.OpWrite, Flags: ibv.Signaled, NumSGE: 1,
		RemoteAddr: remote, RemoteKey: uint32(d.Key),
	}
	if t.kind == session.ReadDone {
		wr.ID, wr.Opcode = kindRead, ibv.OpRead
	}
	wr.SGE[0] = ibv.SGE{Addr: local, Length: uint32(len(b)), LKey: r.LKey()}
	if first > 0 {
		wrs = e.wrRDMA[:2]
		wrs[1] = *wr
		wr.ID, wr.Flags = kindPart, 0
		wr.SGE[0].Length = uint32(first)
		rest := &wrs[1]
		rest.RemoteAddr += uint64(first)
		rest.SGE[0].Addr += uint64(first)
		rest.SGE[0].Length -= uint32(first)
	}
	switch n, err := e.qp.PostSend(wrs); {
	case n > 0 && err != nil:
		e.fail(deviceError(err)) // the device has a part, and the memory until the queue pair goes
	case errors.Is(err, syscall.ENOMEM):
		return session.ErrWouldBlock
	case err != nil:
		return err
	}
	q.push(t)
	return nil
}

// moved queues the completion of the oldest transfer of its kind. mu is held.
func (e *Endpoint) moved(wc *ibv.WC, q *fifo[transfer]) {
	if q.n == 0 {
		return
	}
	t := q.pop()
	if wc.Status != ibv.Success {
		t.err = statusError(wc.Status)
	}
	e.done.push(t)
}

const (
	// freely is how many bytes Alloc gives as long as there are any: a session fetches
	// ahead in pieces of that size.
	freely = 256 << 10
	// Above, it gives at most 1/arenaShare of what is left: the first connections that
	// send much must not leave later ones without an inbox. Those get smaller ones,
	// some thirty in 64 MiB.
	arenaShare = 4
)

// Alloc implements session.Endpoint: memory of the process's arena, which stays
// registered.
func (e *Endpoint) Alloc(n int) []byte {
	arena := regcache.DefaultArena()
	if n > freely && int64(n) > arena.Left()/arenaShare {
		return nil
	}
	buf, err := arena.Get(n)
	if err != nil {
		return nil
	}
	b := buf.Bytes()
	a := &e.allocs
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.m == nil {
		a.m = make(map[*byte]*regcache.Buffer)
	}
	a.m[&b[0]] = buf
	return b
}

// Free implements session.Endpoint.
func (e *Endpoint) Free(b []byte) {
	if cap(b) == 0 {
		return
	}
	a := &e.allocs
	a.mu.Lock()
	key := &b[:1][0]
	buf := a.m[key]
	delete(a.m, key)
	a.mu.Unlock()
	if buf != nil {
		buf.Put()
	}
}

// freeAllocs gives back what Free has not.
func (e *Endpoint) freeAllocs() {
	a := &e.allocs
	a.mu.Lock()
	left := a.m
	a.m = nil
	a.mu.Unlock()
	for _, buf := range left {
		buf.Put()
	}
}
