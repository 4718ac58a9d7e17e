package session

import (
	"errors"
	"syscall"
	"time"
)

// MaxUrgent is the largest WriteUrgent in bytes.
const MaxUrgent = 64

// WriteUrgent sends 1 to MaxUrgent bytes out of band (D10), else it fails with
// EMSGSIZE. They overtake waiting data and replace urgent data that the peer has
// not read yet. It waits while data and an earlier WriteUrgent are stuck;
// InterruptWrite ends that.
func (s *Session) WriteUrgent(p []byte) (int, error) {
	if len(p) == 0 || len(p) > MaxUrgent {
		return 0, errors.Join(errUrgentSize, syscall.EMSGSIZE)
	}
	for {
		if st := s.wr.state.Load(); st != 0 {
			return 0, s.writeState(st)
		}
		if s.trySendUrgent(p) {
			return len(p), nil
		}
		if err := s.writeBlocked(); err != nil {
			return 0, err
		}
		s.poke(true)
		time.Sleep(tick) // rare: data and an earlier one are stuck
	}
}

var errUrgentSize = errors.New("session: urgent data must have 1 to 64 bytes")

// trySendUrgent uses data's room, or, once while data is blocked, the room that is
// reserved for control.
func (s *Session) trySendUrgent(p []byte) bool {
	tx := &s.tx
	tx.mu.Lock()
	defer tx.mu.Unlock()
	if s.gone || s.failure.Load() != nil || tx.last != 0 {
		return false
	}
	n := headerLen + len(p)
	if room := s.reservePayload(len(p), len(p)); room != nil {
		copy(room[headerLen:], p)
		s.commit(room, msgUrgent, 0, n)
		return true
	}
	if tx.urgent || s.credit() < 1 {
		return false
	}
	room := s.ep.ReserveControl(n)
	if room == nil {
		return false
	}
	tx.urgent = true
	copy(room[headerLen:], p)
	s.header(room, msgUrgent, 0)
	s.ep.CommitControl(n)
	return true
}

// ReadUrgent takes the newest urgent data if it was not read yet: up to len(p)
// bytes, the rest is discarded. It does not block; if there is none it returns
// ErrNoUrgent.
func (s *Session) ReadUrgent(p []byte) (int, error) {
	s.poke(true)
	s.rx.mu.Lock()
	defer s.rx.mu.Unlock()
	if len(s.rx.urgent) == 0 {
		return 0, ErrNoUrgent
	}
	n := copy(p, s.rx.urgent)
	s.rx.urgent = s.rx.urgent[:0]
	return n, nil
}

// Urgent returns a channel that holds a token when urgent data has come.
func (s *Session) Urgent() <-chan struct{} { return s.rx.urgentCh }
