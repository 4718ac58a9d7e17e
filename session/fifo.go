package session

// fifo is a queue of things in progress, oldest first.
type fifo[T any] struct {
	items []T
	head  int
}

func (q *fifo[T]) push(v T) {
	if q.head > 0 && 2*q.head >= len(q.items) { // at least half of it is unused
		n := copy(q.items, q.items[q.head:])
		clear(q.items[n:]) // so that nothing is kept alive
		q.items, q.head = q.items[:n], 0
	}
	q.items = append(q.items, v)
}

// pop removes the oldest element; ok is false if there is none.
func (q *fifo[T]) pop() (v T, ok bool) {
	if q.head == len(q.items) {
		return v, false
	}
	at := &q.items[q.head]
	q.head++
	v, *at = *at, v
	return v, true
}

func (q *fifo[T]) len() int { return len(q.items) - q.head }
