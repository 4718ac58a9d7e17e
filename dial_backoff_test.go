package san

import (
	"net/netip"
	"testing"
	"time"
)

// blocked reports whether the destination is not to be tried.
func (b *backoff) blocked(k attemptKey, now time.Time) bool { return b.left(k, now) > 0 }

func key(n int) attemptKey {
	return attemptKey{provider: "shm", dst: netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(n))}
}

// wantBackoff checks that the destination is left alone for span, and not for longer. It
// returns the end of that time.
func wantBackoff(t *testing.T, b *backoff, k attemptKey, now time.Time, span time.Duration) time.Time {
	t.Helper()
	end := now.Add(span)
	if !b.blocked(k, end.Add(-1)) {
		t.Errorf("tried again before %v", span)
	}
	if b.blocked(k, end) {
		t.Errorf("not tried again after %v", span)
	}
	return end
}

func TestBackoffDoublesUpToALimit(t *testing.T) {
	var b backoff
	now := time.Now()
	for span := backoffFirst; span < backoffMost; span *= 2 {
		b.timedOut(key(1), now, true)
		b.timedOut(key(1), now.Add(1), true) // a concurrent attempt
		now = wantBackoff(t, &b, key(1), now, span)
	}
	for range 3 {
		b.timedOut(key(1), now, true)
		now = wantBackoff(t, &b, key(1), now, backoffMost)
	}
}

func TestBackoffIsOfOneDestination(t *testing.T) {
	var b backoff
	now := time.Now()
	b.timedOut(key(1), now, true)
	b.timedOut(key(2), now, true)
	if b.blocked(key(3), now) {
		t.Error("a port is left alone because of others of the same host")
	}
	b.answered(key(1))
	if b.blocked(key(1), now) {
		t.Error("left alone after an answer")
	}
	if !b.blocked(key(2), now) {
		t.Error("tried because another port answered")
	}
}

func TestBackoffStartsAgainLongAfter(t *testing.T) {
	var b backoff
	now := time.Now()
	for range 3 {
		b.timedOut(key(1), now, true)
		now = now.Add(backoffMost)
	}
	now = now.Add(backoffMost + 1)
	b.timedOut(key(1), now, true)
	wantBackoff(t, &b, key(1), now, backoffFirst)
}

// An attempt that was cut short makes the span no longer, and no shorter.
func TestBackoffOfAttemptsCutShort(t *testing.T) {
	var b backoff
	now := time.Now()
	for range 3 {
		b.timedOut(key(1), now, false)
		now = wantBackoff(t, &b, key(1), now, backoffFirst)
	}
	for _, span := range []time.Duration{backoffFirst, 2 * backoffFirst, 4 * backoffFirst} {
		b.timedOut(key(1), now, true)
		now = wantBackoff(t, &b, key(1), now, span)
		b.timedOut(key(1), now, false)
		now = wantBackoff(t, &b, key(1), now, backoffFirst)
	}
}

func TestBackoffIsBounded(t *testing.T) {
	var b backoff
	start := time.Now()
	for i := range 3 * maxBackoffs {
		b.timedOut(key(i), start, true)
		if len(b.silent) > maxBackoffs {
			t.Fatalf("%d entries after %d failures", len(b.silent), i+1)
		}
		if !b.blocked(key(i), start) {
			t.Fatalf("failure %d does not count", i)
		}
	}
}
