package verbs

// fifo is a queue of fixed capacity, so that it does not allocate in use. The caller of push must know
// that there is room.
type fifo[T any] struct {
	items []T
	first int
	n     int
}

func newFIFO[T any](capacity int) fifo[T] { return fifo[T]{items: make([]T, capacity)} }

func (f *fifo[T]) at(i int) *T {
	i += f.first
	if i >= len(f.items) {
		i -= len(f.items)
	}
	return &f.items[i]
}

func (f *fifo[T]) push(v T) {
	*f.at(f.n) = v
	f.n++
}

func (f *fifo[T]) pop() T {
	var zero T
	p := f.at(0)
	v := *p
	*p = zero
	if f.first++; f.first == len(f.items) {
		f.first = 0
	}
	f.n--
	return v
}
