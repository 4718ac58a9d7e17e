package san

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/nettest"
)

func TestConformance(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
			c1, c2 = l.pipe(t)
			return c1, c2, func() {
				c1.Close()
				c2.Close()
			}, nil
		})
	})
}

func TestBothEndsAgreeOnAddresses(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		for _, c := range []struct{ listen, dial string }{
			{"127.0.0.1:0", "127.0.0.1"},
			{"[::1]:0", "::1"},
			{"0.0.0.0:0", "127.0.0.1"},
			{":0", "127.0.0.1"},
			{":0", "::1"},
			{":0", "localhost"},
			{":0", ""},
			{net.JoinHostPort(l.host, "0"), l.host},
			{":0", l.host},
		} {
			if (l.host == "") != (c.dial != l.host || c.dial == "") {
				continue
			}
			t.Run(c.listen+" from "+c.dial, func(t *testing.T) {
				ln := l.listen(t, c.listen)
				client := mustDial(t, l.dialer(), net.JoinHostPort(c.dial, portOf(ln.Addr().String())))
				wantProvider(t, client, l.provider)
				server := mustAccept(t, ln)
				for _, a := range []net.Addr{client.LocalAddr(), client.RemoteAddr(), server.LocalAddr(), server.RemoteAddr()} {
					if _, ok := a.(*net.TCPAddr); !ok || a.Network() != "tcp" {
						t.Fatalf("%v is a %T of network %s", a, a, a.Network())
					}
				}
				if client.LocalAddr().String() != server.RemoteAddr().String() {
					t.Errorf("the dialer is %v to itself and %v to the acceptor", client.LocalAddr(), server.RemoteAddr())
				}
				if client.RemoteAddr().String() != server.LocalAddr().String() {
					t.Errorf("the acceptor is %v to itself and %v to the dialer", server.LocalAddr(), client.RemoteAddr())
				}
			})
		}
	})
}

func TestAddressesAreUnique(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		ln := l.listen(t, l.here())
		seen := make(map[string]bool)
		for range amount(100, 20) {
			mustDial(t, l.dialer(), ln.Addr().String())
			a := mustAccept(t, ln).RemoteAddr().String()
			if seen[a] {
				t.Fatalf("%s twice", a)
			}
			seen[a] = true
		}
	})
}

func TestBothWriteBeforeEitherReads(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		client, server := l.pipe(t)
		data := randomBytes(256 << 10)
		client.SetDeadline(time.Now().Add(patience))
		server.SetDeadline(time.Now().Add(patience))
		var wg sync.WaitGroup
		for _, c := range []net.Conn{client, server} {
			wg.Go(func() {
				if n, err := c.Write(data); n != len(data) || err != nil {
					t.Errorf("wrote %d of %d: %v", n, len(data), err)
				}
			})
		}
		wg.Wait()
		for _, c := range []net.Conn{client, server} {
			got := make([]byte, len(data))
			if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, data) {
				t.Errorf("read: %v, equal: %v", err, bytes.Equal(got, data))
			}
		}
	})
}

// Without a reader, a writer is stopped at a bound that does not depend on how much it wants
// to write.
func TestSlowReaderBoundsMemory(t *testing.T) {
	const most = 32 << 20
	eachLane(t, func(t *testing.T, l lane) {
		client, server := l.pipe(t)
		var wg sync.WaitGroup
		for _, c := range []net.Conn{client, server} {
			c.SetWriteDeadline(time.Now().Add(300 * time.Millisecond))
			wg.Go(func() {
				var total int
				for chunk := randomBytes(1 << 20); ; {
					n, err := c.Write(chunk)
					total += n
					if errors.Is(err, os.ErrDeadlineExceeded) {
						break
					}
					if err != nil || total > most {
						t.Errorf("%d bytes taken though nobody reads: %v", total, err)
						break
					}
				}
			})
		}
		wg.Wait()
	})
}

func TestEverySizeArrivesUnchanged(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		for _, pair := range []struct{ write, read int }{{1, 1}, {64, 64}, {4096, 32 << 10}, {64 << 10, 100}, {1 << 20, 64 << 10}, {8 << 20, 8 << 20}, {3 << 20, 1 << 20}} {
			t.Run(fmt.Sprintf("%d into %d", pair.write, pair.read), func(t *testing.T) {
				client, server := l.pipe(t)
				client.SetDeadline(time.Now().Add(patience))
				server.SetDeadline(time.Now().Add(patience))
				total := max(pair.write, 1000)
				data := randomBytes(total)
				var wg sync.WaitGroup
				wg.Go(func() {
					for rest := data; len(rest) > 0; {
						n, err := client.Write(rest[:min(pair.write, len(rest))])
						if err != nil {
							t.Error(err)
							return
						}
						rest = rest[n:]
					}
					if err := client.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
						t.Error(err)
					}
				})
				var got []byte
				for buf := make([]byte, pair.read); ; {
					n, err := server.Read(buf)
					got = append(got, buf[:n]...)
					if err == io.EOF {
						break
					}
					if err != nil {
						t.Fatal(err)
					}
				}
				wg.Wait()
				if !bytes.Equal(got, data) {
					t.Errorf("%d bytes arrived of %d, equal: %v", len(got), len(data), false)
				}
			})
		}
	})
}

// Both ways at once, sizes at random, one checksum each way.
func TestRandomStream(t *testing.T) {
	total := int64(64 << 20)
	if testing.Short() {
		total = 8 << 20
	}
	eachLane(t, func(t *testing.T, l lane) {
		client, server := l.pipe(t)
		var wg sync.WaitGroup
		ends := []*streamEnd{{conn: client, seed: 1}, {conn: server, seed: 2}}
		for _, e := range ends {
			wg.Go(func() { e.send(t, total) })
			wg.Go(func() { e.receive(t) })
		}
		wg.Wait()
		for i, e := range ends {
			if other := ends[1-i]; !bytes.Equal(e.sum(), other.gotSum()) {
				t.Errorf("end %d sent %d bytes, %d arrived, checksums differ", i, total, other.got)
			}
		}
	})
}

// A few bytes alternate with a few thousand, in memory that is reused at once, as under TLS.
// Each byte arrives where it belongs.
func TestSmallWritesAmongLarger(t *testing.T) {
	const small, larger = 60, 17_000
	total := int(amount[int64](64<<20, 12<<20))
	if testing.Short() {
		total /= 2
	}
	eachLane(t, func(t *testing.T, l lane) {
		client, server := l.pipe(t)
		send := func(c net.Conn, seed uint64) {
			rnd := rand.New(rand.NewPCG(seed, 0))
			var bufs [3][larger]byte
			for at := 0; at < total; {
				most := larger
				if rnd.IntN(3) == 0 {
					most = small
				}
				b := bufs[rnd.IntN(len(bufs))][:min(1+rnd.IntN(most), total-at)]
				position(b, at)
				c.SetWriteDeadline(time.Now().Add(patience))
				if n, err := c.Write(b); n != len(b) || err != nil {
					t.Errorf("wrote %d of %d at %d: %v", n, len(b), at, err)
					return
				}
				at += len(b)
			}
		}
		receive := func(c net.Conn, seed uint64) {
			rnd := rand.New(rand.NewPCG(seed, 1))
			buf := make([]byte, 2*larger)
			for at := 0; at < total; {
				from := rnd.IntN(larger)
				b := buf[from : from+1+rnd.IntN(len(buf)-from)]
				c.SetReadDeadline(time.Now().Add(patience))
				n, err := c.Read(b)
				if i := misplaced(b[:n], at); i >= 0 {
					t.Errorf("byte %d is not what was written there; a Read of %d gave %d at %d", i, len(b), n, at)
					return
				}
				if at += n; err != nil && at < total {
					t.Errorf("after %d bytes: %v", at, err)
					return
				}
			}
		}
		var wg sync.WaitGroup
		wg.Go(func() { send(client, 1) })
		wg.Go(func() { send(server, 2) })
		wg.Go(func() { receive(client, 2) })
		wg.Go(func() { receive(server, 1) })
		wg.Wait()
	})
}

// streamEnd sends and receives a random stream and remembers checksums.
type streamEnd struct {
	conn          net.Conn
	seed          uint64
	sent, arrived hash.Hash
	got           int64
}

func (e *streamEnd) send(t testing.TB, total int64) {
	e.sent = sha256.New()
	rnd := rand.New(rand.NewPCG(e.seed, 0))
	src := randomBytes(8 << 20)
	for total > 0 {
		e.conn.SetWriteDeadline(time.Now().Add(patience))
		n := int(min(total, randomSize(rnd)))
		from := rnd.IntN(len(src) - n + 1)
		b := bytes.Clone(src[from : from+n])
		e.sent.Write(b)
		m, err := e.conn.Write(b)
		if m != n || err != nil {
			t.Errorf("wrote %d of %d: %v", m, n, err)
			return
		}
		clear(b) // it is ours again
		total -= int64(n)
	}
	if err := e.conn.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		t.Error(err)
	}
}

func (e *streamEnd) receive(t testing.TB) {
	e.arrived = sha256.New()
	rnd := rand.New(rand.NewPCG(e.seed, 1))
	for {
		e.conn.SetReadDeadline(time.Now().Add(patience))
		b := make([]byte, randomSize(rnd))
		n, err := e.conn.Read(b)
		e.arrived.Write(b[:n])
		e.got += int64(n)
		if err == io.EOF {
			return
		}
		if err != nil {
			t.Errorf("after %d bytes: %v", e.got, err)
			return
		}
	}
}

func (e *streamEnd) sum() []byte    { return e.sent.Sum(nil) }
func (e *streamEnd) gotSum() []byte { return e.arrived.Sum(nil) }

// randomSize is 1 B to 8 MiB, each power of two as likely as the next.
func randomSize(rnd *rand.Rand) int64 {
	limit := int64(1) << rnd.IntN(24)
	return limit + rnd.Int64N(min(limit, 8<<20-limit)+1)
}

func randomBytes(n int) []byte {
	b := make([]byte, n)
	src := rand.NewChaCha8([32]byte{byte(n)})
	src.Read(b)
	return b
}

// pattern is repeated along a stream, so that a byte tells where it belongs.
// Its length has no factor in common with any buffer's.
var pattern = randomBytes(1<<20 - 3)

// position fills b with the stream's part that begins at from.
func position(b []byte, from int) {
	for len(b) > 0 {
		n := copy(b, pattern[from%len(pattern):])
		b, from = b[n:], from+n
	}
}

// misplaced finds the first byte of b that does not belong there, when b is
// the stream's part that begins at from; -1: there is none.
func misplaced(b []byte, from int) int {
	for at := from; len(b) > 0; {
		want := pattern[at%len(pattern):]
		n := min(len(b), len(want))
		if !bytes.Equal(b[:n], want[:n]) {
			for i := range n {
				if b[i] != want[i] {
					return at + i
				}
			}
		}
		b, at = b[n:], at+n
	}
	return -1
}

// wantPositions checks that b is the stream's part that begins at from.
func wantPositions(t testing.TB, b []byte, from int) {
	t.Helper()
	if i := misplaced(b, from); i >= 0 {
		t.Fatalf("byte %d of the stream is not what was written there", i)
	}
}

// A deadline passes in the middle of a large Write: the count is exact, the slice is not
// read any more, and the stream continues from there.
func TestWriteDeadlineInTheMiddle(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		for _, taken := range []int{0, 1, 100 << 10, 3 << 20} {
			t.Run(fmt.Sprintf("%d read", taken), func(t *testing.T) {
				client, server := l.pipe(t)
				server.SetReadDeadline(time.Now().Add(patience))
				data := make([]byte, 64<<20)
				position(data, 0)

				head := make([]byte, taken)
				var wg sync.WaitGroup
				wg.Go(func() {
					if _, err := io.ReadFull(server, head); err != nil {
						t.Error(err)
					}
					client.SetWriteDeadline(time.Now().Add(20 * time.Millisecond))
				})
				n, err := client.Write(data)
				wantOpError(t, err, "write", os.ErrDeadlineExceeded)
				if n < 0 || n >= len(data) {
					t.Fatalf("wrote %d of %d", n, len(data))
				}
				clear(data)
				wg.Wait()
				client.SetWriteDeadline(time.Now().Add(patience))
				if t.Failed() {
					return
				}
				wantPositions(t, head, 0)

				more := make([]byte, 1<<20)
				position(more, n)
				wg.Go(func() {
					if _, err := client.Write(more); err != nil {
						t.Error(err)
					}
					client.Close()
				})
				rest, err := io.ReadAll(server)
				wg.Wait()
				if err != nil {
					t.Fatal(err)
				}
				wantPositions(t, rest, taken)
				if got := taken + len(rest); got != n+len(more) {
					t.Errorf("%d bytes arrived, %d were written", got, n+len(more))
				}
			})
		}
	})
}

// Many deadlines, at any moment of a transfer.
func TestWriteDeadlineAtAnyMoment(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		client, server := l.pipe(t)
		server.SetReadDeadline(time.Now().Add(2 * patience))
		var wg sync.WaitGroup
		var got int
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(7, 7))
			buf := make([]byte, 2<<20)
			for {
				b := buf[:1+rnd.IntN(len(buf))]
				n, err := server.Read(b)
				if i := misplaced(b[:n], got); i >= 0 {
					t.Errorf("byte %d of the stream is not what was written there", i)
					server.Close()
					return
				}
				got += n
				if err == io.EOF {
					return
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
		rnd := rand.New(rand.NewPCG(8, 8))
		sent := 0
		for range 200 {
			data := make([]byte, 1+rnd.IntN(4<<20))
			position(data, sent)
			client.SetWriteDeadline(time.Now().Add(time.Duration(rnd.IntN(1000)) * time.Microsecond))
			n, err := client.Write(data)
			clear(data)
			sent += n
			if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatal(err)
			}
		}
		client.Close()
		wg.Wait()
		if got != sent {
			t.Errorf("%d bytes arrived, %d were written", got, sent)
		}
	})
}

// After a Read has returned, nothing that arrives goes into its slice.
func TestReadDeadlineLeavesTheSliceAlone(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		client, server := l.pipe(t)
		var sent int
		for i := range 100 {
			b := make([]byte, 4<<20)
			server.SetReadDeadline(time.Now().Add(time.Duration(i*10) * time.Microsecond))
			n, err := server.Read(b)
			if err != nil {
				wantOpError(t, err, "read", os.ErrDeadlineExceeded)
			}
			clear(b)
			data := make([]byte, 300<<10)
			position(data, sent)
			client.SetWriteDeadline(time.Now().Add(patience))
			if _, err := client.Write(data); err != nil {
				t.Fatal(err)
			}
			server.SetReadDeadline(time.Now().Add(patience))
			got := make([]byte, len(data))
			if _, err := io.ReadFull(server, got); err != nil {
				t.Fatal(err)
			}
			wantPositions(t, got, sent)
			sent += len(data)
			if n != 0 || len(bytes.Trim(b, "\x00")) != 0 {
				t.Fatalf("round %d: the Read that had returned %d bytes found more", i, n)
			}
		}
	})
}

// Close in the middle of a large Write.
func TestCloseInTheMiddle(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		for _, who := range []string{"writer", "reader"} {
			t.Run("by the "+who, func(t *testing.T) {
				client, server := l.pipe(t)
				data := make([]byte, 64<<20)
				position(data, 0)
				started := make(chan struct{})
				type result struct {
					n   int
					err error
				}
				wrote := make(chan result, 1)
				go func() {
					n, err := client.Write(data)
					clear(data)
					wrote <- result{n, err}
				}()
				got := make([]byte, 0, 4<<20)
				server.SetReadDeadline(time.Now().Add(patience))
				for len(got) < 2<<20 {
					n, err := server.Read(got[len(got):cap(got)])
					if err != nil {
						t.Fatal(err)
					}
					got = got[:len(got)+n]
				}
				close(started)
				if who == "writer" {
					client.Close()
				} else {
					server.Close()
				}
				select {
				case r := <-wrote:
					if r.err == nil {
						t.Error("Write succeeded")
					}
					if who == "writer" {
						wantOpError(t, r.err, "write", net.ErrClosed)
						rest, _ := io.ReadAll(server)
						got = append(got, rest...)
						if len(got) > r.n {
							t.Errorf("%d bytes arrived, %d were written", len(got), r.n)
						}
					} else if !isPeerGone(r.err) {
						t.Errorf("error %v, want EPIPE or ECONNRESET", r.err)
					}
				case <-time.After(patience):
					t.Fatal("Write does not return")
				}
				wantPositions(t, got, 0)
			})
		}
	})
}

// isPeerGone reports whether a Write failed because the peer does not read any more.
func isPeerGone(err error) bool {
	return errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET)
}

func TestHalfClose(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		client, server := l.pipe(t)
		type halfCloser interface {
			CloseRead() error
			CloseWrite() error
		}
		say(t, client, server, "request")
		if err := client.(halfCloser).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		server.SetDeadline(time.Now().Add(patience))
		if n, err := server.Read(make([]byte, 1)); n != 0 || err != io.EOF {
			t.Errorf("read %d, %v after the peer's CloseWrite", n, err)
		}
		say(t, server, client, "the answer still comes")
		_, err := client.Write([]byte("x"))
		wantOpError(t, err, "write", syscall.EPIPE)
		if err := client.(halfCloser).CloseRead(); err != nil {
			t.Fatal(err)
		}
		if n, err := client.Read(make([]byte, 1)); n != 0 || err != io.EOF {
			t.Errorf("read %d, %v after CloseRead", n, err)
		}
	})
}

func TestCloseWriteAfterThePeerHasClosed(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		for _, read := range []bool{true, false} {
			client, server := l.pipe(t)
			say(t, server, client, "all there is")
			server.Close()
			client.SetDeadline(time.Now().Add(patience))
			if read {
				if n, err := client.Read(make([]byte, 1)); n != 0 || err != io.EOF {
					t.Errorf("read %d, %v", n, err)
				}
			}
			if err := client.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
				t.Errorf("CloseWrite: %v (read to the end: %v)", err, read)
			}
		}
	})
}

func TestCloseWithUnreadDataIsAReset(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		client, server := l.pipe(t)
		say(t, client, server, "seen")
		if _, err := io.WriteString(client, "not seen"); err != nil {
			t.Fatal(err)
		}
		one := make([]byte, 1)
		server.SetDeadline(time.Now().Add(patience))
		if _, err := io.ReadFull(server, one); err != nil { // it has arrived
			t.Fatal(err)
		}
		server.Close()
		client.SetDeadline(time.Now().Add(patience))
		_, err := client.Read(one)
		wantOpError(t, err, "read", syscall.ECONNRESET)
	})
}

func TestLingerZeroIsAReset(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		client, server := l.pipe(t)
		if err := client.(interface{ SetLinger(int) error }).SetLinger(0); err != nil {
			t.Fatal(err)
		}
		client.Close()
		server.SetDeadline(time.Now().Add(patience))
		_, err := server.Read(make([]byte, 1))
		wantOpError(t, err, "read", syscall.ECONNRESET)
	})
}

func TestWriteToAPeerThatClosedEnds(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		client, server := l.pipe(t)
		server.Close()
		client.SetDeadline(time.Now().Add(patience))
		for {
			if _, err := client.Write(make([]byte, 1000)); err != nil {
				if !isPeerGone(err) {
					t.Errorf("error %v", err)
				}
				return
			}
		}
	})
}

func TestClosedConnSaysSo(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		client, _ := l.pipe(t)
		tcp, _ := net.Dial("tcp", plainListen(t, "127.0.0.1:0").Addr().String())
		tcp.Close()
		client.Close()
		calls := map[string]func(c net.Conn) error{
			"read":             func(c net.Conn) error { _, err := c.Read(make([]byte, 1)); return err },
			"write":            func(c net.Conn) error { _, err := c.Write(make([]byte, 1)); return err },
			"read of nothing":  func(c net.Conn) error { _, err := c.Read(nil); return err },
			"write of nothing": func(c net.Conn) error { _, err := c.Write(nil); return err },
			"deadline":         func(c net.Conn) error { return c.SetDeadline(time.Now()) },
			"read deadline":    func(c net.Conn) error { return c.SetReadDeadline(time.Now()) },
			"write deadline":   func(c net.Conn) error { return c.SetWriteDeadline(time.Now()) },
			"close":            func(c net.Conn) error { return c.Close() },
			"closewrite":       func(c net.Conn) error { return c.(interface{ CloseWrite() error }).CloseWrite() },
			"closeread":        func(c net.Conn) error { return c.(interface{ CloseRead() error }).CloseRead() },
			"nodelay":          func(c net.Conn) error { return c.(interface{ SetNoDelay(bool) error }).SetNoDelay(true) },
			"linger":           func(c net.Conn) error { return c.(interface{ SetLinger(int) error }).SetLinger(1) },
			"keepalive": func(c net.Conn) error {
				return c.(interface{ SetKeepAlivePeriod(time.Duration) error }).SetKeepAlivePeriod(time.Second)
			},
		}
		for name, call := range calls {
			var want, got *net.OpError
			if !errors.As(call(tcp), &want) || !errors.As(call(client), &got) {
				t.Errorf("%s: no OpError", name)
				continue
			}
			if got.Op != want.Op || got.Net != want.Net || !errors.Is(got, net.ErrClosed) ||
				(got.Source == nil) != (want.Source == nil) || (got.Addr == nil) != (want.Addr == nil) {
				t.Errorf("%s: %#v, want %#v", name, got, want)
			}
		}
	})
}

func TestDeadlineInThePastBeatsReadyData(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		client, server := l.pipe(t)
		say(t, client, server, "hello")
		if _, err := io.WriteString(client, "ready"); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(server, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		past := time.Now().Add(-time.Second)
		server.SetDeadline(past)
		n, err := server.Read(make([]byte, 10))
		if oe := wantOpError(t, err, "read", os.ErrDeadlineExceeded); n != 0 || !oe.Timeout() ||
			oe.Source.String() != server.LocalAddr().String() || oe.Addr.String() != server.RemoteAddr().String() {
			t.Errorf("read %d, %+v", n, oe)
		}
		for _, b := range [][]byte{nil, make([]byte, 10)} {
			n, err = server.Write(b)
			if wantOpError(t, err, "write", os.ErrDeadlineExceeded); n != 0 {
				t.Errorf("wrote %d of %d", n, len(b))
			}
		}
		server.SetDeadline(time.Time{})
		if n, err := server.Read(make([]byte, 10)); n != 4 || err != nil {
			t.Errorf("afterwards: read %d, %v", n, err)
		}
		if err := server.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		server.SetDeadline(past) // it beats the end of the stream too
		_, err = server.Write(make([]byte, 10))
		wantOpError(t, err, "write", os.ErrDeadlineExceeded)
	})
}

func TestNothingIsReadAndWritten(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		client, server := l.pipe(t)
		for _, b := range [][]byte{nil, {}} {
			if n, err := client.Write(b); n != 0 || err != nil {
				t.Errorf("wrote %d, %v", n, err)
			}
			if n, err := server.Read(b); n != 0 || err != nil { // does not wait
				t.Errorf("read %d, %v", n, err)
			}
		}
		say(t, client, server, "something")
	})
}

func TestConcurrentWritesAreNotMixed(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		client, server := l.pipe(t)
		const writers, size, rounds = 8, 100_003, 20
		client.SetDeadline(time.Now().Add(patience))
		server.SetDeadline(time.Now().Add(patience))
		var wg sync.WaitGroup
		for w := range writers {
			wg.Go(func() {
				b := bytes.Repeat([]byte{byte(w)}, size)
				for range rounds {
					if _, err := client.Write(b); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		b := make([]byte, size)
		for range writers * rounds {
			if _, err := io.ReadFull(server, b); err != nil {
				t.Fatal(err)
			}
			if len(bytes.Trim(b, string(b[:1]))) != 0 {
				t.Fatal("two Writes are mixed")
			}
		}
		wg.Wait()
	})
}

// io.Copy uses ReadFrom at one end and WriteTo at the other; neither calls io.Copy again.
func TestCopyOfAFileBothWays(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		client, server := l.pipe(t)
		client.SetDeadline(time.Now().Add(patience))
		server.SetDeadline(time.Now().Add(patience))
		data := randomBytes(5<<20 + 17)
		path := t.TempDir() + "/data"
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for _, c := range []net.Conn{client, server} {
			wg.Go(func() {
				f, err := os.Open(path)
				if err != nil {
					t.Error(err)
					return
				}
				defer f.Close()
				if n, err := io.Copy(c, f); n != int64(len(data)) || err != nil {
					t.Errorf("copied %d of %d: %v", n, len(data), err)
				}
				c.(interface{ CloseWrite() error }).CloseWrite()
			})
			wg.Go(func() {
				var got bytes.Buffer
				if n, err := io.Copy(&got, c); n != int64(len(data)) || err != nil || !bytes.Equal(got.Bytes(), data) {
					t.Errorf("received %d of %d: %v", n, len(data), err)
				}
			})
		}
		wg.Wait()
	})
}

func TestCopyNStopsAtTheLimit(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		client, server := l.pipe(t)
		src := bytes.NewReader(randomBytes(300 << 10))
		for _, n := range []int64{0, 1, 70 << 10, 200 << 10} {
			client.SetDeadline(time.Now().Add(patience))
			server.SetDeadline(time.Now().Add(patience))
			if got, err := io.Copy(client, io.LimitReader(src, n)); got != n || err != nil {
				t.Errorf("copied %d of %d: %v", got, n, err)
			}
			if got, err := io.CopyN(io.Discard, server, n); got != n || err != nil {
				t.Errorf("received %d of %d: %v", got, n, err)
			}
		}
	})
}

// From one connection into another, as a proxy does.
func TestCopyFromConnToConn(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		client, front := l.pipe(t)
		back, server := l.pipe(t)
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, err := io.Copy(back, front); err != nil {
				t.Error(err)
			}
			back.(interface{ CloseWrite() error }).CloseWrite()
		})
		data := randomBytes(3 << 20)
		wg.Go(func() {
			client.Write(data)
			client.(interface{ CloseWrite() error }).CloseWrite()
		})
		server.SetDeadline(time.Now().Add(patience))
		got, err := io.ReadAll(server)
		wg.Wait()
		if err != nil || !bytes.Equal(got, data) {
			t.Errorf("%d of %d bytes came through: %v", len(got), len(data), err)
		}
	})
}

// A connection that blocks is not affected by another dial's context, a forked child or the
// garbage collector.
func TestConnSurvivesExec(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		client, server := l.pipe(t)
		for range 3 {
			if err := runTrue(context.Background()); err != nil {
				t.Fatal(err)
			}
			say(t, client, server, "before, after")
			say(t, server, client, "and back")
		}
	})
}
