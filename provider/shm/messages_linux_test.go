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
		keep   int // the reader keeps so many messages
		config Config
	}{
		{"tiny", func(*rand.Rand) int { return 8 }, 200000, 0, Config{}},
		{"largest", func(*rand.Rand) int { return ring.MaxMessage }, 2000, 0, Config{}},
		{"mixed", func(r *rand.Rand) int { return 1 + r.Intn(1<<r.Intn(17)) }, 20000, 0, Config{}},
		{"mixed, kept", func(r *rand.Rand) int { return 1 + r.Intn(1<<r.Intn(16)) }, 20000, 5, Config{}},
		{"smallest ring", func(r *rand.Rand) int { return 1 + r.Intn(ring.MaxMessage) }, 5000, 0, Config{RingMax: minRingMax}},
		{"largest ring", func(r *rand.Rand) int { return 1 + r.Intn(ring.MaxMessage) }, 5000, 1, Config{RingMax: maxRingMax}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a, b := pair(t, tc.config)
			sender := make(chan struct{})
			defer func() { <-sender }()
			go func() {
				defer close(sender)
				r := rand.New(rand.NewSource(1))
				for i := range tc.count {
					n := tc.sizes(r)
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
			}()
			r := rand.New(rand.NewSource(1))
			want := make([]byte, ring.MaxMessage)
			check := func(i int, got []byte) {
				t.Helper()
				n := tc.sizes(r)
				pattern(want[:n], uint64(i))
				if !bytes.Equal(got, want[:n]) {
					t.Fatalf("message %d: %d bytes instead of %d, or wrong ones", i, len(got), n)
				}
			}
			kept, seen := 0, 0
			var ev session.Event
			for i := range tc.count {
				if !b.poll(&ev) {
					t.Fatalf("ended after %d messages: %v", i, b.Err())
				}
				if kept > tc.keep || kept == 0 && tc.keep == 0 {
					for ; kept > 0; kept-- {
						check(seen, b.Front())
						b.Release()
						seen++
					}
				}
				if tc.keep == 0 {
					check(seen, ev.Msg)
					b.Drop()
					seen++
				} else {
					b.Keep()
					kept++
				}
			}
		})
	}
}
