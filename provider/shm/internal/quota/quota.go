// Package quota shares what a process has only so much of among the users of the host whose
// processes connect to it.
//
// One rule serves for everything: a user may hold no more than is left free. So one user
// alone gets half, two get a third each, and however many take what they can, a newcomer
// finds as much as each of them has. Nothing needs to be reserved, and what one user gives
// back is there for the others.
package quota

import "sync"

// A Holder is one of those that a pool is shared among: by the number of the system's user, or Own.
type Holder int64

// Own is this process itself: for what it does of its own accord, it may have all that is free.
const Own Holder = -1

// A Pool is an amount of one thing. Its methods may be called concurrently.
type Pool struct {
	limit int64

	mu   sync.Mutex // guards what follows
	used int64      // by all of them
	by   map[Holder]int64
}

// New returns a pool of so many units.
func New(limit int64) *Pool { return &Pool{limit: limit, by: make(map[Holder]int64)} }

// Limit is how many units there are.
func (p *Pool) Limit() int64 { return p.limit }

// Take gives a holder n more units, if it then holds no more than is left free.
func (p *Pool) Take(of Holder, n int64) bool { return p.TakeWithin(p.limit, of, n) }

// TakeWithin is Take as if there were no more than limit units.
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

// Charge gives a holder n more units whatever it holds: they are things that it could not be
// kept from passing to this process. Until they are returned, it gets fewer others.
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

// Used is how many units are in use.
func (p *Pool) Used() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.used
}
