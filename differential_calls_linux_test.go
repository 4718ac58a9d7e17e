package san

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/sanconn"
)

// diffPatience is how long something may take that must happen. It is short, so that a single difference
// does not take all of the test's time.
const diffPatience = 3 * time.Second

// diffNothing is how long a Read waits for bytes that must not come.
const diffNothing = 2 * time.Millisecond

// diffEnd is one end of a connection, on which calls are made.
type diffEnd struct {
	net.Conn
	expired bool            // its deadlines have passed
	out, in *diffStream     // what this end and its peer have written
	read    int             // of in
	behind  *behind         // a Read that waits in another goroutine, which then writes read
	raw     syscall.RawConn // for RawReads; nil: there was none yet
}

// behind is a Read that waits in the background while other calls are made.
type behind struct {
	read atomic.Int64
	more chan struct{} // has a token after each Read
	done chan string
}

// diffStream is the bytes that were written in one direction.
type diffStream struct {
	mu sync.Mutex
	b  []byte
}

// next returns the bytes for the next times Writes. cut removes from the stream what was not written.
func (s *diffStream) next(size, times int) (b []byte, cut func(written int)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	from := len(s.b)
	b = make([]byte, size)
	position(b, from)
	s.b = append(s.b, bytes.Repeat(b, times)...)
	return b, func(written int) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.b = s.b[:from+written]
	}
}

// wrong compares what was read, from a position on, with what was written there. It describes the
// difference, or returns "".
func (s *diffStream) wrong(b []byte, from int) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range b {
		if at := from + i; at >= len(s.b) || b[i] != s.b[at] {
			return fmt.Sprintf("byte %d is not what was written there", at)
		}
	}
	return ""
}

// diffTCP has the methods that *net.TCPConn and *sanconn.Conn have in addition to net.Conn.
type diffTCP interface {
	io.ReaderFrom
	io.WriterTo
	CloseWrite() error
	CloseRead() error
	SetLinger(int) error
	SetNoDelay(bool) error
	SetKeepAlive(bool) error
	SetKeepAlivePeriod(time.Duration) error
	SetKeepAliveConfig(net.KeepAliveConfig) error
	SetReadBuffer(int) error
	SetWriteBuffer(int) error
	File() (*os.File, error)
	SyscallConn() (syscall.RawConn, error)
}

// doInTime returns the result of do, or diffHangs. After diffHangs no further call may be made at that
// end.
func (e *diffEnd) doInTime(call diffCall, due int) string {
	result := make(chan string, 1)
	go func() { result <- e.do(call, due) }()
	select {
	case r := <-result:
		return r
	case <-time.After(diffHangTime):
		return diffHangs
	}
}

// do makes a call, and returns its result, in a form that does not depend on the pieces in which a
// stream comes.
func (e *diffEnd) do(call diffCall, due int) string {
	c := e.Conn.(diffTCP)
	switch call.what {
	case "Write":
		return e.writeAll(call.size, e.Write)
	case "WriteTwo":
		return e.writeTwo(call.size)
	case "ReadFrom":
		return e.writeAll(call.size, func(b []byte) (int, error) {
			n, err := c.ReadFrom(struct{ io.Reader }{bytes.NewReader(b)})
			return int(n), err
		})
	case "Buffers":
		return e.writeAll(call.size, func(b []byte) (n int, err error) {
			v := net.Buffers{b[:len(b)/3], b[len(b)/3:]}
			writeTo := v.WriteTo
			if c, ok := e.Conn.(*sanconn.Conn); ok {
				writeTo = func(io.Writer) (int64, error) { return c.WriteBuffers(&v) }
			}
			n64, err := writeTo(e.Conn)
			return int(n64), err
		})
	case "Reserve":
		return e.writeAll(max(call.size, 1), e.reserve) // Reserve takes at least one byte
	case "RawWrite":
		return e.writeAll(call.size, e.rawWrite)
	case "FromFile", "FromTCP", "FromUnix":
		return e.copyFrom(call)
	case "FileWrite":
		return e.writeFile(call.size)
	case "Read", "Peek", "WriteTo", "ToFile", "ToTCP", "ToUnix", "RawRead", "ReadBehind", "FileRead":
		switch {
		case e.behind != nil:
			return "there is one"
		case call.what == "Read":
			return e.readAll(call.size, due, e.Read)
		case call.what == "Peek":
			return e.readAll(call.size, due, e.peek)
		case call.what == "RawRead":
			return e.readAll(call.size, due, e.rawRead)
		case call.what == "WriteTo":
			return e.writeTo(due)
		case call.what == "FileRead":
			return e.readFile(call.size, due)
		case call.copiesTo():
			return e.copyTo(call, due)
		}
		e.readBehind(call.size)
		return "begun"
	case "Join":
		return e.join(due)
	case "Look":
		if e.behind != nil { // RawConn.Read would wait for it
			return "there is one"
		}
		return e.look()
	case "Close":
		return diffError(e.Close())
	case "CloseWrite":
		return diffError(c.CloseWrite())
	case "CloseRead":
		return diffError(c.CloseRead())
	case "SetLinger0":
		return diffError(c.SetLinger(0))
	case "SetLinger1":
		return diffError(c.SetLinger(1))
	case "options":
		return fmt.Sprint(diffError(c.SetNoDelay(false)), diffError(c.SetKeepAlive(true)), diffError(c.SetKeepAlivePeriod(time.Minute)),
			diffError(c.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: time.Minute})),
			diffError(c.SetReadBuffer(1<<20)), diffError(c.SetWriteBuffer(1<<20)))
	case "expire":
		e.expired = true
		return diffError(e.SetDeadline(time.Unix(1, 0)))
	case "clear":
		e.expired = false
		return diffError(e.SetDeadline(time.Time{}))
	case "Control":
		raw, err := c.SyscallConn()
		if err == nil {
			err = raw.Control(func(uintptr) {})
		}
		return diffError(err)
	case "File":
		f, err := c.File()
		if err == nil {
			f.Close()
		}
		return diffError(err)
	}
	panic(call.what)
}

// writeAll writes size bytes by a call that does what Write does.
func (e *diffEnd) writeAll(size int, write func([]byte) (int, error)) string {
	if !e.expired {
		e.SetWriteDeadline(time.Now().Add(diffPatience))
	}
	b, cut := e.out.next(size, 1)
	n, err := write(b)
	cut(n)
	return fmt.Sprintf("%d, %s", n, diffError(err))
}

// writeTwo makes two Writes at the same time. They write the same bytes, so their order does not matter,
// but the one must not interrupt the other.
func (e *diffEnd) writeTwo(size int) string {
	if !e.expired {
		e.SetWriteDeadline(time.Now().Add(diffPatience))
	}
	b, cut := e.out.next(size, 2)
	var writing sync.WaitGroup
	var written [2]int
	results := make([]string, 2)
	for i := range results {
		writing.Go(func() {
			n, err := e.Write(b)
			written[i], results[i] = n, fmt.Sprintf("%d, %s", n, diffError(err))
		})
	}
	writing.Wait()
	cut(written[0] + written[1])
	slices.Sort(results)
	return fmt.Sprint(results)
}

// reserve does what Write does, by Reserve and Commit if the connection has them.
func (e *diffEnd) reserve(b []byte) (n int, err error) {
	c, ok := e.Conn.(*sanconn.Conn)
	if !ok {
		return e.Write(b)
	}
	for { // once also without bytes: such a Write fails where others do
		room, err := c.Reserve(len(b) - n)
		if err != nil {
			return n, err
		}
		k := copy(room, b[n:])
		if err := c.Commit(k); err != nil {
			return n, err
		}
		if n += k; n == len(b) {
			return n, nil
		}
	}
}

// peek does what Read does, by Peek and Discard if the connection has them. It leaves half of what Peek
// returns, so that the next call finds it.
func (e *diffEnd) peek(b []byte) (n int, err error) {
	c, ok := e.Conn.(*sanconn.Conn)
	if !ok || len(b) == 0 { // without room in b, Peek would still wait for a byte
		return e.Read(b)
	}
	came, err := c.Peek()
	if err != nil {
		return 0, err
	}
	n = copy(b, came[:(len(came)+1)/2])
	return n, c.Discard(n)
}

// rawWrite does what Write does, on TCP's descriptor.
func (e *diffEnd) rawWrite(b []byte) (n int, err error) {
	raw, err := e.Conn.(diffTCP).SyscallConn()
	if err != nil {
		return 0, err
	}
	var failed error
	err = raw.Write(func(fd uintptr) bool {
		for n < len(b) {
			k, err := syscall.Write(int(fd), b[n:])
			if err == syscall.EAGAIN {
				return false
			}
			if err != nil {
				failed = &net.OpError{Op: "write", Net: "tcp", Err: err}
				return true
			}
			n += k
		}
		return true
	})
	return n, cmp.Or(err, failed)
}

// rawRead does what Read does, by a function of one RawConn that calls syscall.Read, as it works in
// programs that cmd/san has built.
func (e *diffEnd) rawRead(b []byte) (n int, err error) {
	if len(b) == 0 {
		return e.Read(b)
	}
	if e.raw == nil {
		if e.raw, err = e.Conn.(diffTCP).SyscallConn(); err != nil {
			return 0, err
		}
	}
	var failed error
	err = e.raw.Read(func(fd uintptr) bool {
		n, failed = testenv.SyscallRead(int(fd), b)
		return failed != syscall.EAGAIN
	})
	switch {
	case err == nil && failed != nil:
		err = &net.OpError{Op: "read", Net: "tcp", Err: failed}
	case err == nil && n == 0:
		err = io.EOF
	}
	return max(n, 0), err
}

// look describes what TCP's descriptor shows to a pool that checks whether anything has come.
func (e *diffEnd) look() (seen string) {
	if !e.expired { // an earlier Read may have set it
		e.SetReadDeadline(time.Now().Add(diffPatience))
	}
	raw, err := e.Conn.(diffTCP).SyscallConn()
	if err == nil {
		err = raw.Read(func(fd uintptr) bool {
			var b [1]byte
			switch n, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT); {
			case err != nil:
				seen = err.Error()
			case n == 0:
				seen = "the end"
			default:
				seen = cmp.Or(e.in.wrong(b[:], e.read), "something")
			}
			return true
		})
	}
	return seen + ", " + diffError(err)
}

// readAll reads size bytes, or up to an error, by calls that do what Read does. It waits for due bytes,
// which must come; after these nothing may come, for which it waits only briefly. If due is negative,
// the number is not known.
func (e *diffEnd) readAll(size, due int, read func([]byte) (int, error)) string {
	b := make([]byte, size)
	n := 0
	for {
		patience := diffPatience
		if due >= 0 && n >= due {
			patience = diffNothing
		}
		if !e.expired {
			e.SetReadDeadline(time.Now().Add(patience))
		}
		k, err := read(b[n:])
		if wrong := e.in.wrong(b[n:n+k], e.read); wrong != "" {
			return wrong
		}
		n, e.read = n+k, e.read+k
		if err != nil || n == size {
			return fmt.Sprintf("%d, %s", n, diffError(err))
		}
	}
}

// writeTo reads as readAll does, without a limit, by one call of WriteTo.
func (e *diffEnd) writeTo(due int) string {
	n, wrong := 0, ""
	limit := func() {
		patience := diffPatience
		if due >= 0 && n >= due {
			patience = diffNothing
		}
		if !e.expired {
			e.SetReadDeadline(time.Now().Add(patience))
		}
	}
	limit()
	_, err := e.Conn.(io.WriterTo).WriteTo(writerFunc(func(b []byte) (int, error) {
		wrong = cmp.Or(wrong, e.in.wrong(b, e.read))
		n, e.read = n+len(b), e.read+len(b)
		limit()
		return len(b), nil
	}))
	if wrong != "" {
		return wrong
	}
	return fmt.Sprintf("%d, %s", n, diffError(err))
}

// readBehind starts a Read of size bytes in the background, which goes on until join, or an error.
func (e *diffEnd) readBehind(size int) {
	if !e.expired {
		e.SetReadDeadline(time.Now().Add(diffPatience))
	}
	w := &behind{more: make(chan struct{}, 1), done: make(chan string, 1)}
	e.behind = w
	go func() {
		b := make([]byte, size)
		for n := 0; ; {
			k, err := e.Read(b[n:])
			if wrong := e.in.wrong(b[n:n+k], e.read); wrong != "" {
				w.done <- wrong
				return
			}
			n, e.read = n+k, e.read+k
			w.read.Store(int64(n))
			select {
			case w.more <- struct{}{}:
			default:
			}
			if err != nil || n == size {
				w.done <- fmt.Sprintf("%d, %s", n, diffError(err))
				return
			}
		}
	}()
}

// join waits for the end of readBehind's Read, which may go on until the due bytes have come.
func (e *diffEnd) join(due int) string {
	w := e.behind
	if w == nil {
		return "there is none"
	}
	e.behind = nil
	late := time.After(diffPatience)
	for waits := due >= 0; waits && w.read.Load() < int64(due); {
		select {
		case <-w.more:
		case r := <-w.done:
			return r
		case <-late:
			waits = false
		}
	}
	patience := diffPatience
	if due >= 0 {
		patience = diffNothing
	}
	if !e.expired {
		e.SetReadDeadline(time.Now().Add(patience))
	}
	return <-w.done
}

// diffError formats an error without addresses, because these differ.
func diffError(err error) string {
	var oe, within *net.OpError
	switch {
	case errors.As(err, &oe) && errors.As(oe.Err, &within):
		return oe.Op + ": " + diffError(oe.Err)
	case err == nil || err == io.EOF:
		return fmt.Sprint(err)
	case errors.As(err, &oe) && err == error(oe):
		var errno syscall.Errno
		inner := oe.Err.Error()
		if errors.As(oe.Err, &errno) { // whatever the text of the error around it
			inner = errno.Error()
		}
		return fmt.Sprintf("%s %s (addresses: %v, %v)", oe.Op, inner, oe.Source != nil, oe.Addr != nil)
	}
	return fmt.Sprintf("%v (%T)", err, err)
}
