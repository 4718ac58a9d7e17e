package backlog

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

// begin wants a place, or an error.
func begin(t *testing.T, b *Backlog, user string, want error) *Place {
	t.Helper()
	p, err := b.Begin(t.Context(), user, time.Hour)
	if err != want {
		t.Fatalf("%s: %v, want %v", user, err, want)
	}
	return p
}

// wantLost checks whether another connection has got a place.
func wantLost(t *testing.T, p *Place, lost bool) {
	t.Helper()
	if got := errors.Is(context.Cause(p.Context()), ErrLost); got != lost || lost != (p.Context().Err() != nil) {
		t.Errorf("lost: %v (%v), want %v", got, p.Context().Err(), lost)
	}
}

// A place that goes to another connection is counted once. A connection that has lost its
// place but succeeds gets one that has become free.
func TestPlaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := New(1)
		for _, free := range []bool{false, true} {
			slow := begin(t, b, "one", nil)
			time.Sleep(Slow)
			second := begin(t, b, "one", nil)
			wantLost(t, slow, true)
			begin(t, b, "one", ErrBusy)
			begin(t, b, "another", ErrBusy)
			wantLost(t, second, false) // it is not slow
			if !second.End(true) {
				t.Error("a connection with a place has none")
			}
			time.Sleep(Slow)
			begin(t, b, "one", ErrFull) // a connection that is ready keeps its place
			if free {
				b.Leave() // accepted
			}
			if slow.End(true) != free {
				t.Errorf("a free place: %v", !free)
			}
			if b.Leave(); b.taken != 0 || len(b.making) != 0 || len(b.users) != 0 {
				t.Errorf("%d places too many, %d are being made, by %v", b.taken, len(b.making), b.users)
			}
		}
	})
}

// A connection that fails has no place afterwards, whether it had lost it or not. Its
// context ends when its time is up, at the latest.
func TestPlacesInVain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := New(1)
		slow := begin(t, b, "one", nil)
		time.Sleep(Slow)
		next, _ := b.Begin(t.Context(), "one", time.Second)
		if slow.End(false) || b.taken != 1 {
			t.Errorf("%d places are taken, want that of the second", b.taken)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if next.Context().Err() == nil {
			t.Error("its time is not up")
		}
		wantLost(t, slow, true)
		if next.End(false) || b.taken != 0 {
			t.Errorf("%d places are taken", b.taken)
		}
	})
}

// One user may take all places. Others take theirs from it, at once and oldest first, until
// none has more than one more than another; ready connections are not counted.
func TestPlacesAreSharedByUser(t *testing.T) {
	b := New(8)
	var hog []*Place
	for range 7 {
		hog = append(hog, begin(t, b, "hog", nil))
	}
	if !begin(t, b, "early", nil).End(true) {
		t.Fatal("no place")
	}
	begin(t, b, "hog", ErrBusy)
	for i := range 3 {
		begin(t, b, "one", nil)
		wantLost(t, hog[i], true)
		wantLost(t, hog[i+1], false)
	}
	begin(t, b, "one", ErrBusy)
	begin(t, b, "another", nil)
	begin(t, b, "another", nil)
	begin(t, b, "another", ErrBusy) // 3, 2 and 2 are as equal as 7 can be
	begin(t, b, "hog", ErrBusy)
	got := fmt.Sprint(b.users)
	if got != "map[another:2 hog:3 one:2]" && got != "map[another:2 hog:2 one:3]" {
		t.Error(got)
	}
}
