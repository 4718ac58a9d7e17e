package regcache

import (
	"errors"
	"sync"
	"syscall"
	"testing"
)

func TestDeclaredRanges(t *testing.T) {
	b := make([]byte, 64<<10)
	stable, err := Declare(b[10_000:20_000])
	if err != nil {
		t.Fatal(err)
	}
	for _, overlapping := range [][]byte{b, b[9_000:10_001], b[19_999:], b[12_000:13_000]} {
		if _, err := Declare(overlapping); !errors.Is(err, syscall.EEXIST) {
			t.Errorf("Declare: %v, want EEXIST", err)
		}
	}
	for name, c := range map[string]struct {
		b    []byte
		want Kind
	}{
		"inside":          {b[10_000:20_000], Declared},
		"across its end":  {b[19_000:20_001], Heap},
		"across its head": {b[9_999:10_001], Heap},
	} {
		if got := KindOf(c.b); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
	if err := stable.Withdraw(); err != nil {
		t.Error(err)
	}
	if got := KindOf(b[10_000:20_000]); got != Heap {
		t.Errorf("withdrawn: %v", got)
	}
	if _, err := Declare(nil); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("Declare(nil): %v", err)
	}
}

// If a declaration is withdrawn while its memory is being registered, no cache keeps it.
func TestARangeWithdrawnDuringItsRegistrationIsNotCached(t *testing.T) {
	d := &fakeDevice{}
	c := newCache(t, d, Config{})
	b := make([]byte, 64<<10)
	stable, err := Declare(b)
	if err != nil {
		t.Fatal(err)
	}
	d.onRegister = func(int) error { return stable.Withdraw() }
	release(t, acquire(t, c, b, LocalRead))
	expectEmpty(t, d)
}

// A range is not valid any more when its memory can be declared again. Otherwise a new region could be
// merged with its regions, whose validator was only the old range.
func TestARangeHasEndedBeforeItsMemoryCanBeDeclaredAgain(t *testing.T) {
	b := make([]byte, 64<<10)
	stable, err := Declare(b)
	if err != nil {
		t.Fatal(err)
	}
	ranges.mu.RLock() // nothing can declare the memory meanwhile
	unlock := sync.OnceFunc(ranges.mu.RUnlock)
	defer unlock()
	withdrawn := make(chan error, 1)
	go func() { withdrawn <- stable.Withdraw() }()
	within(t, func() bool { return !stable.valid() })
	unlock()
	if err := <-withdrawn; err != nil {
		t.Error(err)
	}
}

func TestWithdrawLeavesARegionInUseRegistered(t *testing.T) {
	d := &fakeDevice{}
	c := newCache(t, d, Config{})
	b := make([]byte, 64<<10)
	stable, err := Declare(b)
	if err != nil {
		t.Fatal(err)
	}
	r := acquireAgain(t, c, b, LocalRead)
	if err := stable.Withdraw(); !errors.Is(err, ErrInUse) {
		t.Errorf("Withdraw: %v, want ErrInUse", err)
	}
	if err := d.covers(r.LKey(), b, LocalRead); err != nil {
		t.Error(err)
	}
	release(t, r)
	expectEmpty(t, d)
}
