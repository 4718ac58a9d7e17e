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
	"github.com/sanconn/san/provider/shm/internal/quota"
	"github.com/sanconn/san/provider/shm/internal/ring"
	"github.com/sanconn/san/session"
)

// fullRing returns a connection whose ring is full of messages of unreadSize bytes.
func fullRing(t *testing.T) (a, b *peer, unread int) {
	t.Helper()
	a, b = pair(t, Config{ringMax: 1 << 20})
	for ; ; unread++ {
		buf := a.Reserve(unreadSize, unreadSize)
		if buf == nil {
			return a, b, unread
		}
		pattern(buf, uint64(unread))
		a.Commit(len(buf))
	}
}

const unreadSize = 4096

// wantPattern polls for message i, which has size bytes.
func wantPattern(t *testing.T, b *peer, size, i int) {
	t.Helper()
	want := make([]byte, size)
	pattern(want, uint64(i))
	var ev session.Event
	if !b.poll(&ev) || !bytes.Equal(ev.Msg, want) {
		t.Fatalf("message %d is wrong: %v", i, b.Err())
	}
}

// readPatterns reads n messages of size bytes.
func readPatterns(t *testing.T, b *peer, size, n int) {
	t.Helper()
	for i := range n {
		wantPattern(t, b, size, i)
		b.Drop()
	}
}

// Unread messages make the ring grow to its full size, and control messages still get through: also if a
// control message has to wait for messages that were kept.
func TestRingGrowsWhileNobodyReads(t *testing.T) {
	a, b, unread := fullRing(t)
	if n := unread * unreadSize; n < 9<<20/10 {
		t.Errorf("the ring holds %d bytes of 1 MiB", n)
	}
	if budget().Used() != 1<<20-ring.Start {
		t.Errorf("budget used: %d", budget().Used())
	}
	for i := range unread {
		wantPattern(t, b, unreadSize, i)
		b.Keep()
	}
	for i := range 1000 {
		buf := a.reserveControl(session.MaxControl)
		pattern(buf, uint64(i))
		a.CommitControl(len(buf))
		wantPattern(t, b, session.MaxControl, i)
		b.Drop()
	}
	if a.Reserve(unreadSize, unreadSize) != nil {
		t.Error("there is room though nothing was released")
	}
	msg := make([]byte, unreadSize)
	for i := range unread {
		pattern(msg, uint64(i))
		if !bytes.Equal(b.Front(), msg) {
			t.Fatalf("kept message %d is wrong", i)
		}
		b.Release()
	}
	if ev := new(session.Event); b.Poll(ev) {
		t.Errorf("an event too many: %+v", ev)
	}
}

func TestRingShrinksWhenIdle(t *testing.T) {
	a, b, unread := fullRing(t)
	readPatterns(t, b, unreadSize, unread)
	if ev := new(session.Event); b.Poll(ev) {
		t.Errorf("an event too many: %+v", ev)
	}
	testenv.Eventually(t, patience, func() error {
		if n := a.Endpoint.(*endpoint).out.Pages(); n != ring.Start {
			return fmt.Errorf("the ring did not shrink: %d", n)
		}
		return nil
	})
	msg := make([]byte, unreadSize)
	for i := range 3000 {
		pattern(msg, uint64(i))
		if !a.send(msg) {
			t.Fatalf("message %d after shrinking: %v", i, a.Err())
		}
		wantPattern(t, b, unreadSize, i)
		b.Drop()
	}
}

// If the name is in a directory, memory to which rings have grown is not returned while the link lives:
// the peer may be in another container, and could block the process that returns it. Instead each slot
// that was used counts as a connection.
func TestRingsOfADirectoryStayAsTheyAre(t *testing.T) {
	leaks(t)
	cfg := Config{Dir: t.TempDir()}
	l := listenAt(t, freePort(t), cfg)
	meet := func() (a, b session.Endpoint) {
		t.Helper()
		a, err := dial(place{port: l.at.port, name: l.at.name}, cfg)
		if err != nil {
			t.Fatal(err)
		}
		if b, err = l.accept(); err != nil {
			t.Fatal(err)
		}
		return a, b
	}
	before := held.connections.Used()
	first, firstHere := meet() // keep the link
	both := []*link{first.(*endpoint).link, firstHere.(*endpoint).link}
	defer withoutReclaimer(both...)() // this test takes the reclaimer's place
	x, y := meet()
	z, w := meet()
	const grown = 1 << 20
	a, b := newPeer(y), newPeer(x) // what the accepting end sends
	n := 0
	for msg := make([]byte, unreadSize); y.(*endpoint).out.Pages() < grown; n++ {
		pattern(msg, uint64(n))
		if !a.send(msg) {
			t.Fatal(a.Err())
		}
	}
	readPatterns(t, b, unreadSize, n)
	b.Poll(new(session.Event)) // reports how far it has read
	pass := func(when string) {
		t.Helper()
		for range cacheTicks + 1 {
			for _, k := range both {
				k.sweep()
			}
		}
		if used := budget().Used(); used != grown-ring.Start {
			t.Errorf("%s: budget used: %d", when, used)
		}
		if used := held.connections.Used() - before; used != 3 {
			t.Errorf("%s: %d connections count", when, used)
		}
	}
	pass("while they live")
	for _, e := range []session.Endpoint{x, y, z, w} {
		end(e)
	}
	pass("behind their end")
	x, y = meet()
	pass("one more, on a slot of before")
	for _, e := range []session.Endpoint{x, y, first, firstHere} {
		end(e)
	}
}

// useSlot lets a connection's ring take n messages, and returns its slot when that is free again.
func useSlot(t *testing.T, l *served, n int) *slot {
	t.Helper()
	x, y := meet(t, l)
	k, used := x.(*endpoint).link, x.(*endpoint).slot
	a, b := newPeer(x), newPeer(y)
	msg := make([]byte, session.MaxControl)
	for i := range n {
		pattern(msg, uint64(i))
		if !a.send(msg) {
			t.Fatal(a.Err())
		}
	}
	readPatterns(t, b, len(msg), n)
	end(a)
	end(b)
	awaitFree(t, k, used)
	return used
}

func awaitFree(t *testing.T, k *link, s *slot) {
	t.Helper()
	testenv.Eventually(t, patience, func() error {
		k.slots.mu.Lock()
		defer k.slots.mu.Unlock()
		k.slots.reapLocked(len(k.slots.leaving)) // as a dial does if no slot is free
		if !slices.Contains(k.slots.free, s) {
			return errors.New("the slot is not free")
		}
		return nil
	})
}

// Pages that one connection has touched are used by the next one on the slot. If there is none, they are
// returned.
func TestFreeSlotStaysWarmAndCools(t *testing.T) {
	leaks(t)
	l := listen(t, Config{})
	first, firstHere := meet(t, l) // keep the link
	defer end(first)
	defer end(firstHere)
	k := first.(*endpoint).link
	defer withoutReclaimer(k)() // this test takes the reclaimer's place
	const many = 1 << 20 / session.MaxControl
	warm := useSlot(t, l, many)
	grown := resident(t, warm.own.ring)
	if grown < 1<<20 {
		t.Fatalf("%d bytes after a MiB", grown)
	}
	reclaimSlots(k)
	if useSlot(t, l, 1) != warm { // keeps the pages warm, although its own ring has not grown
		t.Fatal("another slot was taken")
	}
	for range cacheTicks - 1 {
		if !reclaimSlots(k) {
			t.Error("the reclaimer need not come again, though a slot is warm")
		}
		if n := resident(t, warm.own.ring); n != grown {
			t.Errorf("%d of %d bytes are left before their time", n, grown)
		}
	}
	if reclaimSlots(k) {
		t.Error("the reclaimer has to come again")
	}
	if n := resident(t, warm.own.ring); n > os.Getpagesize() { // to slice the array reads its first page
		t.Errorf("%d bytes are left for nobody", n)
	}
	k.slots.mu.Lock()
	k.slots.free = []*slot{warm}
	k.slots.mu.Unlock()
	if useSlot(t, l, many) != warm { // as if the pages were new
		t.Fatal("another slot was taken")
	}
}

// The pages that a connection inherits with a warm slot are charged to the budget while it has them.
// They are returned when it idles, or at once if the budget is exceeded.
func TestIdleConnectionOnAWarmSlotCools(t *testing.T) {
	leaks(t)
	for _, room := range []bool{true, false} {
		l := listen(t, Config{})
		first, firstHere := meet(t, l) // keep the link
		k := first.(*endpoint).link
		x, y := meet(t, l)
		a, b := newPeer(x), newPeer(y)
		place := x.(*endpoint).slot
		for range 1 << 20 / session.MaxControl {
			a.send(make([]byte, session.MaxControl))
			b.send(make([]byte, session.MaxControl))
		}
		end(a)
		end(b)
		awaitFree(t, k, place)
		resume := withoutReclaimer(k, firstHere.(*endpoint).link)
		others := uint64(ring.Start)
		for !room && k.slots.memory.Take(4*ring.Sure, true) { // as other rings would, until more is taken than there is
			others += 4 * ring.Sure
		}
		if !room { // except what the connection needs
			others -= 4 * ring.Sure
			k.slots.memory.Return(4*ring.Sure + ring.Start)
		}
		x, y = meet(t, l)
		k.slots.memory.Return(others)
		if x.(*endpoint).slot != place {
			t.Fatal("another slot was taken")
		}
		used := budget().Used()
		if least := int64(2 * (1<<20 - ring.Start)); room && used < least || !room && used != 0 {
			t.Errorf("room %v: %d bytes of the budget are taken", room, used)
		}
		if e := x.(*endpoint); room && (!e.shrink() || e.out.Pages() == ring.Start) {
			t.Error("a ring that nobody has looked at before is taken for one that idles")
		}
		resume()
		testenv.Eventually(t, patience, func() error {
			for _, r := range [][]byte{place.own.ring, place.peers.ring} {
				if n := resident(t, r); n > os.Getpagesize() {
					return fmt.Errorf("%d bytes of an idle connection's ring", n)
				}
			}
			if n := budget().Used(); n != 0 {
				return fmt.Errorf("%d bytes of the budget", n)
			}
			return nil
		})
		for _, e := range []session.Endpoint{x, y, first, firstHere} {
			end(e)
		}
	}
}

// The ring of a connection that the peer has not taken yet is not empty, although the last connection on
// the slot was read up to the same position, and the peer's report of that position is still there.
func TestRingThatNobodyHasTakenIsNotIdle(t *testing.T) {
	leaks(t)
	l := listen(t, Config{})
	first, firstHere := meet(t, l) // keep the link
	k := first.(*endpoint).link
	defer withoutReclaimer(k, firstHere.(*endpoint).link)() // this test takes the reclaimer's place
	const many = 1 << 20 / session.MaxControl
	x, y := meet(t, l)
	warm := x.(*endpoint).slot
	msg := make([]byte, session.MaxControl)
	write := func(ep session.Endpoint) *peer {
		p := newPeer(ep)
		for i := range many {
			pattern(msg, uint64(i))
			p.send(msg)
		}
		return p
	}
	read := func(ep session.Endpoint) *peer {
		p := newPeer(ep)
		readPatterns(t, p, len(msg), many)
		p.Poll(new(session.Event)) // reports how far it has read
		return p
	}
	end(write(x))
	end(read(y))
	awaitFree(t, k, warm)
	k.slots.mu.Lock()
	k.slots.free = []*slot{warm, k.slots.free[0]}
	k.slots.mu.Unlock()

	l.mu.Lock() // keeps the accepting end from taking the connection
	between, err := Dial(t.Context(), l.at.port, l.at.name, l.at.user, Config{timeout: patience})
	if err == nil {
		x, err = Dial(t.Context(), l.at.port, l.at.name, l.at.user, Config{timeout: patience})
	}
	if err != nil || x.(*endpoint).slot != warm {
		l.mu.Unlock()
		t.Fatalf("not on the slot of before: %v", err)
	}
	write(x)
	for range 2 {
		if !x.(*endpoint).shrink() {
			t.Error("the ring is taken for one that idles")
		}
	}
	l.mu.Unlock()
	betweenHere, err := l.accept()
	if err == nil {
		y, err = l.accept()
	}
	if err != nil {
		t.Fatal(err)
	}
	read(y)
	for _, e := range []session.Endpoint{x, y, between, betweenHere, first, firstHere} {
		end(e)
	}
}

// What an ended connection has left in its ring is charged to the budget of the process that wrote it,
// at either end, exactly as long as the peer may read it.
func TestUnreadRingCountsInTheBudget(t *testing.T) {
	leaks(t)
	for _, dialer := range []bool{true, false} {
		for _, peer := range []string{"reads", "aborts", "dies"} {
			t.Run(fmt.Sprintf("dialer=%v,%s", dialer, peer), func(t *testing.T) {
				l := listen(t, Config{})
				first, firstHere := meet(t, l) // keep the link
				defer end(first)
				defer end(firstHere)
				x, y := meet(t, l)
				if !dialer {
					x, y = y, x
				}
				a, b := newPeer(x), newPeer(y)
				defer end(b)
				e := x.(*endpoint)
				defer withoutReclaimer(e.link)() // this test takes the reclaimer's place
				msg, n := make([]byte, unreadSize), 0
				for ; e.out.Pages() < 1<<20; n++ {
					pattern(msg, uint64(n))
					if !a.send(msg) {
						t.Fatal(a.Err())
					}
				}
				end(a)
				for range cacheTicks + 1 {
					if !reclaimSlots(e.link) {
						t.Error("the reclaimer need not come again, though the peer may read what is there")
					}
				}
				if used := budget().Used(); used != 1<<20-ring.Start {
					t.Errorf("%d bytes of the budget are taken by a MiB that nobody has read", used)
				}
				switch peer {
				case "reads":
					readPatterns(t, b, unreadSize, n)
				case "aborts":
					abort(b)
				case "dies":
					e.link.die(errPeerGone)
				}
				b.Poll(new(session.Event)) // reports how far it has read
				if reclaimSlots(e.link) {
					t.Error("the reclaimer has to come again")
				}
				if used := budget().Used(); used != 0 {
					t.Errorf("%d bytes of the budget are taken by what nobody will read", used)
				}
				if n := resident(t, e.slot.own.ring); n > os.Getpagesize() { // to slice the array reads its first page
					t.Errorf("%d bytes are left for nobody", n)
				}
			})
		}
	}
}

// A connection on a slot whose pages the reclaimer is returning begins when that is done. A connection
// that is refused leaves the pages as they were.
func TestConnectionMeetsTheReclaimerOnItsSlot(t *testing.T) {
	leaks(t)
	limits := startLimits
	limits.connections = 4 // one user gets two of them
	withLimits(t, limits)
	l := listen(t, Config{})
	first, firstHere := meet(t, l) // keep the link
	defer end(first)
	defer end(firstHere)
	k := firstHere.(*endpoint).link
	defer withoutReclaimer(k, first.(*endpoint).link)() // this test takes the reclaimer's place
	const left = 1 << 20
	next := (k.slots.list())[first.(*endpoint).slot.number+1:][:2]
	for _, s := range next {
		k.slots.memory.Take(left-ring.Start, true)
		s.pages.put(left)
	}
	next[0].pages.mu.Lock()
	type result struct {
		ep  session.Endpoint
		err error
	}
	dialed := make(chan result)
	go func() {
		ep, err := dial(l.at, Config{})
		dialed <- result{ep, err}
	}()
	for range 200_000 { // some ten milliseconds: long enough to notice if it does not wait
		runtime.Gosched()
	}
	next[0].pages.mu.Unlock()
	x := <-dialed
	if x.err != nil {
		t.Fatal(x.err)
	}
	defer end(x.ep)
	_, err := dial(l.at, Config{})
	wantReason(t, err, session.ReasonResources)
	next[1].pages.mu.Lock()
	n := next[1].pages.bytes
	next[1].pages.mu.Unlock()
	if n != left {
		t.Errorf("a connection that was refused has left %d bytes of %d", n, left)
	}
	y, err := l.accept()
	if err != nil {
		t.Fatal(err)
	}
	defer end(y)
	if e := y.(*endpoint); e.slot != next[0] || e.out.Pages() != left || e.slot.pages.bytes != 0 {
		t.Errorf("slot %d has %d bytes, %d are left", e.slot.number, e.out.Pages(), e.slot.pages.bytes)
	}
}

// A sender may have found the reclaimer at its ring, and no room. The reclaimer wakes it, because nobody
// else would.
func TestSenderThatFoundTheReclaimerIsWoken(t *testing.T) {
	a, b := pair(t, Config{ringMax: 1 << 20})
	e := a.Endpoint.(*endpoint)
	defer withoutReclaimer(e.link)() // this test takes the reclaimer's place
	for e.out.Pages() == ring.Start {
		a.send(make([]byte, 4096))
	}
	for ev := new(session.Event); b.Poll(ev); {
		b.Drop()
	}
	for range 2 { // the ring must not have changed since the last pass
		e.shrink()
	}
	if e.out.Pages() != ring.Start {
		t.Fatal("the ring did not shrink")
	}
	if !a.out.sleep() {
		t.Fatal("nobody said that the reclaimer is gone")
	}
}

// reclaimSlots does what the reclaimer does for the slots of a link.
func reclaimSlots(k *link) (again bool) {
	k.mu.Lock()
	reader := k.reader
	k.mu.Unlock()
	return k.slots.reclaim(reader)
}

// withoutReclaimer keeps the reclaimer away from the links until resume is called.
func withoutReclaimer(links ...*link) (resume func()) {
	for _, k := range links {
		k.reclaim.sweeping.Lock()
	}
	return func() {
		for _, k := range links {
			k.reclaim.sweeping.Unlock()
			k.reclaim.schedule()
		}
	}
}

// resident returns how many bytes of a mapping have memory.
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

// If other connections of the peer's user have so much unread that a new one could not even have a ring
// of ring.Start, it is not made, at either end. Later ones are made.
func TestNoConnectionWithoutMemory(t *testing.T) {
	leaks(t)
	l := listen(t, Config{})
	first, firstHere := meet(t, l) // keep the link
	defer end(first)
	defer end(firstHere)
	memory := first.(*endpoint).link.slots.memory // of both ends: they are in one process, and of one user
	taken := uint64(ring.Start)
	for memory.HasSure() && memory.Take(ring.Sure-ring.Start, true) {
		taken += ring.Sure - ring.Start
	}
	refused := func(err error) {
		t.Helper()
		var u *session.Unavailable
		if !errors.As(err, &u) || u.Reason != session.ReasonResources {
			t.Errorf("without memory: %v", err)
		}
	}
	slots := len(first.(*endpoint).link.slots.list())
	for range 2 * firstSlots {
		_, err := dial(l.at, Config{})
		refused(err)
		if !errors.Is(err, unix.ENOBUFS) {
			t.Errorf("%v is no ENOBUFS", err)
		}
	}
	if n := len(first.(*endpoint).link.slots.list()); n != slots {
		t.Errorf("%d slots are %d behind dials in vain", slots, n)
	}

	// The acceptor has no memory, which the dialer cannot know.
	k := first.(*endpoint).link
	defer withoutReclaimer(k, firstHere.(*endpoint).link)()
	k.slots.memory = ring.NewBudget(1 << 30).Of(quota.Own)
	_, err := dial(l.at, Config{}) // it waits for the answer
	refused(err)
	k.slots.memory = memory
	memory.Return(taken)
	x, y := meet(t, l)
	end(x)
	end(y)
}
