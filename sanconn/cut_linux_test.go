package sanconn_test

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/connpair"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

// cutTCP resets a connection's TCP as `ss -K` does, unknown to the program.
func cutTCP(t *testing.T, c *sanconn.Conn) {
	t.Helper()
	raw, err := newconn.HandleOf(c).TCP().SyscallConn()
	if err != nil {
		t.Error(err)
		return
	}
	var errno syscall.Errno
	raw.Control(func(fd uintptr) {
		unspecified := unix.RawSockaddr{Family: unix.AF_UNSPEC}
		_, _, errno = unix.Syscall(unix.SYS_CONNECT, fd, uintptr(unsafe.Pointer(&unspecified)), unix.SizeofSockaddrInet4)
	})
	if errno != 0 {
		t.Error(errno)
	}
}

// A Write that has failed by TCP cuts the stream, even if its direction moves afterwards.
func TestAWriteThatFailsBesideAProposal(t *testing.T) {
	for _, end := range []struct {
		name string
		end  func(*sanconn.Conn)
	}{
		{"Close", func(c *sanconn.Conn) { c.Close() }},
		{"CloseWrite", func(c *sanconn.Conn) { c.CloseWrite() }},
		{"Write", func(c *sanconn.Conn) {
			c.SetWriteDeadline(time.Time{})
			if n, err := c.Write([]byte("behind it")); n > 0 || !errors.Is(err, syscall.EPIPE) {
				t.Errorf("another Write: %d, %v", n, err)
			}
		}},
		{"nothing", func(c *sanconn.Conn) {}},
	} {
		for _, before := range []bool{true, false} {
			t.Run(end.name, func(t *testing.T) {
				a, b, err := newPair(newconn.Config{}, newconn.Config{})
				if err != nil {
					t.Fatal(err)
				}
				closeAtEnd(t, a, b)
				want := pattern(100)
				if _, err := a.Write(want); err != nil {
					t.Fatal(err)
				}
				got := make([]byte, len(want))
				b.SetDeadline(time.Now().Add(patience))
				if _, err := io.ReadFull(b, got); err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				ea, eb := twin.Pair(twin.Config{})
				taken := make(chan error, 1)
				go func() {
					taken <- connpair.Accept(ctx, eb, session.Config{}, func([]byte) *sanconn.Conn {
						cutTCP(t, a)
						if n, err := a.Write(want); n > 0 || err == nil {
							t.Errorf("by TCP that is cut: %d, %v", n, err)
						}
						a.SetWriteDeadline(time.Unix(1, 0))
						if before {
							end.end(a)
						}
						return b
					})
				}()
				connpair.Propose(ctx, a, ea, session.Config{}, nil)                     // fails if a is closed
				if err := <-taken; err != nil && !errors.Is(err, connpair.ErrRefused) { // because a is closed
					t.Fatal(err)
				}
				if !before {
					end.end(a)
				}
				if n, err := b.Read(got); n > 0 || !errors.Is(err, syscall.ECONNRESET) {
					t.Errorf("the peer reads %d, %v", n, err)
				}
			})
		}
	}
}

// The error of a Write or a copy counts as TCP's end only if TCP has ended: the file of a copy may
// return the same error.
func TestWhatEndsTCP(t *testing.T) {
	for name, tt := range map[string]struct {
		before func(*testing.T, *sanconn.Conn)
		err    error
		ends   bool
	}{
		"a file's":                {nil, &os.PathError{Op: "read", Err: syscall.ETIMEDOUT}, false},
		"a deadline's":            {cutTCP, os.ErrDeadlineExceeded, false},
		"a reset":                 {cutTCP, os.NewSyscallError("sendfile", syscall.ECONNRESET), true},
		"no route, of IP_RECVERR": {nil, os.NewSyscallError("write", syscall.EHOSTUNREACH), false},
		"no network, at the end":  {cutTCP, os.NewSyscallError("write", syscall.ENETUNREACH), true},
		"shut by the descriptor": {func(_ *testing.T, c *sanconn.Conn) { newconn.HandleOf(c).TCP().CloseWrite() },
			os.NewSyscallError("write", syscall.EPIPE), true},
	} {
		a, b, err := newPair(newconn.Config{}, newconn.Config{})
		if err != nil {
			t.Fatal(err)
		}
		closeAtEnd(t, a, b)
		if tt.before != nil {
			tt.before(t, a)
		}
		if ends := sanconn.EndsTCP(a, &net.OpError{Op: "write", Err: tt.err}); ends != tt.ends {
			t.Errorf("%s: it ends TCP: %v", name, ends)
		}
	}
}

// If TCP has lost bytes that precede the session's, the peer's Writes fail, as on TCP, even if the
// program only stops reading.
func TestAWriteToAReaderThatIsCut(t *testing.T) {
	a, b, err := newPair(newconn.Config{}, newconn.Config{})
	if err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, a, b)
	if _, err := a.Write(pattern(100)); err != nil {
		t.Fatal(err)
	}
	ea, eb := twin.Pair(twin.Config{})
	if err := movePair(t.Context(), a, b, ea, eb, sessions{}); err != nil {
		t.Fatal(err)
	}
	cutTCP(t, b) // and discards the bytes that have come and were not read
	b.SetDeadline(time.Now().Add(patience))
	if n, err := b.Read(make([]byte, 1)); n > 0 || !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read %d, %v", n, err)
	}
	for _, c := range []*sanconn.Conn{a, b} {
		c.SetDeadline(time.Now().Add(patience))
		_, err := c.Write(make([]byte, 16<<20))
		if !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
			t.Errorf("a Write: %v", err)
		}
	}
}

// A connection does not move once an operation has found a reset of TCP: the move would hide that bytes
// were lost.
func TestNoMoveBehindAReset(t *testing.T) {
	for name, finds := range map[string]func(c *sanconn.Conn) error{
		"a Read":  func(c *sanconn.Conn) error { _, err := c.Read(make([]byte, 1)); return err },
		"a Write": func(c *sanconn.Conn) error { _, err := c.Write([]byte{1}); return err },
	} {
		for dialer := range 2 {
			a, b, err := newPair(newconn.Config{}, newconn.Config{})
			if err != nil {
				t.Fatal(err)
			}
			closeAtEnd(t, a, b)
			c := []*sanconn.Conn{a, b}[dialer]
			cutTCP(t, c)
			if err := finds(c); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("%s: %v", name, err)
			}
			ea, eb := twin.Pair(twin.Config{})
			if err := movePair(t.Context(), a, b, ea, eb, sessions{}); err == nil {
				t.Errorf("it moves behind what %s of end %d has found", name, dialer)
			}
		}
	}
}

// The same if the flush of what came back has found the reset.
func TestNoMoveBehindAResetOfWhatCameBack(t *testing.T) {
	a, b := pipe(t, session.Limits{}, nil)
	if _, err := a.Write([]byte("unread")); err != nil {
		t.Fatal(err)
	}
	cutTCP(t, a)
	if err := sanconn.LeaveSAN(b); err != nil {
		t.Fatal(err)
	}
	awaitLeft(t, a)
	ea, eb := twin.Pair(twin.Config{})
	if err := movePair(t.Context(), a, b, ea, eb, sessions{}); err == nil {
		t.Error("it moves")
	}
	b.SetDeadline(time.Now().Add(patience))
	if n, err := b.Read(make([]byte, 10)); n > 0 || !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the peer reads %d, %v", n, err)
	}
}

// In programs that cmd/san has built, a function of a RawConn's Read is called with TCP's descriptor to
// find out how it reads, and called again if it does not read by syscall.Read. The first call must not
// take TCP's error: the next Read would return io.EOF for a stream that was cut.
func TestATriedFunctionTakesNoReset(t *testing.T) {
	testenv.AsBuilt(t)
	a, b := pipe(t, session.Limits{}, nil)
	cutTCP(t, a)
	raw, err := b.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := raw.Read(func(fd uintptr) bool {
		if _, _, err := syscall.Recvfrom(int(fd), make([]byte, 1), 0); err != syscall.EAGAIN {
			t.Errorf("on the SAN, where nothing has come: %v", err)
		}
		return true
	}); err != nil {
		t.Error(err)
	}
	if err := sanconn.LeaveSAN(b); err != nil {
		t.Fatal(err)
	}
	b.SetDeadline(time.Now().Add(patience))
	if n, err := b.Read(make([]byte, 1)); n > 0 || !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("behind the way back: %d, %v", n, err)
	}
}

// If the flush of what came back has found a reset, TCP's descriptor would show only io.EOF. So the
// program does not get the descriptor.
func TestNoDescriptorBehindAResetOfWhatCameBack(t *testing.T) {
	for name, has := range map[string]func(c *sanconn.Conn, raw syscall.RawConn) error{
		"File": func(c *sanconn.Conn, _ syscall.RawConn) error {
			f, err := c.File()
			if err == nil {
				f.Close()
			}
			return err
		},
		"Control": func(_ *sanconn.Conn, raw syscall.RawConn) error { return raw.Control(func(uintptr) {}) },
		"Read":    func(_ *sanconn.Conn, raw syscall.RawConn) error { return raw.Read(func(uintptr) bool { return true }) },
		"Write":   func(_ *sanconn.Conn, raw syscall.RawConn) error { return raw.Write(func(uintptr) bool { return true }) },
	} {
		a, b := pipe(t, session.Limits{}, nil)
		if _, err := a.Write([]byte("unread")); err != nil {
			t.Fatal(err)
		}
		cutTCP(t, b)
		if err := sanconn.LeaveSAN(b); err != nil {
			t.Fatal(err)
		}
		raw, err := a.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		if err := has(a, raw); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%s: %v", name, err)
		}
		a.SetDeadline(time.Now().Add(patience))
		if n, err := a.Read(make([]byte, 1)); n > 0 || !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("behind %s: read %d, %v", name, n, err)
		}
	}
}
