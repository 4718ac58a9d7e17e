package verbs

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/session"
)

// RLIMIT_MEMLOCK bounds what a process may have registered, where it applies,
// and counts each registration of the same page again. What has to fit:
//
//	the control buffers of each connection: a share of what is left at most,
//	    and less, down to a minimum, when that is refused; and its queues on
//	    devices where they are locked memory (lockedByQueues)
//	what connections expose, and the sinks of their reads: a share at a time
//	registrations that are cached: half, given back when others need it
//	    (regcache.DefaultBudget)
//
// Below lowMemlock there are only control buffers: all bytes go through them. When
// not even the smallest fit, connecting fails with ReasonResources.
const (
	// MinMemlock is the least limit in bytes: four ends of connections fit, or fewer
	// where a device's queues are locked memory too.
	MinMemlock = 64 << 10
	// The control buffers of one more connection get 1/connectionShare of what is
	// left of the limit: at 8 MiB, Linux's default, the first hundred ends have the usual
	// size.
	connectionShare = 16
	// One exposure gets 1/exposeShare of the limit: one each way at a time, and as
	// much again for everything else.
	exposeShare = 4
	// lowMemlock is the least limit in bytes with exposures: an inbox that is smaller than
	// 64 KiB (session's share of one) does not pay.
	lowMemlock = exposeShare * 256 << 10
)

// memlock is the limit, 0 if none applies.
var memlock = sync.OnceValue(func() int {
	if limit, limited := regcache.MemlockLimit(); limited {
		return int(max(limit, 1))
	}
	return 0
})

// lockedQueues is how many bytes the devices' queues take of the limit.
var lockedQueues atomic.Int64

// memlockAvailable is what is left of the limit when everything unused has been
// given back, 0 if none applies.
func memlockAvailable() int {
	if memlock() == 0 {
		return 0
	}
	s := regcache.DefaultBudget().Stats()
	_, control := controlArena().Bytes()
	return max(memlock()-int(s.PinnedBytes-s.IdleBytes+control+lockedQueues.Load()), 1)
}

// withRoom calls lock, which needs locked memory. If there is none, it gives back what
// the caches do not use and calls lock once more.
func withRoom(lock func() error) error {
	err := limited(lock())
	if errors.Is(err, syscall.ENOMEM) {
		regcache.DefaultBudget().Flush()
		err = limited(lock())
	}
	return err
}

// limited has an error that the rdma cgroup's limit causes, EAGAIN
// (kernel/cgroup/rdma.c), count as a want of memory: the same helps.
func limited(err error) error {
	if errors.Is(err, syscall.EAGAIN) {
		return fmt.Errorf("%w, perhaps by the rdma cgroup: %w", err, syscall.ENOMEM)
	}
	return err
}

// exposeLimit bounds one exposure in bytes; 0: there is no room for any.
func exposeLimit(memlock int) int {
	switch {
	case memlock == 0:
		return maxExpose
	case memlock < lowMemlock:
		return 0
	}
	return min(memlock/exposeShare, maxExpose)
}

// fitting is c with control buffers that fit, with so many bytes of queues, an endpoint's share of
// what is left of RLIMIT_MEMLOCK; 0: no limit applies.
func (c Config) fitting(left, queues int) Config {
	for left != 0 && c.sendBytes()+c.receiveBytes()+queues > left/connectionShare {
		smaller, ok := c.smaller()
		if !ok {
			break
		}
		c = smaller
	}
	return c
}

// sendBytes is a multiple of a page, as RLIMIT_MEMLOCK counts a page twice that both
// registrations of the control buffers have a part of.
func (c Config) sendBytes() int {
	return roundUp(c.sendBuffer+controlSlots*session.MaxControl+2*maxInline, smallestPage)
}

func (c Config) receiveBytes() int { return c.buffers * c.bufferSize }

// smaller is c with about half of the control buffers; false: they are the smallest. It
// shortens messages before it has fewer of them, which would stall a network.
func (c Config) smaller() (Config, bool) {
	switch {
	case c.bufferSize > session.MaxControl:
		c.bufferSize = max(c.bufferSize/2, session.MaxControl)
	case c.buffers > minBuffers:
		c.buffers = max(c.buffers/2, minBuffers)
	default:
		return c, false
	}
	c.sendBuffer = max(c.sendBuffer/2&^(cacheLine-1), 4*c.bufferSize)
	return c, true
}
