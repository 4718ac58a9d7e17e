package regcache

import (
	"context"
	"fmt"
	"time"
)

// drop deregisters a region that has no references. No lock may be held.
func (r *Region) drop() error {
	c := r.cache
	began := time.Now()
	err := c.registrar.Deregister(r.mr)
	took := time.Since(began)
	c.count(func(s *Stats) {
		s.DeregisterTime += took
		s.Deregistrations++
		s.Hits += r.hits.Swap(0)
		if err != nil {
			s.DeregisterFailed++
			err = fmt.Errorf("regcache: deregister %d bytes: %w", r.end-r.start, err)
		} else {
			s.PinnedEntries--
			s.PinnedBytes -= r.size()
		}
	})
	if r.validator != nil {
		r.validator.detach(r, err)
	}
	c.all.remove(r, err) // last, so that a waiter finds complete statistics
	if r.pin != nil {
		r.pin.Release()
	}
	r.keep = nil
	return err
}

// dropAll drops regions that were taken out of their caches.
func dropAll(regions []*Region) {
	for _, r := range regions {
		r.drop()
	}
}

// otherTime bounds how long a cache waits until other caches have deregistered what was evicted for it.
// That usually takes less than a millisecond, but their devices may hang.
const otherTime = 10 * time.Millisecond

// dropFor drops the regions that were evicted to make room for c. Regions of other caches are dropped
// by those caches' goroutines.
func dropFor(c *Cache, victims []*Region) {
	var others []*Cache
	for _, r := range victims {
		if r.cache == c {
			r.drop()
			continue
		}
		r.cache.dropLater(r)
		others = append(others, r.cache)
	}
	if others == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), otherTime)
	defer cancel()
	for _, other := range others {
		other.all.dropped(ctx.Done())
	}
}

// dropLater drops a region in a goroutine of the cache, which ends when no region is left. Closing the
// cache or withdrawing the region's range waits for it.
func (c *Cache) dropLater(r *Region) {
	c.budget.mu.Lock()
	defer c.budget.mu.Unlock()
	c.dead = append(c.dead, r)
	if len(c.dead) == 1 {
		go c.dropDead()
	}
}

func (c *Cache) dropDead() {
	mu := &c.budget.mu
	mu.Lock()
	defer mu.Unlock()
	for len(c.dead) > 0 {
		r := c.dead[0]
		mu.Unlock()
		r.drop()
		mu.Lock()
		c.dead[0] = nil
		c.dead = c.dead[1:]
	}
	c.dead = nil
}
