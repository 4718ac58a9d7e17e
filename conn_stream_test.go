package san

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"testing"
	"time"
)

func TestBothWriteBeforeEitherReads(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		client, server := l.pipe(t)
		data := randomBytes(256 << 10)
		client.SetDeadline(time.Now().Add(testTimeout))
		server.SetDeadline(time.Now().Add(testTimeout))
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

// If nobody reads, a writer is stopped at a bound that does not depend on how much it wants to write.
func TestSlowReaderBoundsMemory(t *testing.T) {
	const most = 32 << 20
	eachLane(t, func(t *testing.T, l lane) {
		client, server := l.pipe(t)
		var wg sync.WaitGroup
		for _, c := range []net.Conn{client, server} {
			wg.Go(func() {
				var total int
				// A Write that takes no byte has found no room. One that takes a part has found some.
				for chunk, full := randomBytes(1<<20), false; !full; {
					c.SetWriteDeadline(time.Now().Add(300 * time.Millisecond))
					n, err := c.Write(chunk)
					total += n
					full = n == 0 && errors.Is(err, os.ErrDeadlineExceeded)
					if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) || total > most {
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
				client.SetDeadline(time.Now().Add(testTimeout))
				server.SetDeadline(time.Now().Add(testTimeout))
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

// Both directions at the same time, with random sizes and one checksum for each direction.
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

// Writes of a few bytes alternate with Writes of a few thousand, from memory that is reused at once, as
// under TLS. Each byte arrives in its place.
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
				c.SetWriteDeadline(time.Now().Add(testTimeout))
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
				c.SetReadDeadline(time.Now().Add(testTimeout))
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
