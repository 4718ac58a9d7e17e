package sanconn

import (
	"cmp"
	"io"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/undernet"
)

// spliceMost is how many bytes go through the pipe at a time, as in net.
const spliceMost = 1 << 20

// stream is an end of a copy.
type stream struct {
	conn *Conn // nil: a plain socket, or a file
	raw  syscall.RawConn
}

// streamOf returns the stream that a reader or writer is: a Conn on TCP, or a stream socket of net's.
func streamOf(x any) (s stream, ok bool) {
	s.conn, _ = x.(*Conn)
	if tcp, ok := x.(*net.TCPConn); ok { // in a program that cmd/san has built
		s.conn, _ = undernet.Carrier(tcp).(*Conn)
	}
	var plain syscall.Conn = socketOf(x)
	if s.conn != nil && s.conn.onTCP() {
		plain = s.conn.tcp
	}
	if plain == nil {
		return s, false
	}
	var err error
	s.raw, err = plain.SyscallConn()
	return s, err == nil
}

// fileOf returns the stream of a regular file. Other files may block.
func fileOf(w io.Writer) (s stream, ok bool) {
	f, ok := w.(*os.File)
	if !ok || mayBlock(f) {
		return s, false
	}
	raw, err := f.SyscallConn()
	return stream{raw: raw}, err == nil
}

// onTCP reports whether neither direction has moved.
func (c *Conn) onTCP() bool { return c.in.san.Load() == nil && c.out.san.Load() == nil }

// splice copies from a socket to another or to a regular file, through a pipe, as net does, as long as
// TCP carries both; errLook: the rest has to be copied in another way. The pipe takes the place of a
// buffer: to fill it takes no room at the other end, and if that end fails, what is in the pipe is
// lost.
func splice(dst io.Writer, src *io.LimitedReader) (total int64, err error) {
	from, ok := streamOf(src.R)
	if !ok {
		return 0, errLook
	}
	to, ok := streamOf(dst)
	if !ok {
		if to, ok = fileOf(dst); !ok {
			return 0, errLook
		}
	}
	p, err := newPipe()
	if err != nil {
		return 0, errLook
	}
	defer p.close()
	for src.N > 0 && err == nil {
		if err = from.fill(p, min(src.N, spliceMost)); err == io.EOF {
			return total, nil
		}
		n := p.n
		src.N -= n
		if err == nil {
			err = to.drain(p)
		}
		if err == errLook && p.n > 0 {
			err = cmp.Or(p.spill(dst), err)
		}
		total += n - p.n
	}
	return total, err
}

// fill is a Read into a pipe; errLook: TCP does not have what comes next.
func (s stream) fill(p *pipe, most int64) error {
	c := s.conn
	if c == nil {
		return p.fill(s.raw, most)
	}
	if !c.onTCP() || c.in.suspended.Load() {
		return errLook
	}
	c.in.op.Lock()
	defer c.in.unlock(c)
	room, err := c.in.beforeLocked(c)
	if err == nil && room == 0 {
		err = errLook
	}
	if err != nil {
		return err
	}
	err = p.fill(s.raw, min(most, int64(room)))
	_, err = c.in.readByTCPLocked(c, int(p.n), err)
	return err
}

// drain is a Write of what is in a pipe; errLook: the direction has moved.
func (s stream) drain(p *pipe) (err error) {
	for p.n > 0 && err == nil {
		if s.conn == nil {
			err = p.drain(s.raw)
			continue
		}
		err = s.conn.out.piece(s.conn, func() (int64, error) {
			before := p.n
			err := p.drain(s.raw)
			return before - p.n, err
		})
		if err != errLook {
			err = s.conn.opError(opWrite, err)
		}
	}
	return err
}

// pipe is a pipe of the kernel, and the count of bytes in it.
type pipe struct {
	r, w int
	n    int64 // bytes
}

func newPipe() (*pipe, error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return nil, err
	}
	// The pipe keeps its size if the user has too much memory in pipes.
	unix.FcntlInt(uintptr(fds[0]), unix.F_SETPIPE_SZ, spliceMost)
	return &pipe{r: fds[0], w: fds[1]}, nil
}

func (p *pipe) close() {
	unix.Close(p.r)
	unix.Close(p.w)
}

// fill waits until a socket has bytes, and takes them into an empty pipe.
func (p *pipe) fill(raw syscall.RawConn, most int64) (err error) {
	p.n, err = spliceOnce(raw.Read, func(fd int) (from, to int) { return fd, p.w }, most)
	if p.n == 0 && err == nil {
		err = io.EOF
	}
	return err
}

// drain waits until a socket has room, and moves there what fits; a file always has room.
func (p *pipe) drain(raw syscall.RawConn) error {
	n, err := spliceOnce(raw.Write, func(fd int) (from, to int) { return p.r, fd }, p.n)
	p.n -= n
	return err
}

// spill writes what is in the pipe.
func (p *pipe) spill(w io.Writer) error {
	b := make([]byte, min(p.n, pumpSize))
	for p.n > 0 {
		n, err := unix.Read(p.r, b) // does not wait: the bytes are there
		if err != nil {
			return os.NewSyscallError("read", err)
		}
		n, err = w.Write(b[:n])
		p.n -= int64(n)
		if err != nil {
			return err
		}
	}
	return nil
}

// spliceOnce calls splice(2) when a method of raw finds the socket ready; errLook: splice is not
// possible here.
func spliceOnce(when func(func(fd uintptr) (done bool)) error, ends func(fd int) (from, to int), most int64) (n int64, err error) {
	waitErr := when(func(fd uintptr) (done bool) {
		from, to := ends(int(fd))
		for {
			k, e := unix.Splice(from, nil, to, nil, int(most), unix.SPLICE_F_MOVE|unix.SPLICE_F_NONBLOCK)
			if n, err = int64(k), e; err != unix.EINTR {
				return err != unix.EAGAIN
			}
		}
	})
	switch {
	case waitErr != nil:
		return 0, withoutOp(waitErr)
	case err == nil:
		return n, nil
	case err == unix.EINVAL:
		return 0, errLook
	}
	return 0, os.NewSyscallError("splice", err)
}
