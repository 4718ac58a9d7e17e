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

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/connpair"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

func rawOf(t *testing.T, c *sanconn.Conn) syscall.RawConn {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// recv looks once at a connection as pools do: with MSG_PEEK, or by a read.
func recv(t *testing.T, c *sanconn.Conn, size, flags int) (string, error) {
	t.Helper()
	b := make([]byte, size)
	n, calls := 0, 0
	var rerr error
	err := rawOf(t, c).Read(func(fd uintptr) bool {
		calls++
		n, _, rerr = syscall.Recvfrom(int(fd), b, flags)
		return true
	})
	switch {
	case err != nil:
		return "", err
	case calls != 1:
		t.Errorf("%d calls", calls)
	case rerr == nil && n == 0:
		rerr = io.EOF
	}
	return string(b[:max(n, 0)]), rerr
}

func wantRecv(t *testing.T, c *sanconn.Conn, size, flags int, want string, wantErr error) {
	t.Helper()
	if got, err := recv(t, c, size, flags); got != want || !errors.Is(err, wantErr) {
		t.Errorf("%q, %v; want %q, %v", got, err, want, wantErr)
	}
}

// eventuallyRecv waits until a look finds what has been sent.
func eventuallyRecv(t *testing.T, c *sanconn.Conn, want string, wantErr error) {
	t.Helper()
	testenv.Eventually(t, patience, func() error {
		if got, err := recv(t, c, len(want)+1, syscall.MSG_PEEK); got != want || !errors.Is(err, wantErr) {
			return errors.New("not yet")
		}
		return nil
	})
}

// A pool finds in a connection what it would find in TCP: nothing, bytes, or the end.
func TestRawReadShowsTheConnection(t *testing.T) {
	eachEndpoint(t, func(t *testing.T, l session.Limits) {
		a, b := pipe(t, l, nil)
		carrier := b.Provider()
		wantRecv(t, b, 10, syscall.MSG_PEEK, "", syscall.EAGAIN)
		wantRecv(t, b, 10, 0, "", syscall.EAGAIN)
		if p := b.Provider(); p != carrier {
			t.Errorf("a look at nothing took it from %s to %s", carrier, p)
		}
		a.Write([]byte("abcdef"))
		eventuallyRecv(t, b, "abcdef", nil)
		wantRecv(t, b, 1, syscall.MSG_PEEK, "a", nil) // peeked, not read
		wantRecv(t, b, 2, 0, "ab", nil)               // read
		got := make([]byte, 1)
		if _, err := b.Read(got); got[0] != 'c' || err != nil {
			t.Errorf("%q, %v", got, err)
		}
		a.Close()
		eventuallyRecv(t, b, "def", nil)
		wantRecv(t, b, 10, 0, "def", nil)
		eventuallyRecv(t, b, "", io.EOF)
		wantRecv(t, b, 10, 0, "", io.EOF)
		if n, err := b.Read(got); n != 0 || err != io.EOF {
			t.Errorf("%d, %v", n, err)
		}
	})
}

// No byte is lost if the stream is read alternately through the socket and from the connection.
func TestRawReadLosesNoByte(t *testing.T) {
	eachEndpoint(t, func(t *testing.T, l session.Limits) {
		a, b := pipe(t, l, nil)
		b.SetDeadline(time.Now().Add(patience))
		sent := make([]byte, 300_000)
		for i := range sent {
			sent[i] = byte(i * i >> 3)
		}
		var writing sync.WaitGroup
		defer writing.Wait()
		writing.Go(func() {
			for rest, size := sent, 1; len(rest) > 0; size = size*3%40_000 + 1 {
				n, err := a.Write(rest[:min(size, len(rest))])
				if err != nil {
					t.Error(err)
					return
				}
				rest = rest[n:]
			}
			a.CloseWrite()
		})
		var got bytes.Buffer
		buf := make([]byte, 5000)
		for i := 0; ; i++ {
			var n int
			var err error
			if i%2 == 0 {
				n, err = b.Read(buf)
			} else if rerr := rawOf(t, b).Read(func(fd uintptr) bool { // waits
				n, err = syscall.Read(int(fd), buf[:1+i%len(buf)])
				return err != syscall.EAGAIN
			}); rerr != nil {
				t.Fatal(rerr)
			} else if n == 0 && err == nil {
				err = io.EOF
			}
			got.Write(buf[:max(n, 0)])
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if !bytes.Equal(got.Bytes(), sent) {
			t.Errorf("%d of %d bytes, or others", got.Len(), len(sent))
		}
	})
}

// waitingRead reads by a function that waits. The function has found nothing so far.
func waitingRead(t *testing.T, c *sanconn.Conn) (done <-chan error) {
	t.Helper()
	looked, ended := make(chan struct{}, 10), make(chan error, 1)
	raw := rawOf(t, c)
	go func() {
		ended <- raw.Read(func(fd uintptr) bool {
			looked <- struct{}{}
			_, err := syscall.Read(int(fd), make([]byte, 10))
			return err != syscall.EAGAIN
		})
	}()
	<-looked
	return ended
}

// A function that waits is called again when something has come.
func TestRawReadWaits(t *testing.T) {
	eachEndpoint(t, func(t *testing.T, l session.Limits) {
		t.Run("for bytes", func(t *testing.T) {
			a, b := pipe(t, l, nil)
			done := waitingRead(t, b)
			a.Write([]byte("x"))
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
		t.Run("for the end", func(t *testing.T) {
			a, b := pipe(t, l, nil)
			done := waitingRead(t, b)
			a.Close()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	})
}

// A function that reads nothing, and is done in its second call, is not called again before something
// has come.
func TestRawReadWaitsForReadability(t *testing.T) {
	eachEndpoint(t, func(t *testing.T, l session.Limits) {
		a, b := pipe(t, l, nil)
		raw, err := b.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		for _, written := range []bool{false, true} {
			calls, wrote := 0, make(chan error, 1)
			b.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
			if written {
				b.SetReadDeadline(time.Now().Add(patience))
			}
			err := raw.Read(func(uintptr) bool {
				if calls++; calls == 1 && written {
					go func() {
						_, err := a.Write([]byte("x"))
						wrote <- err
					}()
				}
				return calls > 1
			})
			switch {
			case calls == 0:
				t.Fatal(err)
			case !written && !errors.Is(err, os.ErrDeadlineExceeded):
				t.Errorf("readable, and nothing there: %v, %d calls", err, calls)
			case written:
				if err := errors.Join(err, <-wrote); err != nil {
					t.Error(err)
				}
			}
		}
		wantRecv(t, b, 9, 0, "x", nil)
	})
}

// A function that waits ends as a Read does.
func TestRawReadWaitsNoLonger(t *testing.T) {
	eachEndpoint(t, func(t *testing.T, l session.Limits) {
		t.Run("than the deadline", func(t *testing.T) {
			_, b := pipe(t, l, nil)
			done := waitingRead(t, b)
			b.SetReadDeadline(time.Now().Add(time.Millisecond))
			if err := <-done; !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Error(err)
			}
			if _, err := recv(t, b, 1, 0); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("after the deadline: %v", err)
			}
			b.SetReadDeadline(time.Time{})
			wantRecv(t, b, 1, 0, "", syscall.EAGAIN)
		})
		t.Run("than Close", func(t *testing.T) {
			_, b := pipe(t, l, nil)
			done := waitingRead(t, b)
			b.Close()
			if err := <-done; !errors.Is(err, net.ErrClosed) {
				t.Error(err)
			}
			if _, err := recv(t, b, 1, 0); !errors.Is(err, net.ErrClosed) {
				t.Errorf("after Close: %v", err)
			}
		})
	})
}

// A function that waits after the end of the stream waits until a deadline or Close, even if Close comes
// before it waits.
func TestRawReadWaitsBehindTheEnd(t *testing.T) {
	eachEndpoint(t, func(t *testing.T, l session.Limits) {
		for name, read := range map[string]func(fd int, p []byte) (int, error){
			"counted": testenv.SyscallRead, "looks": unix.Read,
		} {
			a, b := pipe(t, l, nil)
			raw := rawOf(t, b)
			if name == "counted" {
				raw = countedOf(t, b).raw
			}
			a.CloseWrite()
			if _, err := b.Read(make([]byte, 1)); err != io.EOF { // the end has come
				t.Error(err)
			}
			b.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
			calls := 0
			if err := raw.Read(func(fd uintptr) bool {
				calls++
				n, _ := read(int(fd), make([]byte, 1))
				return n > 0
			}); !errors.Is(err, os.ErrDeadlineExceeded) || calls > 20 {
				t.Errorf("%s: %d calls, %v", name, calls, err)
			}
			b.SetReadDeadline(time.Time{})
			err := raw.Read(func(fd uintptr) bool {
				n, _ := read(int(fd), make([]byte, 1))
				go b.Close() // Close may wait for the descriptor
				if err := testenv.Await(patience, func() error {
					if err := b.SetDeadline(time.Time{}); !errors.Is(err, net.ErrClosed) {
						return fmt.Errorf("it is not closed: %v", err)
					}
					return nil
				}); err != nil {
					t.Errorf("%s: %v", name, err)
				}
				return n > 0
			})
			if !errors.Is(err, net.ErrClosed) {
				t.Errorf("%s: behind Close: %v", name, err)
			}
		}
	})
}

// A function that leaves unread what has come waits for more, as on TCP, where the bytes are afterwards.
func TestRawReadWaitsBehindUnreadBytes(t *testing.T) {
	eachEndpoint(t, func(t *testing.T, l session.Limits) {
		a, b := pipe(t, l, nil)
		a.Write([]byte("x"))
		eventuallyRecv(t, b, "x", nil)
		b.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
		if err := rawOf(t, b).Read(func(uintptr) bool { return false }); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Error(err)
		}
		b.SetReadDeadline(time.Time{})
		eventuallyRecv(t, b, "x", nil)
		wantRecv(t, b, 10, 0, "x", nil)
		a.CloseWrite()
		eventuallyRecv(t, b, "", io.EOF)
	})
}

// A function on a connection that was reset finds an error, not an end.
func TestRawReadReturnsErrors(t *testing.T) {
	a, b := pipe(t, session.Limits{}, nil)
	a.SetLinger(0)
	a.Close()
	testenv.Eventually(t, patience, func() error {
		if _, err := recv(t, b, 1, 0); !errors.Is(err, syscall.ECONNRESET) {
			return fmt.Errorf("want a reset: %v", err)
		}
		return nil
	})
}

// Lent bytes stay in place while a pool looks. Close, Reads and Writes may come at any time.
func TestRawReadBesidesOtherOperations(t *testing.T) {
	eachEndpoint(t, func(t *testing.T, l session.Limits) {
		a, b := pipe(t, l, nil)
		const total = 20_000
		var all sync.WaitGroup
		all.Go(func() {
			for range total {
				a.Write([]byte{1})
			}
		})
		for range 2 {
			all.Go(func() {
				for {
					_, err := recv(t, b, 10, syscall.MSG_PEEK)
					if errors.Is(err, net.ErrClosed) {
						return
					}
				}
			})
		}
		for read := 0; read < total; {
			b.SetReadDeadline(time.Now().Add(patience))
			var n int
			var err error
			if read%3 == 0 {
				var p []byte
				p, err = b.Peek()
				n = len(p)
				if derr := b.Discard(n); derr != nil {
					t.Fatal(derr)
				}
			} else {
				n, err = b.Read(make([]byte, 100))
			}
			if err != nil {
				t.Fatal(read, err)
			}
			read += n
		}
		b.Close()
		all.Wait()
	})
}

// Control, Write and File use TCP's descriptor, so the connection goes back to TCP.
func TestTheDescriptor(t *testing.T) {
	eachEndpoint(t, func(t *testing.T, l session.Limits) {
		for name, use := range map[string]func(c *sanconn.Conn, data []byte) error{
			"Control": func(c *sanconn.Conn, data []byte) (err error) {
				cerr := rawOf(t, c).Control(func(fd uintptr) { _, err = syscall.Write(int(fd), data) })
				return errors.Join(cerr, err)
			},
			"Write": func(c *sanconn.Conn, data []byte) (err error) {
				cerr := rawOf(t, c).Write(func(fd uintptr) bool { _, err = syscall.Write(int(fd), data); return true })
				return errors.Join(cerr, err)
			},
			"File": func(c *sanconn.Conn, data []byte) error {
				f, err := c.File()
				if err != nil {
					return err
				}
				defer f.Close()
				_, err = f.Write(data)
				return err
			},
		} {
			t.Run(name, func(t *testing.T) {
				a, b := pipe(t, l, nil)
				a.Write([]byte("before "))
				b.Write([]byte("unread"))
				if err := use(a, []byte("by the descriptor ")); err != nil {
					t.Fatal(err)
				}
				a.Write([]byte("behind"))
				a.CloseWrite()
				wantBytes(t, <-received(t, b), []byte("before by the descriptor behind"))
				b.CloseWrite()
				wantBytes(t, <-received(t, a), []byte("unread"))
				if p := a.Provider(); p != "tcp" {
					t.Errorf("it is on %s", p)
				}
			})
		}
	})
}

// Unread bytes that have come are in the descriptor when the program gets it: functions that look with
// MSG_DONTWAIT or FIONREAD do not wait for them.
func TestTheDescriptorShowsWhatIsUnread(t *testing.T) {
	eachEndpoint(t, func(t *testing.T, l session.Limits) {
		for name, use := range map[string]func(c *sanconn.Conn, f func(fd uintptr)) error{
			"Control": func(c *sanconn.Conn, f func(fd uintptr)) error { return rawOf(t, c).Control(f) },
			"File": func(c *sanconn.Conn, f func(fd uintptr)) error {
				file, err := c.File()
				if err != nil {
					return err
				}
				defer file.Close()
				raw, err := file.SyscallConn()
				return errors.Join(err, raw.Control(f))
			},
		} {
			t.Run(name, func(t *testing.T) {
				for range 20 {
					a, b := pipe(t, l, nil)
					a.Write([]byte("unread"))
					b.SetReadDeadline(time.Unix(1, 0)) // the deadline of the last Read, which does not apply to a look
					var got [10]byte
					var n int
					var rerr error
					err := use(b, func(fd uintptr) {
						n, _, rerr = syscall.Recvfrom(int(fd), got[:], syscall.MSG_DONTWAIT)
					})
					if err != nil || rerr != nil || string(got[:n]) != "unread" {
						t.Fatalf("%v, %v, %d bytes", err, rerr, n)
					}
					a.Close()
					b.SetReadDeadline(time.Now().Add(patience))
					if n, err := b.Read(got[:]); err != io.EOF { // what came by the descriptor is not missing
						t.Fatalf("behind that: %d bytes, %v", n, err)
					}
				}
			})
		}
	})
}

// On a connection that stays on TCP, the function has TCP's own descriptor in each call.
func TestRawReadWhereTCPStays(t *testing.T) {
	eachEndpoint(t, func(t *testing.T, l session.Limits) {
		a, b := pipe(t, l, nil)
		f, err := b.File()
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
		var descriptor, first uintptr
		if err := rawOf(t, b).Control(func(fd uintptr) { descriptor = fd }); err != nil {
			t.Fatal(err)
		}
		err = rawOf(t, b).Read(func(fd uintptr) bool {
			if first == 0 { // with a deadline that has passed before, the function is not called
				first = fd
				b.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
			}
			return false
		})
		if first != descriptor || !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("descriptor %d instead of %d; %v", first, descriptor, err)
		}
		b.SetReadDeadline(time.Now().Add(patience))
		a.Write([]byte("peeked"))
		if _, err := b.Peek(); err != nil {
			t.Fatal(err)
		}
		wantRecv(t, b, 10, unix.MSG_PEEK, "peeked", nil) // by another descriptor
		b.Discard(len("peeked"))
		a.Write([]byte("x"))
		eventuallyRecv(t, b, "x", nil)
	})
}

func TestRawReadThatPanics(t *testing.T) {
	a, b := pipe(t, session.Limits{}, nil)
	a.Write([]byte("kept"))
	eventuallyRecv(t, b, "kept", nil)
	func() {
		defer func() { recover() }()
		rawOf(t, b).Read(func(uintptr) bool { panic("on purpose") })
	}()
	wantRecv(t, b, 10, 0, "kept", nil)
}

// Errors of Read are those of the operation raw-read with both addresses, as net's are. After CloseRead
// the function finds the end.
func TestRawReadFailsAsTCPs(t *testing.T) {
	eachEndpoint(t, func(t *testing.T, l session.Limits) {
		a, b := pipe(t, l, nil)
		look := func(want error) {
			t.Helper()
			_, err := recv(t, b, 1, syscall.MSG_PEEK)
			var oe *net.OpError
			if !errors.As(err, &oe) || oe.Op != "raw-read" || oe.Source == nil || oe.Addr == nil || !errors.Is(err, want) {
				t.Errorf("%#v, want raw-read around %v", err, want)
			}
		}
		b.SetReadDeadline(time.Unix(1, 0))
		look(os.ErrDeadlineExceeded)
		b.Close()
		look(net.ErrClosed)
		a.CloseRead()
		wantRecv(t, a, 1, syscall.MSG_PEEK, "", io.EOF)
	})
}

// The first look after a reset finds it.
func TestRawReadShowsAReset(t *testing.T) {
	eachEndpoint(t, func(t *testing.T, l session.Limits) {
		a, b := pipe(t, l, nil)
		a.SetLinger(0)
		a.Close()
		testenv.Eventually(t, patience, func() error {
			if _, err := recv(t, b, 1, syscall.MSG_PEEK); err == io.EOF {
				t.Fatal("it is shown as an end")
			} else if !errors.Is(err, syscall.ECONNRESET) {
				return errors.New("not yet")
			}
			return nil
		})
	})
}

// A reset, or the silence of a peer, is returned by one Read. The next ones return io.EOF: a loop may
// end only at that.
func TestOneReadFindsAReset(t *testing.T) {
	p := make([]byte, 1)
	find := func(t *testing.T, b *sanconn.Conn, want error) {
		b.SetDeadline(time.Now().Add(patience))
		if _, err := b.Read(p); !errors.Is(err, want) {
			t.Error(err)
		}
		for range 2 {
			if n, err := b.Read(p); n != 0 || err != io.EOF {
				t.Errorf("%d, %v; want io.EOF", n, err)
			}
		}
	}
	eachEndpoint(t, func(t *testing.T, l session.Limits) {
		a, b := pipe(t, l, nil)
		a.SetLinger(0)
		a.Close()
		find(t, b, syscall.ECONNRESET)
		if _, err := b.Write(p); !errors.Is(err, syscall.EPIPE) {
			t.Error(err)
		}
	})
	t.Run("behind a way back in vain", func(t *testing.T) {
		_, b := pipe(t, session.Limits{Window: 32}, nil)
		sanconn.SessionOf(b).Close() // as a way back in vain does
		find(t, b, syscall.ECONNRESET)
	})
	t.Run("of a peer that does not answer", func(t *testing.T) {
		ea, eb := twin.Pair(twin.Config{Limits: session.Limits{Window: 32, CanRead: true, MaxExpose: 16 << 20, Threshold: 8 << 10}})
		a, _, err := movedPair(t.Context(), ea, eb, sessions{Dialer: session.Config{CancelTimeout: time.Millisecond}})
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		ea.Cut()
		a.SetWriteDeadline(time.Now().Add(time.Second)) // after the offer was sent
		a.Write(make([]byte, 64<<10))                   // the offer's end is not acknowledged
		find(t, a, syscall.ETIMEDOUT)
	})
	t.Run("cut while it moved", func(t *testing.T) {
		a, b, err := newPair(newconn.Config{}, newconn.Config{})
		if err != nil {
			t.Fatal(err)
		}
		defer b.Close()
		sanconn.Lose(b)
		a.Close()
		find(t, b, syscall.ECONNRESET)
	})
}

// Calls that wait for bytes that were returned to the peer delay no Read, and all calls that want the
// descriptor wait.
func TestADeadlineBesideALook(t *testing.T) {
	a, b, err := newPair(newconn.Config{}, newconn.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	defer a.Close()
	sanconn.Expect(a, 10) // these bytes do not come
	raw := rawOf(t, a)
	looks := make(chan error, 2)
	for range cap(looks) {
		go func() { looks <- raw.Control(func(uintptr) {}) }()
	}
	testenv.Eventually(t, patience, func() error {
		if n := sanconn.Users(a); n != cap(looks) {
			return fmt.Errorf("%d want the descriptor", n)
		}
		return nil
	})
	a.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	if _, err := a.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error(err)
	}
	if n := len(looks); n != 0 {
		t.Errorf("%d looks have not waited, or the Read waited for them", n)
	}
	sanconn.Expect(a, 0)
	for range cap(looks) {
		if err := <-looks; err != nil {
			t.Error(err)
		}
	}
}

// What a peer that has closed has left on a session is shown to looks, can be read in pieces, and no
// look loses it. Thrift's clients look in this way before each call.
func TestRawReadShowsWhatAClosedPeerHasLeft(t *testing.T) {
	a, b := pipe(t, session.Limits{}, nil)
	b.Write([]byte("hello"))
	b.Close()
	eventuallyRecv(t, a, "hello", nil)
	wantRecv(t, a, 10, unix.MSG_PEEK|unix.MSG_DONTWAIT, "hello", nil)
	wantRecv(t, a, 2, 0, "he", nil)
	a.SetReadDeadline(time.Unix(1, 0))
	wantRecv(t, a, 10, 0, "", os.ErrDeadlineExceeded)
	a.SetReadDeadline(time.Now().Add(patience))
	buf := make([]byte, 1)
	if n, err := a.Read(buf); n != 1 || buf[0] != 'l' || err != nil {
		t.Errorf("%q, %v", buf[:n], err)
	}
	wantRecv(t, a, 10, unix.MSG_DONTWAIT, "lo", nil)
	eventuallyRecv(t, a, "", io.EOF)
}

// If there is no way back, because the session has ended, a function of Read finds the bytes that were
// taken from the session, then those that it still has, and then its end, as the connection's Read does.
func TestRawReadBehindAWayBackInVain(t *testing.T) {
	for _, what := range []string{"taken", "not taken", "left in the ring"} {
		limits := session.Limits{Window: 32}
		if what == "left in the ring" {
			limits = session.Limits{}
		}
		ea, eb := twin.Pair(twin.Config{Limits: limits})
		a, b := pipeOver(t, ea, eb, nil)
		sendUnread(t, b, a)
		switch what {
		case "left in the ring":
			a.Write([]byte("what the other end dies without having read"))
			eb.Kill()
		case "taken":
			if _, err := b.Reserve(1); err != nil { // so that b does not answer
				t.Fatal(err)
			}
			failed := make(chan error, 1)
			go func() { _, err := a.File(); failed <- err }()
			awaitLeaving(t, a)
			testenv.Eventually(t, patience, func() error {
				if a.Stats().BytesReceived == 0 {
					return errors.New("nothing is taken")
				}
				return nil
			})
			eb.Kill()
			if err := <-failed; err == nil {
				t.Fatal("it has left")
			}
		default:
			eb.Kill()
		}
		if err := rawOf(t, a).Read(func(uintptr) bool { return false }); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%s: a function that waits for more: %v", what, err)
		}
		wantRecv(t, a, 2, 0, "un", nil)
		wantRecv(t, a, 100, 0, "read", nil)
		wantRecv(t, a, 1, 0, "", syscall.ECONNRESET)
	}
}

// After CloseRead a descriptor shows the end, even if CloseRead was called on a session.
func TestTheDescriptorBehindCloseRead(t *testing.T) {
	a, _ := pipe(t, session.Limits{}, nil)
	if err := a.CloseRead(); err != nil {
		t.Fatal(err)
	}
	f, err := a.File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if n, _, err := syscall.Recvfrom(int(f.Fd()), make([]byte, 1), syscall.MSG_DONTWAIT); n != 0 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
}

// A raw Write follows the rest of a Write that its way back to TCP has cut, as a raw Write of net waits
// for other Writes.
func TestRawWriteBehindACutWrite(t *testing.T) {
	const size = 8 << 20
	for range 5 {
		a, b, err := newPair(newconn.Config{}, newconn.Config{})
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		defer b.Close()
		moveAgain(t, a, b)
		if err := moved(t, a); err != nil {
			t.Fatal(err)
		}
		all, begun := readSlowly(t, b)
		wrote := make(chan error, 1)
		go func() {
			_, err := a.Write(bytes.Repeat([]byte{'a'}, size))
			wrote <- err
		}()
		<-begun
		raw, err := a.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		if err := raw.Write(func(fd uintptr) bool {
			_, err := unix.Write(int(fd), []byte("raw"))
			return err == nil
		}); err != nil {
			t.Error(err)
		}
		if err := <-wrote; err != nil {
			t.Error(err)
		}
		a.CloseWrite()
		if at := bytes.Index(<-all, []byte("raw")); at != 0 && at != size {
			t.Errorf("at %d of %d", at, size)
		}
	}
}

// Bytes that the program has written by a descriptor that it has kept are noticed whenever the peer
// proposes to move, even if the program has written more than the threshold by the connection before.
func TestBytesByAKeptDescriptor(t *testing.T) {
	const threshold = 1000
	for _, before := range []int{threshold - 100, threshold + 100} {
		a, b, move := onTCPPair(t, newconn.Config{Threshold: threshold})
		raw, err := b.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		kept := 0
		if err := raw.Control(func(fd uintptr) { kept = int(fd) }); err != nil {
			t.Fatal(err)
		}
		b.Write(make([]byte, before))
		if _, err := unix.Write(kept, []byte("by the descriptor")); err != nil {
			t.Fatal(err)
		}
		b.Write(make([]byte, threshold))
		if err := move(); !errors.Is(err, connpair.ErrRefused) {
			t.Errorf("it moves: %v", err)
		}
		b.CloseWrite()
		if got := <-received(t, a); len(got) != before+len("by the descriptor")+threshold {
			t.Errorf("%d bytes came", len(got))
		}
	}
}

// A File that fails for lack of descriptors does not keep the connection on TCP.
func TestFileWithoutADescriptor(t *testing.T) {
	a, _, move := onTCPPair(t, newconn.Config{})
	var had unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &had); err != nil {
		t.Fatal(err)
	}
	none := unix.Rlimit{Cur: 3, Max: had.Max}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &none); err != nil {
		t.Fatal(err)
	}
	f, err := a.File()
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &had); err != nil {
		t.Fatal(err)
	}
	if err == nil {
		f.Close()
		t.Fatal("it has one")
	}
	if err := move(); err != nil {
		t.Error(err)
	}
}

// A raw Read that would wait, but finds that Peek has taken bytes from TCP meanwhile, does not keep the
// connection on TCP, nor does a raw Write whose deadline has passed: their functions do not have the
// descriptor.
func TestRawCallsWithoutADescriptor(t *testing.T) {
	a, b, _ := onTCPPair(t, newconn.Config{})
	raw, err := a.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	looks := 0
	if err := raw.Read(func(uintptr) bool {
		if looks++; looks > 1 { // the taken bytes are shown to it
			return true
		}
		b.Write([]byte("x"))
		if _, err := a.Peek(); err != nil {
			t.Error(err)
		}
		return false
	}); err != nil || looks != 2 {
		t.Errorf("%d looks, %v", looks, err)
	}
	a.Discard(1)
	for range 3 { // on TCP, and from the session
		a.SetWriteDeadline(time.Unix(1, 0))
		if err := raw.Write(func(uintptr) bool { t.Error("it is called"); return true }); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Error(err)
		}
		a.SetWriteDeadline(time.Now().Add(patience))
		moveAgain(t, a, b)
	}
}

// After Write, and after a Read that has waited, a connection stays on TCP for good. After Control, and
// a Read that has not waited, it may move once its own Read has been used again.
func TestWhatStaysBehindTheDescriptor(t *testing.T) {
	for name, tt := range map[string]struct {
		use   func(raw syscall.RawConn, more func()) error // it does not read
		stays bool
	}{
		"Control": {func(raw syscall.RawConn, _ func()) error { return raw.Control(func(uintptr) {}) }, false},
		"Write":   {func(raw syscall.RawConn, _ func()) error { return raw.Write(func(uintptr) bool { return true }) }, true},
		"Read":    {func(raw syscall.RawConn, _ func()) error { return raw.Read(func(uintptr) bool { return true }) }, false},
		"a Read that waits": {func(raw syscall.RawConn, more func()) error {
			calls := 0
			return raw.Read(func(uintptr) bool {
				if calls++; calls == 1 {
					more()
				}
				return calls > 1
			})
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			a, b, move := onTCPPair(t, newconn.Config{Threshold: 1000})
			raw, err := b.SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			tcp, err := newconn.HandleOf(b).TCP().SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			a.Write([]byte("x"))
			if err := tcp.Read(func(fd uintptr) bool { // until it has come
				_, _, err := syscall.Recvfrom(int(fd), make([]byte, 1), syscall.MSG_PEEK)
				return err != syscall.EAGAIN
			}); err != nil {
				t.Fatal(err)
			}
			if err := tt.use(raw, func() { a.Write([]byte("y")) }); err != nil {
				t.Fatal(err)
			}
			if err := move(); !errors.Is(err, connpair.ErrRefused) {
				t.Fatalf("it moves before it is used: %v", err)
			}
			if _, err := b.Read(make([]byte, 1)); err != nil { // counts as more than 1000 of use
				t.Fatal(err)
			}
			if err := move(); tt.stays != errors.Is(err, connpair.ErrRefused) || !tt.stays && err != nil {
				t.Errorf("it stays: %v; want %v", err, tt.stays)
			}
		})
	}
}
