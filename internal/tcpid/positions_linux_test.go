package tcpid

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
)

// wantPositions fails unless the kernel has the same counts.
func wantPositions(t testing.TB, when string, c *net.TCPConn, written, read int) {
	t.Helper()
	w, r, err := Positions(c)
	if err != nil {
		t.Errorf("%s: %v", when, err)
	} else if w != uint64(written) || r != uint64(read) {
		t.Errorf("%s: %d written and %d read, want %d and %d", when, w, r, written, read)
	}
}

// fill writes until nothing more fits, and returns how many bytes that were. It uses no deadline, which
// might end before the Write has begun.
func fill(t testing.TB, c *net.TCPConn) (n int) {
	t.Helper()
	_, err := control(c, func(fd int) (bool, error) {
		for b := make([]byte, 64<<10); ; {
			m, err := unix.Write(fd, b)
			n += max(m, 0)
			if err == unix.EAGAIN {
				var ready int
				if ready, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, 20); ready == 0 && err == nil {
					return true, nil
				}
			}
			if err != nil && err != unix.EINTR {
				return false, err
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func read(t testing.TB, c *net.TCPConn, n int) {
	t.Helper()
	c.SetReadDeadline(time.Now().Add(limit))
	if _, err := io.CopyN(io.Discard, struct{ io.Reader }{c}, int64(n)); err != nil {
		t.Fatal(err)
	}
}

func TestPositions(t *testing.T) {
	for _, host := range []string{"127.0.0.1", "::1"} {
		d, a := connect(t, listen(t, "tcp", net.JoinHostPort(host, "0")))
		for range 2 { // once the dialer writes, and once it reads
			w, r := d, a
			wantPositions(t, "new, writer", w, 0, 0)
			wantPositions(t, "new, reader", r, 0, 0)
			w.Write([]byte{1})
			read(t, r, 1)
			wantPositions(t, "one byte, writer", w, 1, 0)
			wantPositions(t, "one byte, reader", r, 0, 1)
			n := 1 + fill(t, w)
			wantPositions(t, "full, writer", w, n, 0)
			wantPositions(t, "full, reader", r, 0, 1)
			read(t, r, 77_777)
			wantPositions(t, "some read, reader", r, 0, 1+77_777)
			if err := w.CloseWrite(); err != nil { // the FIN waits after all bytes
				t.Fatal(err)
			}
			wantPositions(t, "closing, writer", w, n, 0)
			wantPositions(t, "closing, reader", r, 0, 1+77_777)
			read(t, r, n-1-77_777-10)
			wantPositions(t, "nearly all read, reader", r, 0, n-10)
			wantPositions(t, "nearly all read, writer", w, n, 0)
			read(t, r, 10)
			wantPositions(t, "all read, reader", r, 0, n)
			if m, err := r.Read(make([]byte, 1)); m != 0 || err != io.EOF {
				t.Fatal(m, err)
			}
			wantPositions(t, "at the end, reader", r, 0, n)
			r.Write([]byte{1, 2, 3})
			wantPositions(t, "half closed, reader", r, 3, n)
			read(t, w, 3)
			wantPositions(t, "half closed, writer", w, n, 3)
			w.Close()
			r.Close()
			if _, _, err := Positions(r); !errors.Is(err, net.ErrClosed) {
				t.Errorf("closed: %v", err)
			}
			a, d = connect(t, listen(t, "tcp", net.JoinHostPort(host, "0")))
		}
	}
}

// The other end does not stop while this end's positions are read.
func TestPositionsUnderTraffic(t *testing.T) {
	d, a := connect(t, listen(t, "tcp", "127.0.0.1:0"))
	sink := make(chan error, 2)
	go func() {
		_, err := io.Copy(io.Discard, struct{ io.Reader }{a})
		sink <- err
	}()
	go func() {
		b := make([]byte, 3000)
		for {
			if _, err := a.Write(b[:1+rand.IntN(len(b))]); err != nil {
				sink <- nil // because d was closed
				return
			}
		}
	}()
	written, done := 0, 0
	for range 2000 {
		n, m := 1+rand.IntN(5000), 1+rand.IntN(5000)
		if _, err := d.Write(make([]byte, n)); err != nil {
			t.Fatal(err)
		}
		read(t, d, m)
		written, done = written+n, done+m
		wantPositions(t, "under traffic", d, written, done)
		if t.Failed() {
			break
		}
	}
	d.Close()
	for range 2 {
		<-sink
	}
}

// Segments that are lost on the way, or dropped by the host itself, are sent again and counted once.
func TestPositionsWithLosses(t *testing.T) {
	for _, hook := range []string{"input", "output"} {
		n := newNamespace(t)
		n.need(t, `
			nft add table inet n
			nft 'add chain inet n c { type filter hook `+hook+` priority 0; }'
			nft 'add rule inet n c meta length > 100 numgen random mod 100 < 20 drop'`)
		n.do(t, func() {
			for _, reverse := range []bool{false, true} {
				w, r := connect(t, listen(t, "tcp", "127.0.0.1:0"))
				if reverse {
					w, r = r, w
				}
				written, done := 0, 0
				for range 20 {
					n := 1 + rand.IntN(100_000)
					if _, err := w.Write(make([]byte, n)); err != nil {
						t.Fatal(err)
					}
					written += n
					if m := rand.IntN(written - done + 1); m > 0 {
						read(t, r, m)
						done += m
					}
					wantPositions(t, hook+": reader", r, 0, done)
					if hook == "output" {
						if got, _, err := Positions(w); err == nil && got != uint64(written) || err != nil && err != errDiffer {
							t.Errorf("output: %d written, %v, want %d or that the counts differ", got, err, written)
						}
						continue
					}
					wantPositions(t, hook+": writer", w, written, 0)
				}
			}
		})
	}
}

func TestPositionsAfterReset(t *testing.T) {
	d, a := connect(t, listen(t, "tcp", "127.0.0.1:0"))
	a.SetLinger(0)
	a.Close()
	if _, _, err := Positions(d); err != ErrNotConnected {
		t.Errorf("reset: %v", err)
	}
}

// A connection is open until a direction is shut, here or for writing at the other end, whatever the
// error queue contains. It sends until it is shut for writing here, or has ended.
func TestIsOpen(t *testing.T) {
	for name, tt := range map[string]struct {
		shut        func(c, peer *net.TCPConn) error
		open, sends bool
	}{
		"nobody":                {func(c, peer *net.TCPConn) error { return nil }, true, true},
		"for reading":           {func(c, peer *net.TCPConn) error { return c.CloseRead() }, false, true},
		"for writing":           {func(c, peer *net.TCPConn) error { return c.CloseWrite() }, false, false},
		"the peer, for writing": {func(c, peer *net.TCPConn) error { return peer.CloseWrite() }, false, true},
		"the peer, for reading": {func(c, peer *net.TCPConn) error { return peer.CloseRead() }, true, true},
		"a time in the error queue": {func(c, peer *net.TCPConn) error {
			_, err := control(c, func(fd int) (bool, error) {
				return true, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPING, unix.SOF_TIMESTAMPING_TX_SOFTWARE|unix.SOF_TIMESTAMPING_SOFTWARE)
			})
			if err == nil {
				_, err = c.Write([]byte{1})
			}
			control(c, func(fd int) (int, error) { return unix.Poll([]unix.PollFd{{Fd: int32(fd)}}, 60_000) }) // until it is in the queue
			return err
		}, true, true},
		"the peer, by a reset": {func(c, peer *net.TCPConn) error { peer.SetLinger(0); return peer.Close() }, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			c, peer := connect(t, listen(t, "tcp", "127.0.0.1:0"))
			if err := tt.shut(c, peer); err != nil {
				t.Fatal(err)
			}
			testenv.Eventually(t, time.Minute, func() error { // the peer's action takes a while to arrive
				if open, err := IsOpen(c); open != tt.open || err != nil {
					return fmt.Errorf("open: %v, %v", open, err)
				}
				if sends, err := Sends(c); sends != tt.sends || err != nil {
					return fmt.Errorf("sends: %v, %v", sends, err)
				}
				return nil
			})
		})
	}
}

func BenchmarkPositions(b *testing.B) {
	d, _ := connect(b, listen(b, "tcp", "127.0.0.1:0"))
	b.ReportAllocs()
	for b.Loop() {
		if _, _, err := Positions(d); err != nil {
			b.Fatal(err)
		}
	}
}
