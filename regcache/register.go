package regcache

import (
	"errors"
	"fmt"
	"syscall"
	"time"
)

// register registers memory with the device. If that fails for lack of memory, it deregisters
// everything unused and tries once more.
func (c *Cache) register(start uintptr, n int, access Access) (MR, error) {
	if limit := c.budget.memlock; limit != 0 && int64(n) > limit || n > c.config.MaxRegistration {
		return MR{}, c.refused(n, syscall.ENOMEM)
	}
	mr, err := c.registerOnce(start, n, access)
	if errors.Is(err, syscall.ENOMEM) {
		c.count(func(s *Stats) { s.Flushes++ })
		c.budget.Flush()
		mr, err = c.registerOnce(start, n, access)
	}
	switch {
	case errors.Is(err, syscall.ENOMEM):
		return MR{}, c.refused(n, err)
	case err != nil:
		c.count(func(s *Stats) { s.Failed++ })
		return MR{}, fmt.Errorf("regcache: register %d bytes for %v: %w", n, access, err)
	}
	c.count(func(s *Stats) {
		s.PinnedEntries++
		s.PinnedBytes += pinnedSize(start, start+uintptr(n))
	})
	return mr, nil
}

func (c *Cache) refused(n int, err error) error {
	c.count(func(s *Stats) { s.Refused++ })
	return fmt.Errorf("regcache: register %d bytes: %w: %w; %v", n, syscall.ENOBUFS, err, c.budget)
}

func (c *Cache) registerOnce(start uintptr, n int, access Access) (MR, error) {
	began := time.Now()
	mr, err := c.registrar.Register(start, n, access)
	took := time.Since(began)
	c.count(func(s *Stats) {
		s.RegisterTime += took
		s.Registrations++
	})
	return mr, err
}
