package sanconn

import (
	"cmp"
	"errors"
	"io"
	"net"
	"os"
	"reflect"
	"sync"
	"syscall"

	"github.com/sanconn/san/internal/undernet"
)

// copySize is how many bytes ReadFrom and WriteTo move at a time: from about this size on, the
// shared-memory ring reaches its full rate.
const copySize = 64 << 10

// pumpSize is the size in bytes of an intermediate buffer, the same as io.Copy's. In a file server,
// twice as much cost more time than larger pieces save.
const pumpSize = 32 << 10

// fillPiece is how many bytes of a source go to TCP at a time, so that a long copy can move in its
// middle.
const fillPiece = 1 << 20

// spares are buffers for copies between readers and writers that do not keep them: Conns, files, net's
// sockets and io.Discard. Making a buffer takes longer than the rest of a copy of a few bytes.
var spares = sync.Pool{New: func() any { return new([pumpSize]byte) }}

// spare is one of the spares, from its first use until put.
type spare struct{ b *[pumpSize]byte }

func (s *spare) get() []byte {
	if s.b == nil {
		s.b = spares.Get().(*[pumpSize]byte)
	}
	return s.b[:]
}

func (s *spare) put() {
	if s.b != nil {
		spares.Put(s.b)
		s.b = nil
	}
}

// errEnd: the source of a copy has ended. An io.EOF may also be an error of the sink.
var errEnd = errors.New("sanconn: the source has ended")

// ReadFrom reads from r until io.EOF and writes everything to the connection. io.Copy uses it. On TCP,
// regular files go by sendfile and stream sockets by splice, as in net. On a SAN, they are read
// directly into the memory that the connection sends from. Any other reader gets a separate buffer,
// because it may block, or keep the slice. The sizes of the pieces differ from net's: if the peer has
// closed, the first piece counts as written. An error, including r's, is in a *net.OpError, as with
// net.
func (c *Conn) ReadFrom(r io.Reader) (int64, error) {
	// io.CopyN and net/http wrap their source in a LimitedReader. At its limit no further Read is
	// needed to find the end.
	src, limited := r.(*io.LimitedReader)
	if !limited {
		src = &io.LimitedReader{R: bare(r), N: 1<<63 - 1}
	}
	n, err := splice(c, src)
	if err == errLook {
		var m int64
		if f, ok := src.R.(*os.File); ok {
			m, err = fillFromFile(c, f, src)
		} else if s := socketOf(src.R); s != nil {
			m, err = fillFromSocket(c, s, src)
		} else {
			m, err = pump(c, src)
		}
		n += m
	}
	return n, c.copyError(opReadFrom, err)
}

// socket is a socket of package net.
type socket interface {
	net.Conn
	syscall.Conn
}

// socketOf returns the stream socket that x is, or nil. Pieces of datagrams would be truncated, and the
// bytes of a TCPConn in a program that cmd/san has built need not go by its descriptor.
func socketOf(x any) socket {
	switch x := x.(type) {
	case *net.TCPConn:
		if undernet.Carrier(x) == nil {
			return x
		}
	case *net.UnixConn:
		if a := x.LocalAddr(); a != nil && a.Network() == "unix" {
			return x
		}
	}
	return nil
}

// bare returns the file or socket in r, if r is what os or net passes to io.Copy in its place: a struct
// that hides WriteTo, which io.Copy would call again.
func bare(r io.Reader) io.Reader {
	if v := reflect.ValueOf(r); v.Kind() == reflect.Struct {
		field := map[string]string{"os": "File", "net": "TCPConn"}[v.Type().PkgPath()]
		if v = v.FieldByName(field); v.IsValid() && v.CanInterface() {
			if src, ok := v.Interface().(io.Reader); ok {
				return src
			}
		}
	}
	return r
}

// fillFromFile reads the bytes that the file has now without a copy. A Read into a buffer then finds
// the end, or what was appended meanwhile: that neither waits for room, nor fails if the peer has
// closed after the last byte.
func fillFromFile(c *Conn, f *os.File, src *io.LimitedReader) (int64, error) {
	left := unread(f)
	return inParts(src, func(b *spare) (n int, err error) {
		if left <= 0 {
			return copyOnce(c, src, b.get())
		}
		most := min(src.N, left)
		err = errLook
		if c.out.san.Load() == nil {
			n, err = c.out.fill(c, f, most)
		}
		if err == errLook {
			var room []byte
			if room, err = c.Reserve(int(min(most, copySize))); err == nil {
				n, err = commitFrom(c, f, room)
			}
		}
		src.N -= int64(n)
		left -= int64(n)
		if err == io.EOF {
			left, err = 0, nil
		}
		return n, err
	})
}

// unread returns how many bytes a regular file has after its position. Files without a size, as in
// /proc, may block.
func unread(f *os.File) int64 {
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() {
		return 0
	}
	at, err := f.Seek(0, io.SeekCurrent)
	if err != nil {
		return 0
	}
	return max(info.Size()-at, 0)
}

// fill makes net move a piece of a file to TCP.
func (o *outgoing) fill(c *Conn, file *os.File, most int64) (int, error) {
	var n int64
	err := o.piece(c, func() (int64, error) {
		at, err := file.Seek(0, io.SeekCurrent)
		if err != nil {
			return 0, err
		}
		n, err = c.tcp.ReadFrom(&io.LimitedReader{R: file, N: min(most, fillPiece)})
		if err != nil {
			// If the deadline passes before sendfile has begun, net reads from the file, and what it
			// cannot write then is lost.
			if _, serr := file.Seek(at+n, io.SeekStart); serr != nil {
				err = serr
			}
		} else if n == 0 {
			err = io.EOF
		}
		return n, err
	})
	if err == errLook && n > 0 {
		err = nil
	}
	return int(n), err
}

// commitFrom lets r, which neither waits nor keeps the slice, fill what Reserve has lent.
func commitFrom(c *Conn, r io.Reader, room []byte) (int, error) {
	n, err := r.Read(room)
	if sent, cerr := c.sendReserved(n); cerr != nil && n > 0 {
		return sent, cerr
	}
	return n, err
}

// inParts copies by calling once again and again. The buffer that once takes from b is put back after
// the copy, or earlier by once.
func inParts(src *io.LimitedReader, once func(b *spare) (int, error)) (total int64, err error) {
	var b spare
	defer b.put()
	for src.N > 0 && err == nil {
		var n int
		n, err = once(&b)
		total += int64(n)
	}
	if err == errEnd {
		err = nil
	}
	return total, err
}

// copyOnce writes what one Read returns. It checks the counts of both.
func copyOnce(dst io.Writer, src io.Reader, b []byte) (n int, err error) {
	read, rerr := src.Read(b)
	switch {
	case read < 0 || read > len(b):
		return 0, errInvalidRead
	case read > 0:
		n, err = dst.Write(b[:read])
		switch {
		case n < 0 || n > read:
			return 0, errInvalidWrite
		case err == nil && n < read:
			err = io.ErrShortWrite
		}
	}
	if err == nil {
		if err = rerr; err == io.EOF {
			err = errEnd
		}
	}
	return n, err
}

// WriteTo reads from the connection until io.EOF and writes everything to w. io.Copy uses it. On TCP it
// is net's WriteTo: what w was given and has not written is lost. On a SAN, regular files, net's stream
// sockets and io.Discard get the bytes where they have arrived. Any other writer gets them in a
// separate buffer, because it may block, or keep the slice. An error, including w's, is in a
// *net.OpError, as with net.
func (c *Conn) WriteTo(w io.Writer) (n int64, err error) {
	all := &io.LimitedReader{R: c, N: 1<<63 - 1}
	if n, err = splice(w, all); err == errLook {
		var m int64
		if s := socketOf(w); s != nil {
			m, err = drainToSocket(c, s, all)
		} else if f, ok := w.(*os.File); ok && !mayBlock(f) || w == io.Discard {
			m, err = drain(c, w, all, func() (int, error) { return c.drainOnce(w) })
		} else {
			m, err = pump(w, all)
		}
		n += m
	}
	return n, c.copyError(opWriteTo, err)
}

// mayBlock reports whether f is not a regular file, but a pipe for instance. A closed file does not
// block.
func mayBlock(f *os.File) bool {
	info, err := f.Stat()
	return err == nil && !info.Mode().IsRegular()
}

// drain writes to w by calling once again and again, without a copy. On TCP, where each Peek would need
// a buffer, it uses one buffer.
func drain(c *Conn, w io.Writer, all *io.LimitedReader, once func() (int, error)) (int64, error) {
	return inParts(all, func(b *spare) (int, error) {
		if c.in.san.Load() == nil {
			return copyOnce(w, all, b.get())
		}
		b.put()
		n, err := once()
		if err == io.EOF {
			err = errEnd
		}
		return n, err
	})
}

// drainOnce writes the bytes that have arrived in one piece to w, which neither waits nor keeps the
// slice. Lent bytes keep the connection from going back to TCP.
func (c *Conn) drainOnce(w io.Writer) (int, error) {
	b, err := c.Peek()
	if err != nil {
		return 0, err
	}
	n, err := w.Write(b)
	if err = cmp.Or(err, c.Discard(n)); err == nil && n < len(b) {
		err = io.ErrShortWrite
	}
	return n, err
}

// pump copies without io.Copy, which would call ReadFrom and WriteTo again. The buffer is not used
// again, because the reader or writer may keep it.
func pump(w io.Writer, r *io.LimitedReader) (int64, error) {
	b := make([]byte, max(min(pumpSize, r.N), 0))
	return inParts(r, func(*spare) (int, error) { return copyOnce(w, r, b) })
}
