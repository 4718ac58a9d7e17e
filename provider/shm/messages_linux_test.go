package shm

import (
	"bytes"
	"math/rand"
	"testing"

	"github.com/sanconn/san/provider/shm/internal/ring"
	"github.com/sanconn/san/session"
)

func TestMessagesArriveWholeOnceAndInOrder(t *testing.T) {
	for _, tc := range []struct {
		name   string
		sizes  func(*rand.Rand) int
		count  int
		keep   int // how many messages the reader keeps
		config Config
	}{
		{"tiny", func(*rand.Rand) int { return 8 }, 200000, 0, Config{}},
		{"largest", func(*rand.Rand) int { return ring.MaxMessage }, 2000, 0, Config{}},
		{"mixed", func(r *rand.Rand) int { return 1 + r.Intn(1<<r.Intn(17)) }, 20000, 0, Config{}},
		{"mixed, kept", func(r *rand.Rand) int { return 1 + r.Intn(1<<r.Intn(16)) }, 20000, 5, Config{}},
		{"smallest ring", func(r *rand.Rand) int { return 1 + r.Intn(ring.MaxMessage) }, 5000, 0, Config{ringMax: minRingMax}},
		{"largest ring", func(r *rand.Rand) int { return 1 + r.Intn(ring.MaxMessage) }, 5000, 1, Config{ringMax: maxRingMax}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a, b := pair(t, tc.config)
			sender := make(chan struct{})
			defer func() { <-sender }()
			go func() {
				defer close(sender)
				sendSizes(a, tc.count, tc.sizes)
			}()
			receiveSizes(t, b, tc.count, tc.keep, tc.sizes)
		})
	}
}

// sendSizes sends messages of random sizes, some of them as control messages.
func sendSizes(a *peer, count int, sizes func(*rand.Rand) int) {
	r := rand.New(rand.NewSource(1))
	for i := range count {
		n := sizes(r)
		reserve, commit := func() []byte { return a.reserve(n, n) }, a.Commit
		if i%17 == 0 && n <= session.MaxControl {
			reserve, commit = func() []byte { return a.reserveControl(n) }, a.CommitControl
		}
		buf := reserve()
		if buf == nil {
			return
		}
		pattern(buf, uint64(i))
		commit(n)
	}
}

// receiveSizes checks the messages of sendSizes, and keeps some of them for a while.
func receiveSizes(t *testing.T, b *peer, count, keep int, sizes func(*rand.Rand) int) {
	r := rand.New(rand.NewSource(1))
	want := make([]byte, ring.MaxMessage)
	kept, seen := 0, 0
	check := func(got []byte) {
		t.Helper()
		n := sizes(r)
		pattern(want[:n], uint64(seen))
		if !bytes.Equal(got, want[:n]) {
			t.Fatalf("message %d: %d bytes instead of %d, or wrong ones", seen, len(got), n)
		}
		seen++
	}
	var ev session.Event
	for i := range count {
		if !b.poll(&ev) {
			t.Fatalf("ended after %d messages: %v", i, b.Err())
		}
		if keep == 0 {
			check(ev.Msg)
			b.Drop()
			continue
		}
		if kept > keep {
			for ; kept > 0; kept-- {
				check(b.Front())
				b.Release()
			}
		}
		b.Keep()
		kept++
	}
}
