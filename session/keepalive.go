package session

import (
	"cmp"
	"fmt"
	"sync"
	"syscall"
	"time"
)

// keepalive asks a silent peer whether it lives, where the provider does not
// find out by itself.
type keepalive struct {
	mu         sync.Mutex // guards the fields below; nothing is called under it
	timer      *time.Timer
	every      time.Duration // while on
	on         bool
	heard      uint64
	unanswered int
	ended      bool
}

const (
	// maxUnanswered questions in a row end the connection.
	maxUnanswered = 3
	// defaultKeepAlive is what net uses, and minKeepAlive what the kernel counts in: a
	// period of nanoseconds, of which one forgot the unit, is harmless there.
	defaultKeepAlive = 15 * time.Second
	minKeepAlive     = time.Second
)

func (k *keepalive) start(s *Session) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.every, k.on = max(s.cfg.KeepAlive, minKeepAlive), s.cfg.KeepAlive > 0
	if !k.on {
		k.every = defaultKeepAlive
	}
	if s.lim.Liveness || k.ended || k.timer != nil {
		return
	}
	k.timer = time.AfterFunc(k.every, func() { k.check(s) })
	if !k.on {
		k.timer.Stop()
	}
}

func (k *keepalive) stop() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.ended = true
	if k.timer != nil {
		k.timer.Stop()
	}
}

// SetKeepAlive switches keepalive off, or on at the interval that it had last, or 15 s
// if it had none. It has no effect where the provider finds dead peers by itself.
func (s *Session) SetKeepAlive(on bool) {
	k := &s.alive
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.on != on {
		k.on = on
		k.restart()
	}
}

// SetKeepAlivePeriod changes the interval, and does not switch keepalive on. It is a
// second at least. Zero: 15 s; a negative one changes nothing.
func (s *Session) SetKeepAlivePeriod(d time.Duration) {
	if d < 0 {
		return
	}
	k := &s.alive
	k.mu.Lock()
	defer k.mu.Unlock()
	k.every = max(cmp.Or(d, defaultKeepAlive), minKeepAlive)
	k.restart()
}

// restart makes the timer follow. Called with mu held.
func (k *keepalive) restart() {
	k.unanswered = 0
	if k.timer == nil || k.ended {
		return
	}
	if k.on {
		k.timer.Reset(k.every)
	} else {
		k.timer.Stop()
	}
}

func (k *keepalive) check(s *Session) {
	s.poke(true)
	heard := s.heard()
	k.mu.Lock()
	if k.ended || !k.on {
		k.mu.Unlock()
		return
	}
	if heard != k.heard {
		k.heard, k.unanswered = heard, 0
	} else {
		k.unanswered++
	}
	asked, every := k.unanswered, k.every
	k.timer.Reset(every)
	k.mu.Unlock()
	switch {
	case asked > maxUnanswered:
		k.stop()
		s.fail(fmt.Errorf("session: the peer has not answered for %v: %w", every*(maxUnanswered+1), syscall.ETIMEDOUT))
	case asked > 0:
		s.sendControl(control{t: msgPing})
		s.leftBehind()
	}
}
