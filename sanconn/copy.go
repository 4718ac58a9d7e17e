package sanconn

import (
	"io"
	"net"
	"sync"
)

// copySize is the size in bytes of the buffers of ReadFrom and WriteTo. From about this
// size on, the shared-memory ring reaches its full rate. Larger buffers would cost cache
// and, with thousands of copies under way, memory.
const copySize = 64 << 10

var copyBuffers = sync.Pool{New: func() any { return new([copySize]byte) }}

// ReadFrom reads from r until io.EOF and writes everything to the connection.
// io.Copy uses it.
func (c *Conn) ReadFrom(r io.Reader) (int64, error) {
	// io.CopyN and net/http wrap their source in a LimitedReader. At its limit no
	// further Read is needed to find the end.
	limit, limited := r.(*io.LimitedReader)
	if limited && limit.N <= 0 {
		return 0, nil
	}
	return pump(c, r, func() bool { return limited && limit.N <= 0 })
}

// WriteTo reads from the connection until io.EOF and writes everything to w. io.Copy
// uses it.
func (c *Conn) WriteTo(w io.Writer) (int64, error) {
	return pump(w, c, func() bool { return false })
}

// pump copies without io.Copy, which would call ReadFrom and WriteTo again.
func pump(w io.Writer, r io.Reader, done func() bool) (total int64, err error) {
	b := copyBuffers.Get().(*[copySize]byte)
	defer copyBuffers.Put(b)
	for !done() {
		n, rerr := r.Read(b[:])
		if n > 0 {
			m, werr := w.Write(b[:n])
			total += int64(m)
			switch {
			case werr != nil:
				return total, werr
			case m < n:
				return total, io.ErrShortWrite
			}
		}
		if rerr == io.EOF {
			return total, nil
		}
		if rerr != nil {
			return total, rerr
		}
	}
	return total, nil
}

// WriteBuffers writes the slices of v as one Write, packing small ones
// together, and removes from v what was written, as net.Buffers.WriteTo does
// for a *net.TCPConn. (Given any other connection, WriteTo writes slice by slice.)
func (c *Conn) WriteBuffers(v *net.Buffers) (int64, error) {
	n, err := c.session.WriteBuffers(*v)
	consume(v, n)
	return n, c.opError(opWrite, err)
}

// consume removes the first n bytes of v.
func consume(v *net.Buffers, n int64) {
	for len(*v) > 0 {
		first := int64(len((*v)[0]))
		if first > n {
			(*v)[0] = (*v)[0][n:]
			return
		}
		n -= first
		(*v)[0] = nil
		*v = (*v)[1:]
	}
}
