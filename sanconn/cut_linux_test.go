package sanconn_test

import (
	"context"
	"errors"
	"io"
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

// cutTCP resets a connection's TCP, as `ss -K` does; the program is not told.
func cutTCP(t *testing.T, c *sanconn.Conn) {
	t.Helper()
	raw, err := newconn.HandleOf(c).TCP().SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var errno syscall.Errno
	raw.Control(func(fd uintptr) {
		unspecified := unix.RawSockaddr{Family: unix.AF_UNSPEC}
		_, _, errno = unix.Syscall(unix.SYS_CONNECT, fd, uintptr(unsafe.Pointer(&unspecified)), unix.SizeofSockaddrInet4)
	})
	if errno != 0 {
		t.Fatal(errno)
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

// Which errors of a piece of a copy, or of a Write, cut the stream is up to TCP: a file's own do not, nor
// those that TCP outlives (IP_RECVERR); one that has run out of time has what its packets met.
func TestErrorsThatCut(t *testing.T) {
	for _, cut := range []bool{true, false} {
		for _, errno := range []syscall.Errno{syscall.ENETUNREACH, syscall.EHOSTUNREACH, syscall.ETIMEDOUT, syscall.EIO} {
			a, b, err := newPair(newconn.Config{}, newconn.Config{})
			if err != nil {
				t.Fatal(err)
			}
			closeAtEnd(t, a, b)
			if cut {
				cutTCP(t, a)
			}
			if err := sanconn.PutPiece(a, func() (int64, error) { return 0, errno }); err != errno {
				t.Fatal(err)
			}
			ea, eb := twin.Pair(twin.Config{})
			if err := movePair(t.Context(), a, b, ea, eb, sessions{}); err != nil {
				t.Fatal(err)
			}
			if _, err := a.Write([]byte{1}); (err != nil) != cut {
				t.Errorf("%v, cut %v: Write: %v", errno, cut, err)
			}
			b.SetDeadline(time.Now().Add(patience))
			if n, err := b.Read(make([]byte, 10)); cut && !errors.Is(err, syscall.ECONNRESET) || !cut && (n != 1 || b.Provider() == "tcp") {
				t.Errorf("%v, cut %v: by %s the peer reads %d, %v", errno, cut, b.Provider(), n, err)
			}
		}
	}
}

// So does what came back from a session and TCP does not take.
func TestWhatCameBackIsCut(t *testing.T) {
	a, b := pipe(t, session.Limits{}, nil)
	if _, err := a.Write([]byte("returned")); err != nil {
		t.Fatal(err)
	}
	cutTCP(t, a)
	if err := sanconn.LeaveSAN(b); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, patience, func() error {
		if sanconn.Leaving(a) {
			return errors.New("it has not left")
		}
		return nil
	})
	sanconn.Expect(b, 0) // as behind Control
	ea, eb := twin.Pair(twin.Config{})
	if err := movePair(t.Context(), a, b, ea, eb, sessions{}); err != nil {
		t.Fatal(err)
	}
	if n, err := a.Write([]byte("behind it")); n > 0 || !errors.Is(err, syscall.EPIPE) {
		t.Errorf("Write: %d, %v", n, err)
	}
	b.SetDeadline(time.Now().Add(patience))
	if n, err := b.Read(make([]byte, 10)); n > 0 || !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the peer reads %d, %v", n, err)
	}
}
