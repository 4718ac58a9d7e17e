package regcache

import (
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestVerifyPassesWhatIsRight(t *testing.T) {
	c := newCache(t, newNIC(t), Config{Eager: true, Verify: true})
	b := make([]byte, 100_000)
	for from := range 20 {
		release(t, acquire(t, c, b[from*4000:], LocalWrite))
		b[from*4000]++
	}
	if s := c.Stats(); s.Hits == 0 {
		t.Error("no hit, nothing was verified")
	}
}

func TestVerifyPanicsAtAStaleHit(t *testing.T) {
	c := newCache(t, newNIC(t), Config{Eager: true, Verify: true})
	b := mmap(t, mapped)
	stable, err := Declare(b)
	if err != nil {
		t.Fatal(err)
	}
	defer stable.Withdraw()
	release(t, acquire(t, c, b, LocalRead))
	if err := unix.Madvise(b[8192:16384], unix.MADV_DONTNEED); err != nil { // so much for the declaration
		t.Fatal(err)
	}
	b[8192] = 1
	defer func() {
		if p, _ := recover().(string); !strings.Contains(p, "stale registration") {
			t.Errorf("recovered %q, want a panic that says stale registration", p)
		}
	}()
	release(t, acquire(t, c, b[:100], LocalRead)) // another page: still right
	c.Acquire(b, LocalRead)
}
