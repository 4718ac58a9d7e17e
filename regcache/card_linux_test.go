package regcache

import (
	"bytes"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

func TestTheCardReadsWhatWasRegistered(t *testing.T) {
	card := newNIC(t)
	c := newCache(t, card, Config{Eager: true})
	b := make([]byte, 300_000)
	fill(b, 7)
	r := acquire(t, c, b, LocalRead)
	got, err := card.Send(r, b[1000:200_000])
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, b[1000:200_000]) {
		t.Error("the card read other bytes")
	}
	if err := card.Stale(r, b); err != nil {
		t.Error(err)
	}
	release(t, r)
}

// The tests that find no stale registration can fail.
func TestTheCardNoticesReplacedPages(t *testing.T) {
	card := newNIC(t)
	c := newCache(t, card, Config{})
	b := mmap(t, mapped)
	stable, err := Declare(b)
	if err != nil {
		t.Fatal(err)
	}
	defer stable.Withdraw()
	fill(b, 1)
	release(t, acquire(t, c, b, LocalRead))
	page := os.Getpagesize()
	replaced := b[page : 2*page]
	if err := unix.Madvise(replaced, unix.MADV_DONTNEED); err != nil { // against the declaration
		t.Fatal(err)
	}
	fill(replaced, 2)

	r := acquire(t, c, b, LocalRead)
	defer release(t, r)
	if hits := c.Stats().Hits; hits != 1 {
		t.Fatalf("%d hits, want the stale one", hits)
	}
	if err := card.Stale(r, b[:page]); err != nil {
		t.Errorf("a page that was not replaced: %v", err)
	}
	if err := card.Stale(r, b); err == nil {
		t.Error("the replaced page has the frame of the registered one")
	}
	got, err := card.Send(r, replaced)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Equal(got, replaced) {
		t.Error("the card read the new page, which was not registered")
	}
}
