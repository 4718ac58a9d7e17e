package verbs

import (
	"testing"
)

func TestFIFO(t *testing.T) {
	q := newFIFO[int](3)
	next := 0
	for i := range 100 {
		q.push(i)
		if q.n == 3 || i%2 == 0 {
			if got := q.pop(); got != next {
				t.Fatalf("%d, want %d", got, next)
			}
			next++
		}
	}
}
