package san

import (
	"bytes"
	"crypto/sha256"
	"hash"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"
)

// streamEnd sends and receives a random stream, and keeps checksums.
type streamEnd struct {
	conn          net.Conn
	seed          uint64
	sent, arrived hash.Hash
	got           int64
}

// both sends and receives at the same time.
func (e *streamEnd) both(t testing.TB, total int64) {
	var wg sync.WaitGroup
	wg.Go(func() { e.send(t, total) })
	wg.Go(func() { e.receive(t) })
	wg.Wait()
}

func (e *streamEnd) send(t testing.TB, total int64) {
	e.sent = sha256.New()
	rnd := rand.New(rand.NewPCG(e.seed, 0))
	src := randomBytes(8 << 20)
	for total > 0 {
		e.conn.SetWriteDeadline(time.Now().Add(testTimeout))
		n := int(min(total, randomSize(rnd)))
		from := rnd.IntN(len(src) - n + 1)
		b := bytes.Clone(src[from : from+n])
		e.sent.Write(b)
		m, err := e.conn.Write(b)
		if m != n || err != nil {
			t.Errorf("wrote %d of %d: %v", m, n, err)
			return
		}
		clear(b) // Write must not use it any more
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
		e.conn.SetReadDeadline(time.Now().Add(testTimeout))
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

func (e *streamEnd) sum() []byte { return e.sent.Sum(nil) }

func (e *streamEnd) gotSum() []byte { return e.arrived.Sum(nil) }

// randomSize returns a size from 1 B to 8 MiB. Each power of two is as likely as the next.
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

// pattern is repeated along a stream, so that a byte shows where it belongs. Its length has no factor in
// common with the size of any buffer.
var pattern = randomBytes(1<<20 - 3)

// position fills b with the part of the stream that begins at from.
func position(b []byte, from int) {
	for len(b) > 0 {
		n := copy(b, pattern[from%len(pattern):])
		b, from = b[n:], from+n
	}
}

// misplaced compares b with the part of the stream that begins at from. It returns the index of the
// first byte that differs, or -1.
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

// wantPositions checks that b is the part of the stream that begins at from.
func wantPositions(t testing.TB, b []byte, from int) {
	t.Helper()
	if i := misplaced(b, from); i >= 0 {
		t.Fatalf("byte %d of the stream is not what was written there", i)
	}
}
