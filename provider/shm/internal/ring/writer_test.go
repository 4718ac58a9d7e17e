package ring

import (
	"testing"

	"github.com/sanconn/san/provider/shm/internal/quota"
)

// A reservation may be committed in part, or not at all.
func TestReservationIsFreeAgain(t *testing.T) {
	p := newPipe(t, Start)
	for seq := range uint64(1000) { // several laps
		if room, _ := p.Reserve(1000, 1000); room == nil {
			t.Fatal("no room")
		}
		p.Commit(0)
		p.none()
		if room, _ := p.ReserveControl(100); room == nil {
			t.Fatal("no room for control")
		} // abandoned
		room, _ := p.Reserve(1, 1000)
		pattern(room[:300], seq)
		p.Commit(300)
		if !is(p.poll(), 300, seq) {
			t.Fatalf("message %d is wrong", seq)
		}
		p.Drop()
	}
}

// A control message can be sent while room is reserved for data. The order is that of the commits.
func TestControlPassesAReservation(t *testing.T) {
	p := newPipe(t, minMax)
	for seq := uint64(0); seq < 10_000; seq += 4 {
		p.send(200, seq)
		room, _ := p.Reserve(3000, 3000)
		if room == nil {
			t.Fatal("no room")
		}
		pattern(room, seq+3)
		for i := range uint64(2) {
			if !p.sendControl(MaxControl, seq+1+i) {
				t.Fatal("no room for control")
			}
		}
		if !is(room, 3000, seq+3) {
			t.Fatal("the reserved room has changed")
		}
		for i, n := range []int{200, MaxControl, MaxControl} {
			if !is(p.poll(), n, seq+uint64(i)) {
				t.Fatalf("message %d is wrong", seq+uint64(i))
			}
			p.Drop()
		}
		p.none()
		p.Commit(3000)
		if !is(p.poll(), 3000, seq+3) {
			t.Fatalf("message %d is wrong", seq+3)
		}
		p.Drop()
	}
}

// While room is reserved for data, there is room for as many control messages as there are cells, and
// for more as soon as the reader has taken some.
func TestCellsBoundControlBesideAReservation(t *testing.T) {
	p := newPipe(t, minMax)
	p.Reserve(1, 1)
	for i := range uint64(Spares) {
		if !p.sendControl(MaxControl, i) {
			t.Fatalf("no room for control message %d", i)
		}
	}
	if p.sendControl(1, 0) {
		t.Fatal("there is a cell more")
	}
	p.Writer.Arm()
	p.poll()
	if do := p.Drop(); do != Wake {
		t.Errorf("a cell is free, and the reader returns %v, not Wake", do)
	}
	if !p.sendControl(1, 0) {
		t.Error("no room though a cell is free")
	}
}

const minMax = 256 << 10

func TestRingGrowsWhileNobodyReadsAndShrinksWhenIdle(t *testing.T) {
	p := newPipe(t, 1<<20)
	grown := false
	sent := uint64(0)
	for ; ; sent++ {
		room, do := p.Reserve(4096, 4096)
		grown = grown || do&Grew != 0
		if room == nil {
			break
		}
		p.Commit(4096)
	}
	if n := sent * 4096; n < 9<<20/10 || !grown {
		t.Errorf("the ring holds %d bytes of 1 MiB; it has grown: %v", n, grown)
	}
	if p.limit.Load() != 1<<20 || p.Pages() != 1<<20 || p.books.Used() != 1<<20-Start {
		t.Errorf("limit %d, pages %d, budget used: %d", p.limit.Load(), p.Pages(), p.books.Used())
	}
	for range sent {
		if again, _ := p.Shrink(p.free); !again || p.limit.Load() != 1<<20 {
			t.Fatal("a ring that is not empty has shrunk")
		}
		p.poll()
		p.Drop()
	}
	p.none()
	p.Reserve(1, 1) // a reservation that may last long
	p.Shrink(p.free)
	if again, met := p.Shrink(p.free); !again || met || p.Pages() != 1<<20 {
		t.Error("a ring with room reserved has shrunk")
	}
	p.Commit(0)
	if again, met := p.Shrink(p.free); again || !met || p.limit.Load() != Start || p.Pages() != Start || p.books.Used() != 0 {
		t.Errorf("an idle ring: limit %d, pages %d, %d bytes of the budget", p.limit.Load(), p.Pages(), p.books.Used())
	}
	for seq := range uint64(3000) {
		if !p.send(4096, seq) || !is(p.poll(), 4096, seq) {
			t.Fatalf("message %d after shrinking is wrong", seq)
		}
		p.Drop()
	}
}

// The pad before an abandoned reservation is not in memory that Shrink frees.
func TestShrinkAfterAnAbandonedReservation(t *testing.T) {
	p := newPipe(t, 1<<20)
	for seq := range p.fill(4096, 0) {
		if !is(p.poll(), 4096, seq) {
			t.Fatalf("message %d is wrong", seq)
		}
		p.Drop()
	}
	p.none()
	if room, _ := p.Reserve(MaxMessage, MaxMessage); room == nil || p.Writer.tail == p.Writer.published {
		t.Fatal("no pad before it, so this shows nothing")
	}
	p.Commit(0)
	for range 3 {
		p.Shrink(p.free)
	}
	p.none() // takes the pad
	for range 3 {
		p.Shrink(p.free)
	}
	if p.Pages() != Start {
		t.Error("an idle ring has not shrunk")
	}
	if !p.send(100, 1) || !is(p.poll(), 100, 1) {
		t.Error("the message behind the pad is wrong")
	}
}

// A ring that was shrunk after its reader has read everything can grow again, and is charged again.
func TestRingGrowsAgainBehindItsReader(t *testing.T) {
	p := newPipe(t, 1<<20)
	for range p.fill(4096, 0) {
		p.poll()
		p.Drop()
	}
	p.none()
	for range 2 {
		p.Shrink(p.free)
	}
	if p.limit.Load() != Start {
		t.Fatalf("the limit of an idle ring is %d", p.limit.Load())
	}
	n := uint64(0)
	for n < 1<<19/4096 && p.send(4096, n) {
		n++
	}
	if bytes := n * recordSize(4096); bytes > p.limit.Load() || p.books.Used() < int64(p.limit.Load()-Start) {
		t.Errorf("%d bytes are in a ring of %d, for which %d of the budget are taken", bytes, p.limit.Load(), p.books.Used())
	}
	for seq := range n {
		if !is(p.poll(), 4096, seq) {
			t.Fatalf("message %d is wrong", seq)
		}
		p.Drop()
	}
}

// Shrink runs all the time, on a ring that grows, empties and fills.
func TestShrinkMeetsTheWriterAtEveryStep(t *testing.T) {
	p := newPipe(t, 1<<20)
	stop, stopped := make(chan struct{}), make(chan struct{})
	defer func() { close(stop); <-stopped }()
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
				// It does not clear the memory: that would take too long, and would be a race, by the
				// detector's rules, with reads that the positions exclude.
				p.Shrink(func(pages uint64) bool { p.books.Return(pages); return true })
			}
		}
	}()
	const n, rounds = 30 << 10, 20_000
	for sent, seen := uint64(0), uint64(0); seen < rounds; {
		for sent < seen+5 {
			room, do := p.Reserve(n, n)
			p.unbroken(do)
			if room == nil {
				continue // because Shrink is running
			}
			pattern(room[:64], sent)
			p.Commit(n)
			sent++
		}
		for ; seen < sent; seen++ {
			if msg := p.poll(); !is(msg[:64], 64, seen) {
				t.Fatalf("message %d is wrong", seen)
			}
			p.Drop()
		}
		p.none()
	}
}

// A writer that finds Shrink running gets no room, and the caller of Shrink learns of it, so that it can
// wake the writer.
func TestReserveWhileShrinkIsAtWork(t *testing.T) {
	p := newPipe(t, 1<<20)
	for p.limit.Load() == Start {
		p.send(4096, 0)
	}
	for msg, _ := p.Poll(); msg != nil; msg, _ = p.Poll() {
		p.Drop()
	}
	p.Shrink(p.free) // the next one frees only if the ring has not changed since this one
	tried := false
	again, met := p.Shrink(func(pages uint64) bool {
		tried = true
		if p.send(8, 0) {
			t.Error("there is room while the memory is given back")
		}
		if !p.sendControl(8, 0) {
			t.Error("no cell for control meanwhile")
		}
		return p.free(pages)
	})
	if !tried || again || !met || p.limit.Load() != Start {
		t.Fatalf("tried %v, again %v, met %v, limit %d", tried, again, met, p.limit.Load())
	}
	if !p.send(8, 0) {
		t.Error("no room afterwards")
	}
}

func TestRingsStopGrowingAtTheBudget(t *testing.T) {
	p := newPipe(t, Size)
	const most = Sure - Start // a ring also takes memory on the way to Sure
	p.books = NewBudget(most).Of(quota.Own)
	p.Writer.Init(&p.out, &p.spares, p.bytes, &p.back, Size, 0, p.books)
	q, r := newPipe(t, Size), newPipe(t, Size)
	for _, more := range []*pipe{q, r} {
		more.Writer = Writer{}
		more.Writer.Init(&more.out, &more.spares, more.bytes, &more.back, Size, 0, p.books)
	}
	// 256 KiB in 64-byte messages take 320 KiB with their headers.
	for _, p := range []*pipe{p, q} {
		if n := p.fill(1024, 0) * 1024; n < 320<<10 || n > Sure {
			t.Errorf("%d bytes committed with a budget of %d", n, most)
		}
	}
	if n := r.fill(1024, 0) * 1024; n > Start {
		t.Errorf("%d bytes committed when two rings have taken twice the budget", n)
	}
	if !p.books.Exceeded() || p.books.Used() != 2*most {
		t.Errorf("%d bytes of the budget are used", p.books.Used())
	}
}

// What one user has not read leaves another user's rings as much memory.
func TestUsersShareTheBudget(t *testing.T) {
	const most = 8 * Size
	budget := NewBudget(most)
	grown := func(user quota.Holder) (rings int) {
		for ; budget.Of(user).HasSure(); rings++ {
			p := newPipe(t, Size)
			p.Writer = Writer{}
			p.Writer.Init(&p.out, &p.spares, p.bytes, &p.back, Size, 0, budget.Of(user))
			if n := p.fill(1024, 0) * 1024; n < 512<<10 {
				t.Errorf("user %d: ring %d holds %d bytes", user, rings, n)
			}
		}
		return rings
	}
	first := grown(1)
	if used := budget.Used(); used > most {
		t.Errorf("one user has %d bytes of %d", used, 2*most)
	}
	second, own := grown(2), grown(quota.Own)
	if first < 8 || second < 8 || own < 8 || budget.Used() > 2*most {
		t.Errorf("%d, %d and %d rings, of %d bytes", first, second, own, budget.Used())
	}
}

// A ring that has grown to Sure holds 512 KiB, in Writes of any size: a session sends each in messages
// as large as there is room for.
func TestSureHolds512KiB(t *testing.T) {
	const header, piece = 8, 2 << 10 // the session's: a message's header, and the smallest piece that it sends
	for _, size := range []int{300, 1000, 4096, 33000, MaxMessage, 74300, 74500, 512 << 10} {
		p := newPipe(t, Sure)
		p.send(4064, 0) // so that the ring's start is used, too
		p.poll()
		p.Drop()
		p.none()
		bytes := 0
		for left := size; ; {
			var room []byte
			var do Action
			if left == size && size+header <= MaxMessage {
				room, do = p.Reserve(size+header, size+header) // in one message
				p.unbroken(do)
			}
			if room == nil {
				room, do = p.Reserve(min(left, piece)+header, min(left+header, MaxMessage))
				p.unbroken(do)
			}
			if room == nil {
				break
			}
			p.unbroken(p.Commit(len(room)))
			n := len(room) - header
			bytes += n
			if left -= n; left == 0 {
				left = size
			}
		}
		if bytes < 512<<10 {
			t.Errorf("Writes of %d bytes: %d bytes", size, bytes)
		}
	}
}

// A ring that begins with memory is charged as one that has grown.
func TestRingThatInheritsMemory(t *testing.T) {
	p := newPipe(t, Size)
	p.Writer = Writer{}
	p.books.Take(1<<20-Start, true)
	p.Writer.Init(&p.out, &p.spares, p.bytes, &p.back, Size, 1<<20, p.books)
	if p.limit.Load() != Start || p.Pages() != 1<<20 {
		t.Errorf("limit %d, pages %d", p.limit.Load(), p.Pages())
	}
	for p.limit.Load() < 1<<20 && p.send(1000, 0) {
	}
	if p.books.Used() != 1<<20-Start {
		t.Errorf("%d bytes of the budget are used", p.books.Used())
	}
	for msg, _ := p.Poll(); msg != nil; msg, _ = p.Poll() {
		p.Drop()
	}
	if again, _ := p.Shrink(p.free); !again {
		t.Error("a ring that Shrink has not seen before is taken for one that idles")
	}
	if again, _ := p.Shrink(p.free); again || p.books.Used() != 0 {
		t.Errorf("%d bytes of the budget are left", p.books.Used())
	}
}

func TestCommitOfMoreThanWasReserved(t *testing.T) {
	p := newPipe(t, Size)
	p.Reserve(8, 8)
	p.ReserveControl(8)
	for name, commit := range map[string]func(int) Action{"Commit": p.Commit, "CommitControl": p.CommitControl} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s does not panic", name)
				}
			}()
			commit(9)
		}()
	}
}

// A control message that goes in a cell, because the ring has no room, wakes a reader that sleeps.
func TestControlInACellWakesTheReader(t *testing.T) {
	p := newPipe(t, minMax)
	p.fill(1000, 0)
	for p.send(8, 0) {
	}
	p.Reader.Arm()
	if room, _ := p.ReserveControl(16); room == nil {
		t.Fatal("no room for control")
	}
	do := p.CommitControl(16)
	if p.out.spareTail.Load() != 1 {
		t.Fatal("it is not in a cell, so this shows nothing")
	}
	if do&Wake == 0 {
		t.Error("nobody is woken")
	}
}

// Messages that are read as they come use the same few pages again and again.
func TestLightTrafficStaysInItsPages(t *testing.T) {
	p := newPipe(t, Size)
	const n = 1 << 10
	last := uint64(0)
	for seq := range uint64(1000) {
		if !p.send(n, seq) {
			t.Fatal("no room")
		}
		p.poll()
		p.unbroken(p.Drop())
		p.none()
		last = max(last, p.Writer.tail&mask)
	}
	if most := uint64(rewindAt + rewindTry + 2*n); last > most {
		t.Errorf("they come to offset %d, want at most %d", last, most)
	}
}

// A writer that finds a full ring, and has more to send, waits until there is more than a little room.
func TestNoScrapsAtTheEdgeOfAFullRing(t *testing.T) {
	const n = 1 << 10
	p := newPipe(t, Start)
	p.fill(n, 0)
	p.Writer.Arm() // so that it learns at once how much is free
	p.poll()
	p.unbroken(p.Drop())
	if room, do := p.Reserve(1, MaxMessage); room != nil {
		t.Errorf("%d bytes of room", len(room))
	} else {
		p.unbroken(do)
	}
	if !p.send(n/4, 0) {
		t.Error("no room for what has no more")
	}
}
