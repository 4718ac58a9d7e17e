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

// RLIMIT_MEMLOCK bounds how much a process may have registered, where it applies. It counts a page
// again for each registration. What has to fit:
//
//	the control buffers of each connection: at most a share of what is left, and
//	    less, down to a minimum, if that is refused; and its queues on devices where
//	    they are locked memory (lockedByQueues)
//	exposed memory, and the memory that reads go to: a share at a time
//	cached registrations: half, given back when others need it
//	    (regcache.DefaultBudget)
//
// Below lowMemlock there are only control buffers, and all bytes go through them. If not even the
// smallest fit, connecting fails with ReasonResources.
const (
	// MinMemlock is the least limit in bytes. It is enough for four ends of connections, or fewer if a
	// device's queues are locked memory too.
	MinMemlock = 64 << 10
	// The control buffers of one more connection get 1/connectionShare of what is left of the limit: at
	// 8 MiB, Linux's default, the first hundred ends have the usual size.
	connectionShare = 16
	// One exposure gets 1/exposeShare of the limit: there is one each way at a time, and as much again
	// is for everything else.
	exposeShare = 4
	// lowMemlock is the least limit in bytes with exposures: an inbox of less than 64 KiB (a session's
	// share of one exposure) does not pay.
	lowMemlock = exposeShare * 256 << 10
)

// memlock returns the limit in bytes, or 0 if none applies.
var memlock = sync.OnceValue(func() int {
	if limit, limited := regcache.MemlockLimit(); limited {
		return int(max(limit, 1))
	}
	return 0
})

// lockedQueues is how many bytes of the limit the queues take.
var lockedQueues atomic.Int64

// memlockAvailable returns what is left of the limit if all unused memory is given back, or 0 if no
// limit applies.
func memlockAvailable() int {
	if memlock() == 0 {
		return 0
	}
	s := regcache.DefaultBudget().Stats()
	_, control := controlArena().Bytes()
	return max(memlock()-int(s.PinnedBytes-s.IdleBytes+control+lockedQueues.Load()), 1)
}

// withRoom calls lock, which needs locked memory. If there is none, it gives back what the caches do
// not use, and calls lock again.
func withRoom(lock func() error) error {
	err := limited(lock())
	if errors.Is(err, syscall.ENOMEM) {
		regcache.DefaultBudget().Flush()
		err = limited(lock())
	}
	return err
}

// limited turns EAGAIN, the error for the rdma cgroup's limit (kernel/cgroup/rdma.c), into a lack of
// memory: the same helps against both.
func limited(err error) error {
	if errors.Is(err, syscall.EAGAIN) {
		return fmt.Errorf("%w, perhaps by the rdma cgroup: %w", err, syscall.ENOMEM)
	}
	return err
}

// exposeLimit returns the most bytes of one exposure; 0: there is no room for any.
func exposeLimit(memlock int) int {
	switch {
	case memlock == 0:
		return maxExpose
	case memlock < lowMemlock:
		return 0
	}
	return min(memlock/exposeShare, maxExpose)
}

// fitting returns c with control buffers that fit into an endpoint's share of what is left of
// RLIMIT_MEMLOCK, together with queues bytes of queues; left is 0 if no limit applies.
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

// sendBytes returns the size of the send region, a multiple of the page size: RLIMIT_MEMLOCK would
// count a page twice that both registrations share.
func (c Config) sendBytes() int {
	return roundUp(c.sendBuffer+controlSlots*session.MaxControl+2*maxInline, smallestPage)
}

func (c Config) receiveBytes() int { return c.buffers * c.bufferSize }

// smaller returns c with about half of the control buffers, or false if they are the smallest. It first
// makes messages shorter, because fewer of them would stall a network.
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
