package regcache

import (
	"io"
)

// A Buffer is memory of an Arena. Bytes that a connection moves by RDMA from or to it (over verbs,
// Writes and Reads that are large enough: see sanconn.Options.Threshold) need no new registration. Two
// goroutines must not use it at once.
type Buffer struct {
	arena  *Arena
	piece  piece
	length int
}

// Bytes returns the buffer's memory, which is valid until Put.
func (b *Buffer) Bytes() []byte {
	if b.arena == nil {
		return nil
	}
	return b.piece.memory[:b.length:b.length]
}

// ReadFrom fills the buffer from its start until r ends or all that the buffer takes of the arena is
// full (see Arena.Get), and sets the length to what was read. io.ErrShortBuffer means that the buffer
// is full and r may have more.
func (b *Buffer) ReadFrom(r io.Reader) (int64, error) {
	if b.arena == nil {
		return 0, ErrClosed
	}
	// io.ReadFull would return io.ErrUnexpectedEOF, which may also be r's own, for a body that was cut
	// short.
	n, err := 0, error(nil)
	for n < len(b.piece.memory) && err == nil {
		var m int
		m, err = r.Read(b.piece.memory[n:])
		n += m
	}
	b.length = n
	switch err {
	case nil:
		err = io.ErrShortBuffer
	case io.EOF:
		err = nil
	}
	return int64(n), err
}

// WriteTo writes the buffer's bytes to w.
func (b *Buffer) WriteTo(w io.Writer) (int64, error) {
	n, err := w.Write(b.Bytes())
	return int64(n), err
}

// Put gives the buffer back to the arena. All transfers that use it must have ended, and slices of it
// must not be used any more. A second Put does nothing.
func (b *Buffer) Put() {
	a := b.arena
	if a == nil {
		return
	}
	p := b.piece
	*b = Buffer{}
	a.mu.Lock()
	defer a.mu.Unlock()
	p.slab.used--
	a.used -= 1 << p.slab.shift
	a.free[p.slab.shift] = append(a.free[p.slab.shift], p)
}
