package verbs

import (
	"sync"
	"time"
)

// pool runs calls of librdmacm that may block for most of a minute (on iWARP:
// connect, disconnect and destroy wait for TCP). Each occupies a thread, so their
// number is limited; calls that must not be skipped wait their turn.
type pool struct {
	mu      sync.Mutex
	running int      // guarded by mu
	queue   []func() // guarded by mu
}

// maxBlocked bounds the threads that are stuck in librdmacm.
const maxBlocked = 16

var blocking pool

// try starts f if a thread is free for it.
func (p *pool) try(f func()) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.running == maxBlocked {
		return false
	}
	p.running++
	go p.work(f)
	return true
}

// run runs f, now or later, and waits for its end until the limit.
func (p *pool) run(limit time.Duration, f func()) {
	done := make(chan struct{})
	job := func() {
		f()
		close(done)
	}
	p.mu.Lock()
	if p.running < maxBlocked {
		p.running++
		go p.work(job)
	} else {
		p.queue = append(p.queue, job)
	}
	p.mu.Unlock()
	t := time.NewTimer(limit)
	defer t.Stop()
	select {
	case <-done:
	case <-t.C:
	}
}

// work runs f and then what waits.
func (p *pool) work(f func()) {
	for f != nil {
		f()
		p.mu.Lock()
		f = nil
		if len(p.queue) > 0 {
			f = p.queue[0]
			p.queue = p.queue[1:]
		} else {
			p.running--
		}
		p.mu.Unlock()
	}
}
