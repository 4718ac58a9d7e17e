package verbs

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"syscall"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/regcache"
)

// controlBytes is the process's budget in bytes for the buffers of its connections: enough for about
// 16,000 connections of the default sizes.
const controlBytes = 1 << 30

// controlArena provides the buffers that messages are sent from and received into. It is an arena of
// its own, so that data that is fetched ahead cannot use it up.
var controlArena = sync.OnceValue(func() *regcache.Arena { return regcache.NewArena(0, controlBytes) })

// peerShare bounds what the connections with one peer take of the budget: at most peerShare times what
// they leave. The first peer that takes all it can gets three quarters, the next one three quarters of
// the rest; so no address takes what all others need. A host with several addresses has several shares.
const peerShare = 3

// peerBudgets are how many bytes of an arena the connections with each peer have.
var peerBudgets = struct {
	mu sync.Mutex
	m  map[peerBudget]int64 // guarded by mu
}{m: make(map[peerBudget]int64)}

type peerBudget struct {
	arena *regcache.Arena
	peer  netip.Addr
}

// add adds n bytes to the peer's, if it may have them.
func (s peerBudget) add(n int64) error {
	left := s.arena.Left() - n
	peerBudgets.mu.Lock()
	defer peerBudgets.mu.Unlock()
	has := peerBudgets.m[s]
	if has > 0 && has+n > peerShare*left {
		return fmt.Errorf("verbs: the connections with %v have %d KiB of control buffers, and what is left is for other peers: %w", s.peer, has>>10, syscall.ENOBUFS)
	}
	peerBudgets.m[s] = has + n
	return nil
}

func (s peerBudget) giveBack(n int64) {
	peerBudgets.mu.Lock()
	defer peerBudgets.mu.Unlock()
	if peerBudgets.m[s] -= n; peerBudgets.m[s] == 0 {
		delete(peerBudgets.m, s)
	}
}

// messageMemory is memory of the arena for one endpoint, registered in one or more parts, each with
// rights of its own.
type messageMemory struct {
	budget peerBudget
	buf    *regcache.Buffer
	mem    []byte
	mrs    []*ibv.MR
}

func newMessageMemory(s peerBudget, n int) (r messageMemory, err error) {
	if err = s.add(int64(n)); err != nil {
		return r, err
	}
	if r.buf, err = s.arena.Get(n); err != nil {
		s.giveBack(int64(n))
		return r, err
	}
	r.budget, r.mem = s, r.buf.Bytes()
	return r, nil
}

// register registers a part of the memory.
func (r *messageMemory) register(pd *ibv.PD, part []byte, access ibv.Access) (mr *ibv.MR, err error) {
	err = withRoom(func() error {
		mr, err = pd.RegMR(addressOf(part), len(part), access)
		return err
	})
	switch {
	case err == nil:
		r.mrs = append(r.mrs, mr)
	case errors.Is(err, syscall.ENOMEM):
		err = fmt.Errorf("verbs: control buffers: %w; %v", err, regcache.DefaultBudget())
	}
	return mr, err
}

// deregister ends the device's use of the memory, which stays allocated until free.
func (r *messageMemory) deregister() {
	for _, mr := range r.mrs {
		if err := mr.Close(); err != nil {
			r.buf = nil // the device still has it, so it cannot be used again
		}
	}
	r.mrs = nil
}

// free gives the memory back.
func (r *messageMemory) free() {
	if r.buf != nil {
		r.buf.Put()
		r.budget.giveBack(int64(len(r.mem)))
	}
	*r = messageMemory{}
}

func (r *messageMemory) close() {
	r.deregister()
	r.free()
}
