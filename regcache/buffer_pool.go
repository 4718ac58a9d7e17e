package regcache

import "sync"

// A BufferPool lends slices of one size from an Arena to code that takes a pool of slices, as
// httputil.ReverseProxy does: it is an httputil.BufferPool. Over verbs, large Reads into such a slice
// and large Writes from it (see sanconn.Options.Threshold; 8 MiB are large on every host) are made
// without a copy from the first use on, which registers the slice. On shm and on TCP it makes no
// difference. Its methods may be called concurrently.
type BufferPool struct {
	arena *Arena
	size  int
	lent  Lent
}

// BufferPool returns a pool of slices of size bytes; size must be positive. The pool keeps no slices:
// those that are put back belong to the arena.
func (a *Arena) BufferPool(size int) *BufferPool {
	return &BufferPool{arena: a, size: size}
}

// Get returns a slice with undefined contents, which belongs to the caller until Put. If the arena is
// used up or closed, the slice is an ordinary one. Get may wait as Arena.Get does.
func (p *BufferPool) Get() []byte {
	buf, err := p.arena.Get(p.size)
	if err != nil {
		return make([]byte, p.size)
	}
	return p.lent.Slice(buf)
}

// Put gives back a slice of Get, of any length, but from its first byte on. The slice must not be used
// afterwards. A slice that is never put back stays allocated in the arena. Slices that are not of Get
// are ignored.
func (p *BufferPool) Put(b []byte) { p.lent.Put(b) }

// Lent are buffers that a caller has as slices and gives back as slices. The zero value has none. Its
// methods may be called concurrently.
type Lent struct {
	mu sync.Mutex
	m  map[*byte]*Buffer // by their first bytes; guarded by mu
}

// Slice returns the bytes of a buffer. Put or PutAll puts the buffer back.
func (l *Lent) Slice(buf *Buffer) []byte {
	b := buf.Bytes()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.m == nil {
		l.m = make(map[*byte]*Buffer)
	}
	l.m[&b[0]] = buf
	return b
}

// Put puts back the buffer whose first byte is the slice's. Other slices are ignored.
func (l *Lent) Put(b []byte) {
	if cap(b) == 0 {
		return
	}
	first := &b[:1][0]
	l.mu.Lock()
	buf := l.m[first]
	delete(l.m, first)
	l.mu.Unlock()
	if buf != nil {
		buf.Put()
	}
}

// PutAll puts all buffers back.
func (l *Lent) PutAll() {
	l.mu.Lock()
	all := l.m
	l.m = nil
	l.mu.Unlock()
	for _, buf := range all {
		buf.Put()
	}
}
