package session

import (
	"cmp"
	"fmt"
	"sync"
	"syscall"
	"time"

	"github.com/sanconn/san/session/internal/wire"
)

// keepalive probes a silent peer, unless the provider detects dead peers itself.
type keepalive struct {
	mu         sync.Mutex // guards the fields below; nothing is called with it held
	timer      *time.Timer
	every      time.Duration // the interval, if on
	on         bool
	received   uint64 // messages at the last check
	unanswered int
	stopped    bool
}

const (
	// maxUnanswered probes in a row end the connection.
	maxUnanswered = 3
	// defaultKeepAlive is package net's default. minKeepAlive is the kernel's unit for TCP: it makes a
	// period harmless whose unit was forgotten, and which is in nanoseconds.
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
	if !s.ring && !k.stopped {
		k.timer = time.AfterFunc(k.every, func() { k.check(s) })
		k.restartLocked()
	}
}

func (k *keepalive) stop() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.stopped = true
	if k.timer != nil {
		k.timer.Stop()
	}
}

// KeepAlive is what a program sets; nil fields leave a setting as it is.
type KeepAlive struct {
	On     *bool          // when switched on again, it has its last interval, or 15 s if it had none
	Period *time.Duration // the interval, at least 1 s; 0: 15 s; negative: unchanged
}

// SetKeepAlive changes keepalive. It has no effect if the provider detects dead peers itself.
func (s *Session) SetKeepAlive(set KeepAlive) {
	k := &s.alive
	k.mu.Lock()
	defer k.mu.Unlock()
	if set.Period != nil && *set.Period >= 0 {
		k.every = max(cmp.Or(*set.Period, defaultKeepAlive), minKeepAlive)
		k.restartLocked()
	}
	if set.On != nil && *set.On != k.on {
		k.on = *set.On
		k.restartLocked()
	}
}

// restartLocked applies on and every to the timer.
func (k *keepalive) restartLocked() {
	k.unanswered = 0
	if k.timer == nil || k.stopped {
		return
	}
	if k.on {
		k.timer.Reset(k.every)
	} else {
		k.timer.Stop()
	}
}

func (k *keepalive) check(s *Session) {
	if !s.workers.start() {
		return
	}
	defer s.workers.Done()
	if s.over() != nil { // that is why the peer is silent
		k.stop()
		return
	}
	s.progress(true)
	received := s.Stats().MessagesReceived
	k.mu.Lock()
	if k.stopped || !k.on {
		k.mu.Unlock()
		return
	}
	if received != k.received {
		k.received, k.unanswered = received, 0
	} else {
		k.unanswered++
	}
	probes, every := k.unanswered, k.every
	k.timer.Reset(every)
	k.mu.Unlock()
	switch {
	case probes > maxUnanswered:
		k.stop()
		s.fail(fmt.Errorf("session: the peer has not answered for %v: %w", every*(maxUnanswered+1), syscall.ETIMEDOUT))
	case probes > 0:
		s.withSender(func(tx *sender) { tx.queueControl(wire.Plain(wire.TypePing)) })
		s.enlistPending()
	}
}
