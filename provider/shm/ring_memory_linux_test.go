package shm

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/provider/shm/internal/ring"
	"github.com/sanconn/san/session"
)

func TestRingGrowsWhileNobodyReadsAndShrinksWhenIdle(t *testing.T) {
	a, b := pair(t, Config{RingMax: 1 << 20})
	s := &a.Endpoint.(*endpoint).out
	msg := make([]byte, 4096)
	sent := 0
	for {
		buf := a.Reserve(len(msg), len(msg))
		if buf == nil {
			break
		}
		pattern(buf, uint64(sent))
		a.Commit(len(buf))
		sent++
	}
	if n := sent * len(msg); n < 9<<20/10 {
		t.Errorf("the ring holds %d bytes of 1 MiB", n)
	}
	if budget.Used() != 1<<20-ring.Start {
		t.Errorf("budget used: %d", budget.Used())
	}
	// Control passes, also when it has to wait for what nobody reads.
	var ev session.Event
	for i := range sent {
		if !b.poll(&ev) {
			t.Fatal(b.Err())
		}
		pattern(msg, uint64(i))
		if !bytes.Equal(ev.Msg, msg) {
			t.Fatalf("message %d is wrong", i)
		}
		b.Keep()
	}
	for i := range 1000 {
		buf := a.reserveControl(session.MaxControl)
		pattern(buf, uint64(i))
		a.CommitControl(len(buf))
		pattern(msg[:session.MaxControl], uint64(i))
		if !b.poll(&ev) || !bytes.Equal(ev.Msg, msg[:session.MaxControl]) {
			t.Fatalf("control message %d is wrong: %v", i, b.Err())
		}
		b.Drop()
	}
	if a.Reserve(len(msg), len(msg)) != nil {
		t.Error("there is room though nothing was released")
	}
	for i := range sent {
		pattern(msg, uint64(i))
		if !bytes.Equal(b.Front(), msg) {
			t.Fatalf("kept message %d is wrong", i)
		}
		b.Release()
	}
	if b.Poll(&ev) {
		t.Errorf("an event too many: %+v", ev)
	}
	testenv.Eventually(t, patience, func() error {
		if n := s.Limit(); n != ring.Start {
			return fmt.Errorf("the ring did not shrink: %d", n)
		}
		return nil
	})
	for i := range 3000 {
		pattern(msg, uint64(i))
		if !a.send(msg) || !b.poll(&ev) || !bytes.Equal(ev.Msg, msg) {
			t.Fatalf("message %d after shrinking: %v %v", i, a.Err(), b.Err())
		}
		b.Drop()
	}
}

// Pages that a connection has faulted in serve the next one, and go if there is none.
func TestFreeSlotStaysWarmAndCools(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{})
	first, firstHere := meet(t, tcp, l) // keeps the link
	defer end(first)
	defer end(firstHere)
	k := first.(*endpoint).link
	defer withoutJanitor(k)() // this test is it
	var warm *slot
	use := func(n int) {
		x, y := meet(t, tcp, l)
		if s := x.(*endpoint).slot; warm == nil {
			warm = s
		} else if s != warm {
			t.Fatal("another slot was taken")
		}
		a, b := newPeer(x), newPeer(y)
		msg := make([]byte, session.MaxControl)
		for i := range n {
			pattern(msg, uint64(i))
			if !a.send(msg) {
				t.Fatal(a.Err())
			}
		}
		var ev session.Event
		for i := range n {
			pattern(msg, uint64(i))
			if !b.poll(&ev) || !bytes.Equal(ev.Msg, msg) {
				t.Fatalf("message %d is wrong: %v", i, b.Err())
			}
			b.Drop()
		}
		end(a)
		end(b)
		testenv.Eventually(t, patience, func() error {
			k.slots.mu.Lock()
			defer k.slots.mu.Unlock()
			k.slots.reapLocked(warm) // though the bell may not have been answered
			if !slices.Contains(k.slots.free, warm) {
				return errors.New("the slot is not free")
			}
			return nil
		})
	}
	const many = 1 << 20 / session.MaxControl
	use(many)
	grown := resident(t, warm.rings[0][:])
	if grown < 1<<20 {
		t.Fatalf("%d bytes after a MiB", grown)
	}
	k.slots.reclaim(k.side, k.ended())
	use(1) // keeps them warm, though its own ring has not grown
	for range cacheTicks - 1 {
		if !k.slots.reclaim(k.side, k.ended()) {
			t.Error("the janitor need not come again, though a slot is warm")
		}
		if n := resident(t, warm.rings[0][:]); n != grown {
			t.Errorf("%d of %d bytes are left before their time", n, grown)
		}
	}
	if k.slots.reclaim(k.side, k.ended()) {
		t.Error("the janitor has to come again")
	}
	if n := resident(t, warm.rings[0][:]); n > os.Getpagesize() { // a slice of an array touches it
		t.Errorf("%d bytes are left for nobody", n)
	}
	k.slots.mu.Lock()
	k.slots.free = []*slot{warm}
	k.slots.mu.Unlock()
	use(many) // as good as new
}

// The pages that a connection inherits with a warm slot count in the budget while it has
// them. They go when it idles, or at once if the budget is exceeded.
func TestIdleConnectionOnAWarmSlotCools(t *testing.T) {
	leaks(t)
	for _, room := range []bool{true, false} {
		tcp, l := listen(t, "127.0.0.1:0", Config{})
		first, firstHere := meet(t, tcp, l) // keeps the link
		k := first.(*endpoint).link
		x, y := meet(t, tcp, l)
		a, b := newPeer(x), newPeer(y)
		place := x.(*endpoint).slot
		for range 1 << 20 / session.MaxControl {
			a.send(make([]byte, session.MaxControl))
			b.send(make([]byte, session.MaxControl))
		}
		end(a)
		end(b)
		testenv.Eventually(t, patience, func() error {
			k.slots.mu.Lock()
			defer k.slots.mu.Unlock()
			if k.slots.reapLocked(place); !slices.Contains(k.slots.free, place) {
				return errors.New("the slot is not free")
			}
			return nil
		})
		resume := withoutJanitor(k, firstHere.(*endpoint).link)
		old := budget.Set(defaultBudget)
		if !room {
			budget.Set(0)
		}
		x, y = meet(t, tcp, l)
		budget.Set(old)
		if x.(*endpoint).slot != place {
			t.Fatal("another slot was taken")
		}
		used := budget.Used()
		if least := int64(2 * (1<<20 - ring.Start)); room && used < least || !room && used != 0 {
			t.Errorf("room %v: %d bytes of the budget are taken", room, used)
		}
		if e := x.(*endpoint); room && (!e.shrink() || e.out.Pages() == ring.Start) {
			t.Error("a ring that nobody has looked at before is taken for one that idles")
		}
		resume()
		testenv.Eventually(t, patience, func() error {
			for _, r := range place.rings {
				if n := resident(t, r[:]); n > os.Getpagesize() {
					return fmt.Errorf("%d bytes of an idle connection's ring", n)
				}
			}
			if n := budget.Used(); n != 0 {
				return fmt.Errorf("%d bytes of the budget", n)
			}
			return nil
		})
		for _, e := range []session.Endpoint{x, y, first, firstHere} {
			end(e)
		}
	}
}

// What an ended connection left in its ring counts in the budget of the process that wrote
// it, at either end, exactly as long as the peer may read it.
func TestUnreadRingCountsInTheBudget(t *testing.T) {
	leaks(t)
	for _, dialer := range []bool{true, false} {
		for _, peer := range []string{"reads", "aborts", "dies"} {
			t.Run(fmt.Sprintf("dialer=%v,%s", dialer, peer), func(t *testing.T) {
				tcp, l := listen(t, "127.0.0.1:0", Config{})
				first, firstHere := meet(t, tcp, l) // keeps the link
				defer end(first)
				defer end(firstHere)
				x, y := meet(t, tcp, l)
				if !dialer {
					x, y = y, x
				}
				a, b := newPeer(x), newPeer(y)
				defer end(b)
				e := x.(*endpoint)
				defer withoutJanitor(e.link)() // this test is it
				msg := make([]byte, 4096)
				n := uint64(0)
				for ; e.out.Pages() < 1<<20; n++ {
					pattern(msg, n)
					if !a.send(msg) {
						t.Fatal(a.Err())
					}
				}
				end(a)
				for range cacheTicks + 1 {
					if !e.link.slots.reclaim(e.side, e.link.ended()) {
						t.Error("the janitor need not come again, though the peer may read what is there")
					}
				}
				if used := budget.Used(); used != 1<<20-ring.Start {
					t.Errorf("%d bytes of the budget are taken by a MiB that nobody has read", used)
				}
				var ev session.Event
				for i := uint64(0); peer == "reads" && i < n; i++ {
					pattern(msg, i)
					if !b.poll(&ev) || !bytes.Equal(ev.Msg, msg) {
						t.Fatalf("message %d of %d is wrong: %v", i, n, b.Err())
					}
					b.Drop()
				}
				switch peer {
				case "aborts":
					abort(b)
				case "dies":
					e.link.die(errPeerGone)
				}
				b.Poll(&ev) // says how far it has come
				if e.link.slots.reclaim(e.side, e.link.ended()) {
					t.Error("the janitor has to come again")
				}
				if used := budget.Used(); used != 0 {
					t.Errorf("%d bytes of the budget are taken by what nobody will read", used)
				}
				if n := resident(t, x.(*endpoint).slot.rings[e.side]); n > os.Getpagesize() { // a slice of an array touches it
					t.Errorf("%d bytes are left for nobody", n)
				}
			})
		}
	}
}

// A connection on a slot whose pages the janitor is giving back begins when that is done;
// one that is refused leaves them as they were.
func TestConnectionMeetsTheJanitorOnItsSlot(t *testing.T) {
	leaks(t)
	tcp, l := listen(t, "127.0.0.1:0", Config{Backlog: 1})
	first, firstHere := meet(t, tcp, l) // keeps the link
	defer end(first)
	defer end(firstHere)
	k := firstHere.(*endpoint).link
	defer withoutJanitor(k, first.(*endpoint).link)() // this test is it
	const left = 1 << 20
	next := (k.slots.list())[first.(*endpoint).slot.number+1:][:2]
	for _, s := range next {
		budget.Take(left-ring.Start, true)
		s.pages.put(left)
	}
	if !next[0].pages.bytes.CompareAndSwap(left, reclaiming) {
		t.Fatal("the slot is taken")
	}
	type result struct {
		ep  session.Endpoint
		err error
	}
	dialed := make(chan result)
	go func() {
		ep, err := dial(tcp.Addr(), Config{Timeout: patience})
		dialed <- result{ep, err}
	}()
	for range 200_000 { // some ten milliseconds: long enough for one that does not wait
		runtime.Gosched()
	}
	next[0].pages.bytes.Store(left)
	x := <-dialed
	if x.err != nil {
		t.Fatal(x.err)
	}
	defer end(x.ep)
	_, err := dial(tcp.Addr(), Config{})
	wantReason(t, err, session.ReasonResources) // a full backlog
	if n := next[1].pages.bytes.Load(); n != left {
		t.Errorf("a connection that was refused has left %d bytes of %d", n, left)
	}
	y, _, _, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer end(y)
	if e := y.(*endpoint); e.slot != next[0] || e.out.Pages() != left || e.slot.pages.bytes.Load() != 0 {
		t.Errorf("slot %d has %d bytes, %d are left", e.slot.number, e.out.Pages(), e.slot.pages.bytes.Load())
	}
}

// The janitor wakes a sender that may have found it at the ring: nobody else would.
func TestSenderThatFoundTheJanitorIsWoken(t *testing.T) {
	a, b := pair(t, Config{RingMax: 1 << 20})
	e := a.Endpoint.(*endpoint)
	defer withoutJanitor(e.link)() // this test is it
	for e.out.Limit() == ring.Start {
		a.send(make([]byte, 4096))
	}
	for ev := new(session.Event); b.Poll(ev); {
		b.Drop()
	}
	for range 2 { // it has to find the ring as it was
		e.shrink()
	}
	if e.out.Limit() != ring.Start {
		t.Fatal("the ring did not shrink")
	}
	if !a.out.sleep() {
		t.Fatal("nobody said that the janitor is gone")
	}
}

// withoutJanitor keeps the janitor from the links until resume is called.
func withoutJanitor(links ...*link) (resume func()) {
	for _, k := range links {
		r := &k.reclaim
		r.mu.Lock()
		for r.active && !r.timer.Stop() { // it is at work
			r.mu.Unlock()
			runtime.Gosched()
			r.mu.Lock()
		}
		r.active = true
		r.mu.Unlock()
	}
	return func() {
		for _, k := range links {
			r := &k.reclaim
			r.mu.Lock()
			r.active = false
			r.startLocked()
			r.mu.Unlock()
		}
	}
}

// resident is how much of a mapping there is memory for.
func resident(t *testing.T, b []byte) (n int) {
	t.Helper()
	pages := make([]byte, len(b)/os.Getpagesize())
	if _, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), uintptr(unsafe.Pointer(&pages[0]))); errno != 0 {
		t.Fatal(errno)
	}
	for _, in := range pages {
		n += int(in&1) * os.Getpagesize()
	}
	return n
}
