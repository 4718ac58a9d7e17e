// Package quota shares a limited amount of something that a process has among the users of the host
// whose processes connect to it.
//
// One rule serves for everything: a user may hold no more than is left free. So one user alone gets
// half, two get a third each, and however many take what they can, a further user gets as much as each
// of them has. Nothing has to be reserved, and what a user gives back is free for the others.
package quota

import "sync"

// A Holder is a user, by the system's number, or Own.
type Holder int64

// Own is this process itself: for its own needs it may have all that is free.
const Own Holder = -1

// A Pool is an amount of one thing. Its methods may be called concurrently.
type Pool struct {
	limit int64

	mu   sync.Mutex // guards the fields below
	used int64      // by all holders
	by   map[Holder]int64
}

// New returns a pool of limit units.
func New(limit int64) *Pool { return &Pool{limit: limit, by: make(map[Holder]int64)} }

// Limit returns the number of units in the pool.
func (p *Pool) Limit() int64 { return p.limit }

// Take gives a holder n more units, if it then holds no more than is left free, and reports whether it
// did.
func (p *Pool) Take(of Holder, n int64) bool { return p.TakeWithin(p.limit, of, n) }

// TakeWithin is Take for a pool of no more than limit units.
func (p *Pool) TakeWithin(limit int64, of Holder, n int64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.hasLocked(limit, of, n) {
		return false
	}
	p.addLocked(of, n)
	return true
}

// Has reports whether Take would succeed.
func (p *Pool) Has(of Holder, n int64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.hasLocked(p.limit, of, n)
}

func (p *Pool) hasLocked(limit int64, of Holder, n int64) bool {
	free := limit - p.used
	if of != Own {
		free -= p.by[of] + n
	}
	return n <= free
}

// Charge gives a holder n more units, whatever it holds. It is for things that cannot be refused, such
// as descriptors that the holder passes to this process. Until they are returned, the holder gets fewer
// others.
func (p *Pool) Charge(of Holder, n int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.addLocked(of, n)
}

// Return takes back n of a holder's units.
func (p *Pool) Return(of Holder, n int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.addLocked(of, -n)
}

func (p *Pool) addLocked(of Holder, n int64) {
	p.used += n
	if held := p.by[of] + n; held != 0 {
		p.by[of] = held
	} else {
		delete(p.by, of)
	}
}

// Used returns how many units are in use.
func (p *Pool) Used() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.used
}
