package sanconn_test

import (
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
	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

// cutTCP resets a connection's TCP, as `ss -K` does; the program is not told.
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

// A Write that TCP has failed cuts the stream, also if its direction moves behind it.
func TestAWriteThatFailsBesideAProposal(t *testing.T) {
	for _, end := range []struct {
		name string
		end  func(*sanconn.Conn)
	}{
		{"Close", func(c *sanconn.Conn) { c.Close() }},
		{"CloseWrite", func(c *sanconn.Conn) { c.CloseWrite() }},
		{"Write", func(c *sanconn.Conn) {
			if n, err := c.Write([]byte("behind it")); n > 0 || err == nil {
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
				ea, eb := twin.Pair(twin.Config{})
				taken := make(chan error, 1)
				go func() {
					taken <- connpair.Accept(t.Context(), eb, session.Config{}, func([]byte) *sanconn.Conn {
						cutTCP(t, a)
						if n, err := a.Write(want); n > 0 || err == nil {
							t.Errorf("by TCP that is cut: %d, %v", n, err)
						}
						if before {
							end.end(a)
						}
						return b
					})
				}()
				connpair.Propose(t.Context(), a, ea, session.Config{}, nil)             // fails if a is closed
				if err := <-taken; err != nil && !errors.Is(err, connpair.ErrRefused) { // as a is closed
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

// A Write's error is TCP's end if TCP has ended: the file of a copy may fail with the same one.
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
