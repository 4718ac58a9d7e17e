package verbs

import (
	"math"
	"runtime"
	"testing"

	"github.com/sanconn/san/regcache"
)

// Who comes first leaves something for those that come later. No device is needed
// for it.
func TestAllocLeavesRoom(t *testing.T) {
	left := func() int { return int(regcache.DefaultArena().Left()) }
	var e Endpoint
	var all [][]byte
	before := left()
	for size := 4 << 20; size > freely; size /= 2 {
		for b := e.mem.Alloc(size); b != nil; b = e.mem.Alloc(size) {
			all = append(all, b)
			if left() < (arenaShare-1)*size {
				t.Fatalf("%d bytes of %d are left after buffer %d, of %d", left(), before, len(all), size)
			}
		}
	}
	if want := before >> 22; len(all) < want {
		t.Errorf("%d buffers of %d bytes, want %d", len(all), before, want)
	}
	for _, b := range all {
		e.mem.Free(b)
	}
	if left() != before {
		t.Errorf("%d bytes left, %d before", left(), before)
	}
}

// Reads of a large slice that begin elsewhere in it each time are of memory that comes again, also
// where little of it is filled.
func TestASliceComesAgainWhereverItsReadsBegin(t *testing.T) {
	for _, fills := range []int{8 * maxRDMA, 2 * maxRDMA} {
		var made registrations
		r := &remote{
			q: new(queuePair), dev: &device{most: sizes{math.MaxInt, math.MaxInt}}, maxRDMA: maxRDMA,
			dom: &domain{cache: regcache.New(&made, regcache.Config{Budget: regcache.NewBudget(1<<30, 100)})},
		}
		b := make([]byte, 24*maxRDMA)[8*maxRDMA:]
		b = b[maxRDMA-int(addressOf(b)%maxRDMA):]
		for i := range 20 {
			filled := b[7*i%20*100 : fills] // to the end of a block
			if pays, err := r.PaysToFill(filled); pays != (i > 0) || err != nil {
				t.Errorf("Read %d of %d bytes: %v, %v", i+1, fills, pays, err)
			}
		}
		if made != 1 {
			t.Errorf("%d registrations of %d bytes", made, fills)
		}
		r.dom.cache.Close()
		runtime.KeepAlive(b)
	}
}

// registrations counts them.
type registrations int

func (n *registrations) Register(uintptr, int, regcache.Access) (regcache.MR, error) {
	*n++
	return regcache.MR{}, nil
}

func (n *registrations) Deregister(regcache.MR) error { return nil }
