package verbs

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/session"
)

// Shared receive queues. With Config.SharedDomain, from SRQFrom on, the connections of a
// device join a group, whose members take their receives from one queue. It is
// never shallower than the sum of the credits that its members have given, since
// RNR would cost a connection: each brings its share of buffers along, or finds
// that of one that has left. What is saved is the rest of a window of their
// own, and the queues.
//
// What a member's queue pair has taken from the queue comes back when the member
// is retired. If some of it may be missing, as on siw and rxe when a member closes before
// its peer (rxe.go), nobody joins the group any more, and it ends with its last member.
//
// A peer that sends more than it has credit for is detected and loses its
// connection, but other members may by then have missed a message and lose theirs
// (SECURITY.md).
type recvGroup struct {
	dom     *domain
	srq     *ibv.SRQ
	size    int                                  // of a buffer
	locked  int                                  // bytes of RLIMIT_MEMLOCK that srq takes
	regions [groupMembers]atomic.Pointer[region] // srqShare buffers each

	active  int  // members whose queue pairs use srq; guarded by dom.mu, as what follows
	members int  // those, and those that have left and still have messages
	shares  int  // regions there are
	closed  bool // nobody joins
}

const (
	// groupMembers is small enough that losing a group costs little, and large enough
	// that there are few groups.
	groupMembers = 64
	// srqShare is a member's number of buffers: the least window.
	srqShare = minBuffers
	// lastTime bounds the wait until a queue pair in error has taken the last of its
	// group's receives. All devices but siw report it.
	lastTime = 100 * time.Millisecond
)

// joinGroup gives a new endpoint its group, nil if it has a queue of its own.
func (dom *domain) joinGroup(dev *device, cfg Config) (*recvGroup, error) {
	if !cfg.SharedDomain || cfg.SRQFrom < 0 || dev.count()+1 < cfg.SRQFrom ||
		cfg.Disable&session.FeatureSRQ != 0 || dev.caps.MaxSRQ == 0 || dev.caps.MaxSRQWR < groupMembers*srqShare {
		return nil, nil
	}
	dom.mu.Lock()
	defer dom.mu.Unlock()
	for _, g := range dom.groups {
		if !g.closed && g.members < groupMembers && g.size == cfg.BufferSize {
			return g, g.admitLocked(cfg)
		}
	}
	g := &recvGroup{dom: dom, size: cfg.BufferSize, locked: dev.lockedBySRQ(groupMembers * srqShare)}
	var err error
	if err = withRoom(func() error {
		g.srq, err = dom.pd.CreateSRQ(groupMembers*srqShare, 1)
		return err
	}); err != nil {
		return nil, err
	}
	g.srq.Owner = g
	lockedQueues.Add(int64(g.locked))
	dom.groups = append(dom.groups, g)
	return g, g.admitLocked(cfg)
}

// admitLocked takes one more member in, with a share of buffers. mu of dom is held.
func (g *recvGroup) admitLocked(cfg Config) error {
	g.active++
	g.members++
	if g.members <= g.shares {
		return nil
	}
	r, err := newRegion(cfg.control, g.dom.pd, srqShare*g.size, ibv.LocalWrite)
	if err == nil {
		first := g.shares * srqShare
		wrs := make([]ibv.RecvWR, srqShare)
		for i := range wrs {
			wrs[i] = recvWR(first+i, r.mem[i*g.size:][:g.size], r.mr)
		}
		g.regions[g.shares].Store(&r)
		g.shares++ // posted or not: it goes with the group
		_, err = g.srq.PostRecv(wrs)
		g.closed = err != nil
	}
	return err
}

// close keeps new members from joining.
func (g *recvGroup) close() {
	g.dom.mu.Lock()
	g.closed = true
	g.dom.mu.Unlock()
}

// leave is called when a member's queue pair has gone; giveBack follows. The last one's
// ends the queue and the registrations.
func (g *recvGroup) leave(lost bool) {
	g.dom.mu.Lock()
	defer g.dom.mu.Unlock()
	g.closed = g.closed || lost
	if g.active--; g.active > 0 {
		return
	}
	g.dom.groups = slices.DeleteFunc(g.dom.groups, func(x *recvGroup) bool { return x == g })
	g.srq.Close()
	lockedQueues.Add(-int64(g.locked))
	for i := range g.shares {
		g.regions[i].Load().deregister()
	}
}

// giveBack ends a membership: the buffers that the member had are the others' again, and
// the memory is the arena's once there are no others.
func (g *recvGroup) giveBack(buffers []int) {
	g.dom.mu.Lock()
	defer g.dom.mu.Unlock()
	if g.active > 0 {
		wrs := make([]ibv.RecvWR, len(buffers))
		for i, number := range buffers {
			wrs[i] = g.recvWR(number)
		}
		if _, err := g.srq.PostRecv(wrs); err != nil {
			g.closed = true
		}
	}
	if g.members--; g.members > 0 {
		return
	}
	for i := range g.shares {
		g.regions[i].Load().free()
	}
}

// buffer is a buffer of the group and its registration.
func (g *recvGroup) buffer(number int) ([]byte, *ibv.MR) {
	r := g.regions[number/srqShare].Load()
	at := number % srqShare * g.size
	return r.mem[at : at+g.size : at+g.size], r.mr
}

func (g *recvGroup) recvWR(number int) ibv.RecvWR {
	mem, mr := g.buffer(number)
	return recvWR(number, mem, mr)
}

// awaitLast waits until the queue pair, which is in error, has taken its last receive;
// false: the device does not report it.
func (r *receiver) awaitLast() bool {
	t := time.NewTimer(lastTime)
	defer t.Stop()
	select {
	case <-r.lastTaken:
		return true
	case <-t.C:
		return false
	}
}

// tookLast is called when the device reports that.
func (r *receiver) tookLast() {
	select {
	case r.lastTaken <- struct{}{}:
	default:
	}
}

// loseBuffers notes that some buffers that were taken may not be found again.
func (r *receiver) loseBuffers() {
	r.q.mu.Lock()
	r.buffersLost = true
	r.q.mu.Unlock()
}
