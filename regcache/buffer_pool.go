package regcache

import "sync"

// A BufferPool lends slices of one size from an Arena to code that takes a pool of slices, as
// httputil.ReverseProxy does: it is an httputil.BufferPool. Over verbs, large Reads into such a
// slice and large Writes from it (see sanconn.Options.Threshold) need no registration, from the
// first on; on shm and on TCP it makes no difference. Its methods may be called concurrently.
type BufferPool struct {
	arena *Arena
	size  int

	mu   sync.Mutex
	lent map[*byte]*Buffer // by their first bytes; guarded by mu
}

// BufferPool returns a pool of slices of size bytes, which is positive. The pool keeps none: what
// is put back is the arena's.
func (a *Arena) BufferPool(size int) *BufferPool {
	return &BufferPool{arena: a, size: size, lent: make(map[*byte]*Buffer)}
}

// Get returns a slice with undefined contents, for the caller alone until Put. If the arena is
// used up, or has been closed, the slice is an ordinary one. Get may wait as Arena.Get does.
func (p *BufferPool) Get() []byte {
	buf, err := p.arena.Get(p.size)
	if err != nil {
		return make([]byte, p.size)
	}
	b := buf.Bytes()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lent[&b[0]] = buf
	return b
}

// Put gives a slice of Get back, of any length but from its first byte on. It must not be used
// afterwards. One that is never put back stays taken of the arena. Other slices are ignored.
func (p *BufferPool) Put(b []byte) {
	if cap(b) == 0 {
		return
	}
	first := &b[:1][0]
	p.mu.Lock()
	buf := p.lent[first]
	delete(p.lent, first)
	p.mu.Unlock()
	if buf != nil {
		buf.Put()
	}
}
