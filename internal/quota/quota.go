// Package quota shares what a process has only so much of among the users of the host whose
// processes connect to it.
//
// One rule serves for everything: a user may hold no more than is left free. So one user
// alone gets half, two get a third each, and however many take what they can, a newcomer
// finds as much as each of them has. Nothing needs to be reserved, and what one user gives
// back is there for the others.
package quota

import "sync"

// A Pool is an amount of one thing. Its methods may be called concurrently.
type Pool struct {
	limit int64

	mu   sync.Mutex // guards what follows
	used int64      // by the users and by this process itself
	by   map[uint32]int64
}

// New returns a pool of so many units.
func New(limit int64) *Pool { return &Pool{limit: limit, by: make(map[uint32]int64)} }

// Limit is how many units there are.
func (p *Pool) Limit() int64 { return p.limit }

// Share is how many units one user can get at most.
func (p *Pool) Share() int64 { return p.limit / 2 }

// Take gives a user n more units, if it then holds no more than is left free.
func (p *Pool) Take(user uint32, n int64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.by[user]+n > p.limit-p.used-n {
		return false
	}
	p.addLocked(user, n)
	return true
}

// Charge gives a user n more units whatever it holds: they are things that it could not be
// kept from passing to this process. Until they are returned, it gets fewer others.
func (p *Pool) Charge(user uint32, n int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.addLocked(user, n)
}

// Return takes back n of a user's units.
func (p *Pool) Return(user uint32, n int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.addLocked(user, -n)
}

func (p *Pool) addLocked(user uint32, n int64) {
	p.used += n
	if held := p.by[user] + n; held != 0 {
		p.by[user] = held
	} else {
		delete(p.by, user)
	}
}

// TakeOwn takes n units for what this process does of its own accord, which may be all that
// is free.
func (p *Pool) TakeOwn(n int64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n > p.limit-p.used {
		return false
	}
	p.used += n
	return true
}

// ReturnOwn gives back n units of TakeOwn.
func (p *Pool) ReturnOwn(n int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.used -= n
}

// Used is how many units are in use.
func (p *Pool) Used() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.used
}

// Held is how many units a user holds.
func (p *Pool) Held(user uint32) int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.by[user]
}
