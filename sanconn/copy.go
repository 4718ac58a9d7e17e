package sanconn

import (
	"io"
	"net"
	"os"
	"reflect"
	"syscall"

	"github.com/sanconn/san/internal/raceedge"
)

// copySize is the size in bytes of what ReadFrom and WriteTo move at a time: from about
// this size on, the shared-memory ring reaches its full rate.
const copySize = 64 << 10

// ReadFrom reads from r until io.EOF and writes everything to the connection.
// io.Copy uses it. Regular files and sockets of packages os and net are read straight into
// the memory that the connection sends from. Any other reader gets a buffer of its own,
// since it may block, or keep the slice.
func (c *Conn) ReadFrom(r io.Reader) (int64, error) {
	// io.CopyN and net/http wrap their source in a LimitedReader. At its limit no
	// further Read is needed to find the end.
	limit, limited := r.(*io.LimitedReader)
	if !limited {
		limit = &io.LimitedReader{R: r, N: 1<<63 - 1}
	}
	if src, ok := descriptorOf(limit.R); ok {
		if n, err, handled := c.readFromDescriptor(src, limit); handled {
			return n, err
		}
	}
	return pump(c, limit)
}

// descriptorOf returns the descriptor of a reader whose type is one of package os or net.
// (io.Copy hands their files and sockets over in types that are not exported.) Other types
// that have a descriptor may have a Read that does more than to read from it.
func descriptorOf(r io.Reader) (syscall.Conn, bool) {
	t := reflect.TypeOf(r)
	if t == nil {
		return nil, false
	}
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if path := t.PkgPath(); path != "os" && path != "net" {
		return nil, false
	}
	src, ok := r.(syscall.Conn)
	return src, ok
}

// WriteTo reads from the connection until io.EOF and writes everything to w. io.Copy
// uses it. Files, net's sockets and io.Discard are given the bytes where they have arrived.
// Any other writer gets them in a buffer of its own, since it may keep the slice.
func (c *Conn) WriteTo(w io.Writer) (int64, error) {
	switch w.(type) {
	case *os.File, *net.TCPConn, *net.UnixConn:
		return c.drain(w)
	}
	if w == io.Discard {
		return c.drain(w)
	}
	return pump(w, &io.LimitedReader{R: c, N: 1<<63 - 1})
}

// drain writes what has arrived from where it lies.
func (c *Conn) drain(w io.Writer) (total int64, err error) {
	for {
		b, err := c.Peek()
		if err == io.EOF {
			return total, nil
		}
		if err != nil {
			return total, err
		}
		n, werr := w.Write(b)
		if err = c.Discard(n); err == nil && werr == nil && n < len(b) {
			werr = io.ErrShortWrite
		}
		total += int64(n)
		if werr != nil {
			return total, werr
		}
		if err != nil {
			return total, err
		}
	}
}

// pump copies without io.Copy, which would call ReadFrom and WriteTo again. The buffer is
// not used again: whoever keeps it harms nobody else.
func pump(w io.Writer, r *io.LimitedReader) (total int64, err error) {
	if r.N <= 0 {
		return 0, nil
	}
	b := make([]byte, min(copySize, r.N))
	for r.N > 0 {
		n, rerr := r.Read(b)
		if n > 0 {
			m, werr := w.Write(b[:n])
			if m < 0 || m > n {
				return total, errInvalidWrite
			}
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
	raceedge.Release()
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
