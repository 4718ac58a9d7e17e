package verbs

import "time"

// pool runs calls of librdmacm that may block for most of a minute (on iWARP:
// connect, disconnect and destroy wait for TCP). Each occupies a thread, so their
// number is limited; calls that must not be skipped wait their turn. It has a token for each
// that runs.
type pool chan struct{}

// maxBlocked bounds the threads that are stuck in librdmacm.
const maxBlocked = 16

var blocking = make(pool, maxBlocked)

// try starts f if a thread is free for it.
func (p pool) try(f func()) bool {
	select {
	case p <- struct{}{}:
		go func() {
			f()
			<-p
		}()
		return true
	default:
		return false
	}
}

// run runs f, now or later, and waits for its end until the limit.
func (p pool) run(limit time.Duration, f func()) {
	done := make(chan struct{})
	go func() {
		p <- struct{}{}
		f()
		<-p
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(limit):
	}
}
