package regcache

import (
	"bytes"
	"testing"
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
