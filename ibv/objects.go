package ibv

import "sync"

// cObject is an object of the libraries. Zero: none, or closed.
type cObject uintptr

// close calls destroy for the object, unless it is closed already. After an error the object still
// exists.
func (h *cObject) close(verb, on string, destroy func(cObject) int) error {
	if *h == 0 {
		return nil
	}
	errno := destroy(*h)
	if errno == 0 {
		*h = 0
	}
	return verbError(verb, on, errno)
}

// closeObject is close for an object that events may be about.
func (h *cObject) closeObject(verb, on string, destroy func(cObject) int, token uint64) error {
	err := h.close(verb, on, destroy)
	if err == nil {
		objects.remove(token)
	}
	return err
}

// objects finds the Go object of an event. C keeps a token in place of a pointer. No token is used
// twice, so an event about an object that was closed finds nothing.
var objects = registry{m: make(map[uint64]any)}

type registry struct {
	mu   sync.RWMutex
	last uint64         // guarded by mu
	m    map[uint64]any // guarded by mu
}

func (r *registry) add(o any) uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.last++
	r.m[r.last] = o
	return r.last
}

func (r *registry) get(token uint64) any {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.m[token]
}

func (r *registry) remove(token uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.m, token)
}
