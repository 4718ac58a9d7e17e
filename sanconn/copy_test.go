//go:build unix

package sanconn_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

// byTCP reports whether any byte of the application has gone by TCP.
func byTCP(c *sanconn.Conn) bool {
	st := c.Stats()
	return st.TCPBytesSent+st.TCPBytesReceived > 0
}

// wantLent checks how many bytes went without a copy at this end, unless some went by TCP.
func wantLent(t *testing.T, c *sanconn.Conn, sent, received uint64) {
	t.Helper()
	if byTCP(c) {
		return
	}
	if st := c.Stats(); st.LentBytesSent != sent || st.LentBytesReceived != received {
		t.Errorf("%d bytes were sent and %d received where they lie, want %d and %d", st.LentBytesSent, st.LentBytesReceived, sent, received)
	}
}

// fillUp writes until there is no more room, and returns how many bytes that took. One Write may begin
// after its deadline, but not three in a row.
func fillUp(t *testing.T, c *sanconn.Conn) (n int) {
	t.Helper()
	for inVain := 0; inVain < 3; {
		c.SetWriteDeadline(time.Now().Add(20 * time.Millisecond))
		k, err := c.Write(make([]byte, 1000))
		n += k
		inVain++
		if k > 0 {
			inVain = 0
		} else if !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatal(err)
		}
	}
	c.SetWriteDeadline(time.Time{})
	return n
}

// A file is copied from its position up to its end or the limit, and no further.
func TestCopyOfAFile(t *testing.T) {
	data := pattern(500_000)
	for _, tt := range []struct{ at, limit, want int64 }{
		{0, -1, 500_000},
		{0, 0, 0},
		{0, 1, 1},
		{0, 70_000, 70_000},
		{0, 500_000, 500_000},
		{0, 600_000, 500_000},
		{123_457, -1, 376_543},
		{123_457, 1000, 1000},
		{500_000, -1, 0},
		{500_000, 7, 0},
		{600_000, -1, 0},
	} {
		t.Run(fmt.Sprintf("from %d up to %d", tt.at, tt.limit), func(t *testing.T) {
			eachEndpoint(t, func(t *testing.T, l session.Limits) {
				a, b := pipe(t, l, nil)
				f := fileOf(t, data)
				f.Seek(tt.at, io.SeekStart)
				all := received(t, b)
				var src io.Reader = f
				if tt.limit >= 0 {
					src = &io.LimitedReader{R: f, N: tt.limit}
				}
				if n, err := io.Copy(a, src); n != tt.want || err != nil {
					t.Errorf("copied %d, %v; want %d", n, err, tt.want)
				}
				if l, ok := src.(*io.LimitedReader); ok && l.N != tt.limit-tt.want {
					t.Errorf("%d bytes are left up to the limit, want %d", l.N, tt.limit-tt.want)
				}
				if at, _ := f.Seek(0, io.SeekCurrent); at != tt.at+tt.want {
					t.Errorf("the file is at %d, want %d", at, tt.at+tt.want)
				}
				a.CloseWrite()
				wantBytes(t, <-all, data[min(tt.at, 500_000):][:tt.want])
				wantLent(t, a, uint64(tt.want), 0)
			})
		})
	}
}

// A copy sends what the file contains when each part is read.
func TestCopyOfAFileThatChanges(t *testing.T) {
	data := pattern(8 << 20)
	for name, change := range map[string]struct {
		do   func(f *os.File) error
		want func(n int64) bool
	}{
		"appended to": {func(f *os.File) error { _, err := f.WriteAt([]byte("more"), int64(len(data))); return err },
			func(n int64) bool { return n == int64(len(data))+4 }},
		"truncated": {func(f *os.File) error { return f.Truncate(1000) },
			func(n int64) bool { return n >= 1000 && n < int64(len(data)) }},
	} {
		t.Run(name, func(t *testing.T) {
			eachEndpoint(t, func(t *testing.T, l session.Limits) {
				a, b := pipe(t, l, nil)
				f := fileOf(t, data)
				done := make(chan int64, 1)
				go func() {
					n, err := io.Copy(a, f)
					if err != nil {
						t.Error(err)
					}
					a.CloseWrite()
					done <- n
				}()
				first := make([]byte, 1)
				if _, err := io.ReadFull(b, first); err != nil {
					t.Fatal(err)
				}
				if err := change.do(f); err != nil { // the file does not fit into any buffer, so the copy is not over
					t.Fatal(err)
				}
				got := append(first, <-received(t, b)...)
				if n := <-done; n != int64(len(got)) || !change.want(n) {
					t.Errorf("copied %d, and received %d", n, len(got))
				}
				if byTCP(a) && name == "truncated" {
					return // the kernel sends zeros for pages that are cut off on their way
				}
				wantBytes(t, got, append(bytes.Clone(data), "more"...)[:len(got)])
			})
		})
	}
}

// At the file's end a copy needs no room: it does not wait for any, and does not fail if the peer has
// closed after the last byte.
func TestTheEndOfAFileNeedsNoRoom(t *testing.T) {
	eachEndpoint(t, func(t *testing.T, l session.Limits) {
		a, b := pipe(t, l, nil)
		f := fileOf(t, nil)
		fillUp(t, a)
		a.SetWriteDeadline(time.Now().Add(patience))
		if n, err := io.Copy(a, f); n != 0 || err != nil {
			t.Errorf("no room: copied %d, %v", n, err)
		}
		b.Close()
		testenv.Eventually(t, patience, func() error {
			if _, err := a.Write([]byte("x")); !errors.Is(err, syscall.EPIPE) && !errors.Is(err, syscall.ECONNRESET) {
				return fmt.Errorf("Write: %v", err)
			}
			return nil
		})
		if n, err := io.Copy(a, f); n != 0 || err != nil {
			t.Errorf("the peer has closed: copied %d, %v", n, err)
		}
	})
}

// A copy that ends at its deadline loses nothing: the file's position is behind the bytes that were
// sent.
func TestADeadlineEndsACopyAndLosesNothing(t *testing.T) {
	eachEndpoint(t, func(t *testing.T, l session.Limits) {
		a, b := pipe(t, l, nil)
		data := pattern(16 << 20) // twice what a send buffer and an inbox hold
		f := fileOf(t, data)
		a.SetWriteDeadline(time.Now().Add(-time.Second))
		if n, err := io.Copy(a, f); n != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("behind the deadline: copied %d, %v", n, err)
		}
		if at, _ := f.Seek(0, io.SeekCurrent); at != 0 {
			t.Fatalf("behind the deadline: the file is at %d", at)
		}
		a.SetWriteDeadline(time.Now().Add(50 * time.Millisecond))
		n, err := io.Copy(a, f)
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("copied %d, %v", n, err)
		}
		if at, _ := f.Seek(0, io.SeekCurrent); at != n {
			t.Errorf("copied %d, and the file is at %d", n, at)
		}
		a.SetWriteDeadline(time.Time{})
		all := received(t, b)
		if m, err := io.Copy(a, f); n+m != int64(len(data)) || err != nil {
			t.Errorf("copied %d and %d, %v", n, m, err)
		}
		a.CloseWrite()
		wantBytes(t, <-all, data)
	})
}

// streamPairs make connected pairs of stream sockets.
var streamPairs = map[string]func(t *testing.T) (a, b net.Conn){
	"tcp":  func(t *testing.T) (a, b net.Conn) { return listened(t, "tcp", "127.0.0.1:0") },
	"unix": func(t *testing.T) (a, b net.Conn) { return listened(t, "unix", t.TempDir()+"/s") },
}

func listened(t *testing.T, network, addr string) (a, b net.Conn) {
	t.Helper()
	l, err := net.Listen(network, addr)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if a, err = net.Dial(network, l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if b, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		a.Close()
		b.Close()
	})
	return a, b
}

// eachSocket runs a test with each kind of socket on each kind of endpoint.
func eachSocket(t *testing.T, f func(t *testing.T, l session.Limits, mk func(*testing.T) (a, b net.Conn))) {
	for name, mk := range streamPairs {
		t.Run(name, func(t *testing.T) {
			eachEndpoint(t, func(t *testing.T, l session.Limits) { f(t, l, mk) })
		})
	}
}

// goCopy copies in the background.
func goCopy(w io.Writer, r io.Reader) <-chan copied {
	c := make(chan copied, 1)
	go func() { n, err := io.Copy(w, r); c <- copied{n, err} }()
	return c
}

type copied struct {
	n   int64
	err error
}

// ended waits for the end of a copy.
func ended(t *testing.T, c <-chan copied) copied {
	t.Helper()
	select {
	case r := <-c:
		return r
	case <-time.After(patience):
		t.Fatal("the copy hangs")
		panic("unreachable")
	}
}

// While a copy waits for a socket that sends little, other Writes go on, and each piece is sent as soon
// as it comes.
func TestCopyFromASocketThatTrickles(t *testing.T) {
	eachSocket(t, func(t *testing.T, l session.Limits, mk func(*testing.T) (net.Conn, net.Conn)) {
		a, b := pipe(t, l, nil)
		from, to := mk(t)
		done := goCopy(a, to)
		b.SetDeadline(time.Now().Add(patience))
		a.SetDeadline(time.Now().Add(patience))
		total := 0
		for i := range 20 {
			piece := pattern(1 + i*i*50)
			for _, w := range []io.Writer{from, a} { // while the source has nothing
				if _, err := w.Write(piece); err != nil {
					t.Fatal(err)
				}
				got := make([]byte, len(piece))
				if _, err := io.ReadFull(b, got); err != nil {
					t.Fatal(err)
				}
				wantBytes(t, got, piece)
			}
			total += len(piece)
		}
		from.Close()
		if r := ended(t, done); r.n != int64(total) || r.err != nil {
			t.Errorf("copied %d of %d, %v", r.n, total, r.err)
		}
		wantLent(t, a, uint64(total), 0)
	})
}

// A copy of many bytes from a socket has all of them, in order.
func TestCopyFromASocketInBulk(t *testing.T) {
	eachSocket(t, func(t *testing.T, l session.Limits, mk func(*testing.T) (net.Conn, net.Conn)) {
		a, b := pipe(t, l, nil)
		from, to := mk(t)
		data := pattern(5<<20 + 17)
		go func() {
			from.Write(data)
			from.Close()
		}()
		all := received(t, b)
		if r := ended(t, goCopy(a, to)); r.n != int64(len(data)) || r.err != nil {
			t.Errorf("copied %d of %d, %v", r.n, len(data), r.err)
		}
		a.CloseWrite()
		wantBytes(t, <-all, data)
		wantLent(t, a, uint64(len(data)), 0)
	})
}

// A copy takes exactly as many bytes as its limit: the rest stays in the socket.
func TestCopyFromASocketUpToALimit(t *testing.T) {
	eachSocket(t, func(t *testing.T, l session.Limits, mk func(*testing.T) (net.Conn, net.Conn)) {
		a, b := pipe(t, l, nil)
		from, to := mk(t)
		data := pattern(100_000)
		go from.Write(data)
		all := received(t, b)
		at := 0
		for _, n := range []int{1, 0, 4096, 65_536, 30_000} {
			if m, err := io.CopyN(a, to, int64(n)); m != int64(n) || err != nil {
				t.Fatalf("copied %d of %d, %v", m, n, err)
			}
			at += n
		}
		a.CloseWrite()
		wantBytes(t, <-all, data[:at])
		wantLent(t, a, uint64(at), 0)
		rest := make([]byte, len(data)-at)
		if _, err := io.ReadFull(to, rest); err != nil {
			t.Fatal(err)
		}
		wantBytes(t, rest, data[at:])
	})
}

// The deadline of a source ends the copy, and the connection still works.
func TestTheDeadlineOfASource(t *testing.T) {
	eachSocket(t, func(t *testing.T, l session.Limits, mk func(*testing.T) (net.Conn, net.Conn)) {
		a, b := pipe(t, l, nil)
		from, to := mk(t)
		from.Write([]byte("come"))
		waits := goCopy(a, to)
		testenv.Eventually(t, patience, func() error {
			if n := a.Stats().BytesSent; n != 4 {
				return fmt.Errorf("%d bytes", n)
			}
			return nil
		})
		to.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
		if r := ended(t, waits); r.n != 4 || !errors.Is(r.err, os.ErrDeadlineExceeded) {
			t.Errorf("copied %d, %v", r.n, r.err)
		}
		to.SetReadDeadline(time.Now().Add(-time.Second))
		if r := ended(t, goCopy(a, to)); r.n != 0 || !errors.Is(r.err, os.ErrDeadlineExceeded) {
			t.Errorf("the deadline had passed: copied %d, %v", r.n, r.err)
		}
		a.SetDeadline(time.Now().Add(patience))
		if _, err := a.Write([]byte(" on")); err != nil {
			t.Error(err)
		}
		a.CloseWrite()
		wantBytes(t, <-received(t, b), []byte("come on"))
	})
}

// While a copy waits for room of the connection, its source can be closed, and Close of the connection
// ends the copy.
func TestACopyThatWaitsForRoom(t *testing.T) {
	eachSocket(t, func(t *testing.T, l session.Limits, mk func(*testing.T) (net.Conn, net.Conn)) {
		a, b := pipe(t, l, nil)
		from, to := mk(t)
		go from.Write(make([]byte, 8<<20)) // more than there is room for
		done := goCopy(a, to)
		untilStable(t, func() uint64 { return a.Stats().BytesSent })
		closed := make(chan error, 1)
		go func() { closed <- to.Close() }()
		select {
		case err := <-closed:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(patience):
			t.Error("Close of the source waits for room of the connection")
		}
		a.Close()
		r := ended(t, done)
		if r.n == 0 || !errors.Is(r.err, net.ErrClosed) {
			t.Errorf("copied %d, %v", r.n, r.err)
		}
		if n, _ := io.Copy(io.Discard, b); n != r.n {
			t.Errorf("%d bytes came of %d", n, r.n)
		}
	})
}

// A copy from a socket that is at its end does not fail even if the peer has closed.
func TestTheEndOfASocketNeedsNoPeer(t *testing.T) {
	eachSocket(t, func(t *testing.T, l session.Limits, mk func(*testing.T) (net.Conn, net.Conn)) {
		a, b := pipe(t, l, nil)
		from, to := mk(t)
		b.Close()
		testenv.Eventually(t, patience, func() error {
			if _, err := a.Write([]byte("x")); !errors.Is(err, syscall.EPIPE) && !errors.Is(err, syscall.ECONNRESET) {
				return fmt.Errorf("Write: %v", err)
			}
			return nil
		})
		from.Write([]byte("unread"))
		if r := ended(t, goCopy(a, io.LimitReader(to, 6))); r.n != 0 || !errors.Is(r.err, syscall.EPIPE) && !errors.Is(r.err, syscall.ECONNRESET) {
			t.Errorf("copied %d, %v", r.n, r.err)
		}
		got := make([]byte, 6)
		if byTCP(a) { // the bytes are lost, as with net
		} else if _, err := io.ReadFull(to, got); string(got) != "unread" {
			t.Errorf("%q is left in the source, %v", got, err)
		}
		from.Close()
		if r := ended(t, goCopy(a, to)); r.n != 0 || r.err != nil {
			t.Errorf("at its end: copied %d, %v", r.n, r.err)
		}
	})
}

// Datagrams are not cut, even if there is little room in one piece.
func TestCopyFromADatagramSocket(t *testing.T) {
	for _, kind := range []int{syscall.SOCK_DGRAM, syscall.SOCK_SEQPACKET} {
		eachEndpoint(t, func(t *testing.T, l session.Limits) {
			a, b := pipe(t, l, nil)
			from, to := socketPair(t, kind)
			var want []byte
			for i := range 100 {
				want = append(want, pattern(3000+i)...)
			}
			go func() {
				for i := range 100 {
					if _, err := from.Write(pattern(3000 + i)); err != nil {
						t.Error(err)
					}
				}
			}()
			all := received(t, b)
			if n, err := io.CopyN(a, to, int64(len(want))); n != int64(len(want)) || err != nil {
				t.Errorf("copied %d of %d, %v", n, len(want), err)
			}
			a.CloseWrite()
			wantBytes(t, <-all, want)
			wantLent(t, a, 0, 0)
		})
	}
}

func socketPair(t *testing.T, kind int) (a, b net.Conn) {
	t.Helper()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, kind, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "socket")
		if ends[i], err = net.FileConn(f); err != nil {
			t.Fatal(err)
		}
		f.Close()
		ends[i].SetDeadline(time.Now().Add(patience))
		t.Cleanup(func() { ends[i].Close() })
	}
	return ends[0], ends[1]
}

// source is an application's reader.
type source func([]byte) (int, error)

func (s source) Read(b []byte) (int, error) { return s(b) }

// sink is an application's writer.
type sink func([]byte) (int, error)

func (s sink) Write(b []byte) (int, error) { return s(b) }

// attempt copies, and returns a panic as an error.
func attempt(w io.Writer, r io.Reader) (n int64, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	n, err = io.Copy(w, r)
	var oe *net.OpError
	if errors.As(err, &oe) && (oe.Op == "readfrom" || oe.Op == "writeto") { // these operations are added as in net
		err = oe.Err
	}
	return n, err
}

// Whatever a source does, the connection goes on after the bytes that it has returned.
func TestSourcesOfTheApplication(t *testing.T) {
	errOwn := errors.New("its own")
	var kept []byte
	for name, tt := range map[string]struct {
		second func([]byte) (int, error) // the first call returns "first "
		want   string                    // the text of the error
	}{
		"fails":            {func(b []byte) (int, error) { return 0, errOwn }, "its own"},
		"panics":           {func(b []byte) (int, error) { panic("its own") }, "panic: its own"},
		"counts too many":  {func(b []byte) (int, error) { return len(b) + 1, nil }, "invalid read result"},
		"counts too few":   {func(b []byte) (int, error) { return -1, nil }, "invalid read result"},
		"writes and fails": {func(b []byte) (int, error) { fill(b, 'x'); return 0, errOwn }, "its own"},
		"keeps the slice":  {func(b []byte) (int, error) { kept = b; return 0, io.EOF }, "<nil>"},
	} {
		t.Run(name, func(t *testing.T) {
			eachEndpoint(t, func(t *testing.T, l session.Limits) {
				a, b := pipe(t, l, nil)
				calls := 0
				n, err := attempt(a, source(func(b []byte) (int, error) {
					if calls++; calls == 1 {
						return copy(b, "first "), nil
					}
					return tt.second(b)
				}))
				if fmt.Sprint(err) != tt.want || n != 6 && err != nil && tt.want[:5] != "panic" {
					t.Errorf("copied %d, %v; want %s", n, err, tt.want)
				}
				fill(kept[:cap(kept)], 'x')
				wantLent(t, a, 0, 0)
				a.SetDeadline(time.Now().Add(patience))
				if _, err := a.Write([]byte("second")); err != nil {
					t.Error(err)
				}
				a.CloseWrite()
				wantBytes(t, <-received(t, b), []byte("first second"))
			})
		})
	}
}

// A source that keeps its slice and writes to it later does not change the stream of this connection, or
// of another.
func TestASourceThatWritesLater(t *testing.T) {
	eachEndpoint(t, func(t *testing.T, l session.Limits) {
		a, b := pipe(t, l, nil)
		other, otherPeer := pipe(t, l, nil)
		data := pattern(1 << 20)
		var kept [][]byte
		src := bytes.NewReader(data)
		all := received(t, b)
		n, err := io.Copy(a, source(func(b []byte) (int, error) {
			kept = append(kept, b)
			return src.Read(b)
		}))
		if n != int64(len(data)) || err != nil {
			t.Errorf("copied %d, %v", n, err)
		}
		var wg sync.WaitGroup
		for _, b := range kept[:1] { // each call had the same slice
			wg.Go(func() { fill(b, 'x') })
		}
		others := received(t, otherPeer)
		other.Write(data)
		other.CloseWrite()
		a.CloseWrite()
		wg.Wait()
		wantBytes(t, <-all, data)
		wantBytes(t, <-others, data)
		wantNobodyElses(t, kept[0], b)
	})
}

// wantNobodyElses checks that copies by a connection, which may use buffers again, do not use one that
// the application has kept.
func wantNobodyElses(t *testing.T, kept []byte, c *sanconn.Conn) {
	t.Helper()
	kept = kept[:cap(kept)]
	fill(kept, 'y')
	for range 8 {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		w.WriteString("other")
		w.Close()
		if n, err := io.Copy(c, r); n != 5 || err != nil {
			t.Errorf("copied %d, %v", n, err)
		}
		r.Close()
	}
	if changed := bytes.Trim(kept, "y"); len(changed) > 0 {
		t.Errorf("it was used again: %q", changed)
	}
}

// While a source blocks, Write and Close of the connection do not wait for it.
func TestASourceThatBlocks(t *testing.T) {
	eachEndpoint(t, func(t *testing.T, l session.Limits) {
		a, b := pipe(t, l, nil)
		goOn := make(chan struct{})
		began := make(chan struct{})
		done := goCopy(a, source(func(b []byte) (int, error) {
			close(began)
			<-goOn
			return 0, io.EOF
		}))
		<-began
		a.SetDeadline(time.Now().Add(patience))
		if _, err := a.Write([]byte("meanwhile")); err != nil {
			t.Error(err)
		}
		a.Close() // does not wait for the source
		wantBytes(t, <-received(t, b), []byte("meanwhile"))
		close(goOn)
		if r := ended(t, done); r.n != 0 || r.err != nil {
			t.Errorf("copied %d, %v", r.n, r.err)
		}
	})
}

func fill(b []byte, v byte) {
	for i := range b {
		b[i] = v
	}
}

// Files, sockets and io.Discard get the bytes from the memory in which they have arrived.
func TestCopyToWhatWritesAtOnce(t *testing.T) {
	eachEndpoint(t, func(t *testing.T, l session.Limits) {
		data := pattern(3<<20 + 5)
		from := func(t *testing.T) *sanconn.Conn {
			a, b := pipe(t, l, nil)
			go func() {
				a.Write(data)
				a.CloseWrite()
			}()
			return b
		}
		t.Run("file", func(t *testing.T) {
			b, f := from(t), fileOf(t, nil)
			if r := ended(t, goCopy(f, b)); r.n != int64(len(data)) || r.err != nil {
				t.Errorf("copied %d, %v", r.n, r.err)
			}
			got, err := os.ReadFile(f.Name())
			if err != nil {
				t.Error(err)
			}
			wantBytes(t, got, data)
			wantLent(t, b, 0, uint64(len(data)))
		})
		t.Run("discard", func(t *testing.T) {
			b := from(t)
			if r := ended(t, goCopy(io.Discard, b)); r.n != int64(len(data)) || r.err != nil {
				t.Errorf("copied %d, %v", r.n, r.err)
			}
			wantLent(t, b, 0, uint64(len(data)))
		})
		for name, mk := range streamPairs {
			t.Run(name, func(t *testing.T) {
				b := from(t)
				to, peer := mk(t)
				all := received(t, peer)
				if r := ended(t, goCopy(to, b)); r.n != int64(len(data)) || r.err != nil {
					t.Errorf("copied %d, %v", r.n, r.err)
				}
				to.Close()
				wantBytes(t, <-all, data)
				wantLent(t, b, 0, uint64(len(data)))
			})
		}
		t.Run("buffer", func(t *testing.T) {
			b := from(t)
			var got bytes.Buffer
			if r := ended(t, goCopy(&got, b)); r.n != int64(len(data)) || r.err != nil {
				t.Errorf("copied %d, %v", r.n, r.err)
			}
			wantBytes(t, got.Bytes(), data)
			wantLent(t, b, 0, 0)
		})
	})
}

// If a file or socket takes no bytes, the next Read returns them. On TCP the bytes that were passed to
// it are lost, as with net.
func TestCopyToWhatIsClosed(t *testing.T) {
	eachEndpoint(t, func(t *testing.T, l session.Limits) {
		f := fileOf(t, nil)
		f.Close()
		to, _ := listened(t, "tcp", "127.0.0.1:0")
		to.Close()
		for _, w := range []io.Writer{f, to, (*os.File)(nil)} {
			a, b := pipe(t, l, nil)
			a.Write([]byte("unread"))
			a.CloseWrite()
			if r := ended(t, goCopy(w, b)); r.n != 0 || r.err == nil {
				t.Errorf("%T: copied %d, %v", w, r.n, r.err)
			}
			if rest := <-received(t, b); !byTCP(b) {
				wantBytes(t, rest, []byte("unread"))
			}
		}
	})
}

// If the source is closed, the copy fails, and the connection still works.
func TestCopyFromWhatIsClosed(t *testing.T) {
	eachEndpoint(t, func(t *testing.T, l session.Limits) {
		a, b := pipe(t, l, nil)
		f := fileOf(t, []byte("closed"))
		f.Close()
		from, _ := listened(t, "tcp", "127.0.0.1:0")
		from.Close()
		for _, r := range []io.Reader{f, from, (*os.File)(nil)} {
			if c := ended(t, goCopy(a, r)); c.n != 0 || c.err == nil {
				t.Errorf("%T: copied %d, %v", r, c.n, c.err)
			}
		}
		a.Write([]byte("still works"))
		a.CloseWrite()
		wantBytes(t, <-received(t, b), []byte("still works"))
	})
}

// Whatever a sink does, the bytes that it has been passed are consumed, and the connection goes on.
func TestSinksOfTheApplication(t *testing.T) {
	errOwn := errors.New("its own")
	for name, tt := range map[string]struct {
		write func([]byte) (int, error)
		n     int64
		want  string // the text of the error
	}{
		"fails":           {func(b []byte) (int, error) { return 2, errOwn }, 2, "its own"},
		"panics":          {func(b []byte) (int, error) { panic("its own") }, 0, "panic: its own"},
		"is short":        {func(b []byte) (int, error) { return len(b) - 1, nil }, 4, io.ErrShortWrite.Error()},
		"counts too many": {func(b []byte) (int, error) { return len(b) + 1, nil }, 0, "invalid write result"},
		"counts too few":  {func(b []byte) (int, error) { return -1, nil }, 0, "invalid write result"},
		"lies and fails":  {func(b []byte) (int, error) { return -1, errOwn }, 0, "invalid write result"},
		"overwrites":      {func(b []byte) (int, error) { fill(b[:cap(b)], 'x'); return len(b), errOwn }, 5, "its own"},
	} {
		t.Run(name, func(t *testing.T) {
			eachEndpoint(t, func(t *testing.T, l session.Limits) {
				a, b := pipe(t, l, nil)
				a.Write([]byte("first"))
				if n, err := attempt(sink(tt.write), b); n != tt.n || fmt.Sprint(err) != tt.want {
					t.Errorf("copied %d, %v; want %d, %s", n, err, tt.n, tt.want)
				}
				wantLent(t, b, 0, 0)
				a.Write([]byte("second"))
				a.CloseWrite()
				wantBytes(t, <-received(t, b), []byte("second"))
			})
		})
	}
}

// A sink that keeps its slice and writes to it does not change the streams.
func TestASinkThatKeepsTheSlice(t *testing.T) {
	eachEndpoint(t, func(t *testing.T, l session.Limits) {
		a, b := pipe(t, l, nil)
		other, otherPeer := pipe(t, l, nil)
		var kept []byte
		a.Write([]byte("first"))
		_, err := io.Copy(sink(func(p []byte) (int, error) { kept = p; return len(p), io.ErrClosedPipe }), b)
		if !errors.Is(err, io.ErrClosedPipe) {
			t.Error(err)
		}
		data := pattern(300_000)
		for _, c := range []struct{ from, to *sanconn.Conn }{{a, b}, {other, otherPeer}, {b, a}} {
			all := received(t, c.to)
			fill(kept[:cap(kept)], 'x')
			c.from.Write(data)
			fill(kept[:cap(kept)], 'y')
			c.from.CloseWrite()
			wantBytes(t, <-all, data)
		}
		if changed := bytes.Trim(kept[:cap(kept)], "y"); len(changed) > 0 {
			t.Errorf("it was used again: %q", changed)
		}
		wantNobodyElses(t, kept, otherPeer)
	})
}

// A sink that blocks holds no memory of the connection: Close releases all of it.
func TestCloseWhileASinkBlocks(t *testing.T) {
	eachSocket(t, func(t *testing.T, l session.Limits, mk func(*testing.T) (net.Conn, net.Conn)) {
		ea, eb := twin.Pair(twin.Config{Limits: l})
		longer := session.Config{CancelTimeout: 4 * patience, CloseTimeout: 4 * patience} // longer than Close may take
		a, b, err := movedPair(t.Context(), ea, eb, sessions{Acceptor: longer})
		if err != nil {
			t.Fatal(err)
		}
		closeAtEnd(t, a, b)
		data := pattern(16 << 20) // more than the socket takes
		go a.Write(data)
		to, peer := mk(t)
		done := goCopy(to, b)
		untilStable(t, func() uint64 { return b.Stats().BytesReceived })
		began := time.Now()
		b.Close()
		if d := time.Since(began); d > patience {
			t.Errorf("Close took %v", d)
		}
		a.Close()
		testenv.Eventually(t, patience, func() error {
			if !eb.Retired() || eb.Left().Allocated != 0 {
				return fmt.Errorf("left: %+v", eb.Left())
			}
			return nil
		})
		all := received(t, peer)
		r := ended(t, done)
		if !errors.Is(r.err, net.ErrClosed) {
			t.Errorf("copied %d, %v", r.n, r.err)
		}
		to.Close()
		wantBytes(t, <-all, data[:r.n])
	})
}

// While a sink blocks, the connection can go back to TCP, so that its other direction does not wait. No
// byte is lost.
func TestTheWayBackWhileASinkBlocks(t *testing.T) {
	sinks := map[string]func(*testing.T) (to io.WriteCloser, peer io.ReadCloser){
		"pipe": func(t *testing.T) (io.WriteCloser, io.ReadCloser) {
			r, w, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			return w, r
		},
	}
	for name, mk := range streamPairs {
		sinks[name] = func(t *testing.T) (io.WriteCloser, io.ReadCloser) {
			to, peer := mk(t)
			to.(interface{ SetWriteBuffer(int) error }).SetWriteBuffer(64 << 10)
			peer.(interface{ SetReadBuffer(int) error }).SetReadBuffer(64 << 10)
			return to, peer
		}
	}
	data := pattern(4 << 20) // more than a sink takes
	for name, mk := range sinks {
		t.Run(name, func(t *testing.T) {
			for _, l := range []session.Limits{{}, {Window: 32}} {
				a, b := pipeOn(t, l, nil)
				to, peer := mk(t)
				defer to.Close()
				defer peer.Close()
				sent := make(chan error, 1)
				go func() {
					_, err := a.Write(data)
					a.CloseWrite()
					sent <- err
				}()
				done := goCopy(to, b)
				untilStable(t, func() uint64 { return b.Stats().BytesReceived })
				if p := b.Provider(); p == "tcp" {
					t.Errorf("by %s", p)
				}
				f, err := a.File()
				if err != nil {
					t.Fatal(err)
				}
				f.Close()
				a.SetReadDeadline(time.Now().Add(patience))
				b.SetWriteDeadline(time.Now().Add(patience))
				if _, err := b.Write([]byte("x")); err != nil {
					t.Error(err)
				}
				if _, err := a.Read(make([]byte, 1)); err != nil {
					t.Error(err)
				}
				all := make(chan []byte, 1)
				go func() { b, _ := io.ReadAll(peer); all <- b }()
				if r := ended(t, done); r.n != int64(len(data)) || r.err != nil {
					t.Errorf("copied %d, %v", r.n, r.err)
				}
				to.Close()
				wantBytes(t, <-all, data)
				if err := <-sent; err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// untilStable waits until a counter is not 0 and does not change any more.
func untilStable(t *testing.T, count func() uint64) {
	t.Helper()
	before, same := uint64(0), 0
	testenv.Eventually(t, patience, func() error {
		now := count()
		if now == 0 || now != before {
			before, same = now, 0
		}
		if same++; same < 5 {
			return fmt.Errorf("at %d", now)
		}
		return nil
	})
}
