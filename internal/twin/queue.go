package twin

import "time"

// event is something that happens at an end at a time.
type event struct {
	at   time.Duration
	seq  uint64 // in order of scheduling where times are equal
	end  *Endpoint
	kind eventKind
	msg  *message
	op   *operation
	err  error
}

type eventKind uint8

const (
	arrive  eventKind = iota + 1 // msg arrives at end
	sent                         // end's send queue has one place more
	hasRoom                      // end may have room
	notBusy                      // end's queue seems full no more
	piece                        // some of end's op has moved
	done                         // end's op completes
	fin                          // end learns how the peer ended
	stray                        // end is woken for nothing
)

// events is a heap by time.
type events []event

func (h events) less(i, j int) bool {
	return h[i].at < h[j].at || h[i].at == h[j].at && h[i].seq < h[j].seq
}

func (h *events) push(ev event) {
	*h = append(*h, ev)
	s := *h
	for i := len(s) - 1; i > 0; {
		up := (i - 1) / 2
		if !s.less(i, up) {
			break
		}
		s[i], s[up] = s[up], s[i]
		i = up
	}
}

func (h *events) pop() event {
	s := *h
	top, last := s[0], len(s)-1
	s[0], s[last] = s[last], event{}
	s = s[:last]
	*h = s
	for i := 0; ; {
		min := i
		for c := 2*i + 1; c <= 2*i+2 && c < last; c++ {
			if s.less(c, min) {
				min = c
			}
		}
		if min == i {
			return top
		}
		s[i], s[min] = s[min], s[i]
		i = min
	}
}

// fifo is a queue that keeps its memory.
type fifo[T any] struct {
	s    []T
	head int
}

func (q *fifo[T]) len() int { return len(q.s) - q.head }

func (q *fifo[T]) push(v T) {
	if q.head > 16 && q.head > len(q.s)/2 {
		n := copy(q.s, q.s[q.head:])
		clear(q.s[n:])
		q.s, q.head = q.s[:n], 0
	}
	q.s = append(q.s, v)
}

func (q *fifo[T]) front() T { return q.s[q.head] }

func (q *fifo[T]) pop() T {
	v := q.s[q.head]
	clear(q.s[q.head : q.head+1])
	if q.head++; q.head == len(q.s) {
		q.s, q.head = q.s[:0], 0
	}
	return v
}
