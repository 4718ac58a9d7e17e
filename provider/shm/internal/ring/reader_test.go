package ring

import (
	"math/rand"
	"sync"
	"testing"
	"time"
)

func TestCellsKeepTheirPlace(t *testing.T) {
	p := newPipe(t, minMax)
	sizes := map[uint64]int{}
	sent := uint64(0)
	put := func(n int, control bool) bool {
		if control && !p.sendControl(n, sent) || !control && !p.send(n, sent) {
			return false
		}
		sizes[sent] = n
		sent++
		return true
	}
	for put(1000, false) {
	}
	for range Spares {
		if !put(MaxControl, true) {
			t.Fatal("no room for control")
		}
	}
	next := uint64(0)
	take := func(keep bool) {
		t.Helper()
		if !is(p.poll(), sizes[next], next) {
			t.Fatalf("message %d came out of order", next)
		}
		next++
		if keep {
			p.Keep()
		} else {
			p.Drop()
		}
	}
	// Room is freed bit by bit, so that some control messages go in the ring, and some in cells.
	r := rand.New(rand.NewSource(5))
	for range 5000 {
		switch {
		case next < sent && r.Intn(2) == 0:
			take(r.Intn(3) == 0)
		case r.Intn(2) == 0:
			put(1+r.Intn(MaxControl), true)
		default:
			put(8+r.Intn(3000), false)
		}
		for p.Front() != nil && r.Intn(2) == 0 {
			p.Release()
		}
	}
	for next < sent {
		take(false)
	}
}

// A control message that was sent while data was being filled in is read before that data, and after
// earlier messages, whatever the reader looks at in the meantime.
func TestCellsKeepTheirPlaceWhileTheReaderLooks(t *testing.T) {
	p := newPipe(t, minMax)
	const rounds, size, most = 200_000, 16, time.Second // with pauses between statements (.ci/run pauses) it would find more
	began, stop := time.Now(), make(chan struct{})
	var writing sync.WaitGroup
	writing.Go(func() {
		for seq := uint64(0); seq < 3*rounds; {
			select {
			case <-stop:
				return
			default:
			}
			room, _ := p.Reserve(size, size)
			if room == nil {
				continue
			}
			control, _ := p.ReserveControl(size)
			if control == nil {
				p.Commit(0)
				continue
			}
			pattern(control, seq)
			p.CommitControl(size)
			pattern(room, seq+1)
			p.Commit(size)
			for !p.send(size, seq+2) {
				select {
				case <-stop:
					return
				default:
				}
			}
			seq += 3
		}
	})
	defer writing.Wait()
	defer close(stop)
	for seq := uint64(0); seq < 3*rounds && time.Since(began) < most; {
		msg, do := p.Poll()
		p.unbroken(do)
		if msg == nil {
			continue
		}
		if !is(msg, size, seq) {
			t.Fatalf("message %d is not the one that was sent as such", seq)
		}
		p.unbroken(p.Drop())
		seq++
	}
}

// A writer that waits for a cell is woken when one becomes free, although the ring stays full of unread
// data.
func TestCellThatIsGivenBackWakesTheWriter(t *testing.T) {
	p := newPipe(t, minMax)
	n := p.fill(1000, 0)
	for range Spares {
		if !p.sendControl(MaxControl, 0) {
			t.Fatal("no room for control")
		}
	}
	p.Writer.Arm()
	if p.sendControl(MaxControl, 0) {
		t.Fatal("there is a cell more")
	}
	for range n {
		p.poll()
		p.Keep()
	}
	p.poll()
	if do := p.Drop(); do != Wake {
		t.Errorf("the reader returns %v, not Wake", do)
	}
	if !p.sendControl(MaxControl, 0) {
		t.Error("no room for control")
	}
}

// A writer that waits for room is woken once enough is free, and not at every message.
func TestRoomWakesTheWriter(t *testing.T) {
	p := newPipe(t, minMax)
	n := p.fill(1000, 0)
	p.Writer.Arm()
	if p.send(1000, 0) {
		t.Fatal("there is room")
	}
	wakes, at := 0, uint64(0)
	for i := range n {
		p.poll()
		if p.Drop()&Wake != 0 {
			wakes++
			at = i
		}
	}
	if wakes != 1 || at < n/16 || at > n/4 {
		t.Errorf("of %d messages dropped, %d woke, the last one number %d", n, wakes, at)
	}
}

// Kept messages from cells count only while they are kept. Otherwise a long-lived connection would be
// ended because its peer seems to send too many.
func TestKeptMessagesOfCellsAreCountedBack(t *testing.T) {
	p := newPipe(t, minMax)
	for sent := 0; sent < 2*mostCopies; {
		p.fill(1000, 0)
		for p.sendControl(MaxControl, 0) {
			sent++
		}
		for msg, do := p.Poll(); msg != nil; msg, do = p.Poll() {
			p.unbroken(do)
			p.unbroken(p.Keep())
		}
		for p.Front() != nil {
			p.Release()
		}
		p.none() // returns the room
	}
}

// A cell becomes free although its message is kept, so the size of the ring does not bound what a writer
// can make the reader keep in this way. Another bound does.
func TestPayloadThroughCellsIsBounded(t *testing.T) {
	p := newPipe(t, minMax)
	p.fill(1000, 0)
	kept := 0
	for ; kept < 1<<20; kept++ {
		if room, _ := p.ReserveControl(MaxControl); room != nil {
			p.CommitControl(MaxControl)
		}
		if msg, _ := p.Poll(); msg == nil {
			break
		}
		p.Keep()
	}
	if n := len(p.kept.copies); n != mostCopies+1 || p.Reader.Err() == nil {
		t.Errorf("%d messages of cells are kept, %v", n, p.Reader.Err())
	}
	for p.Front() != nil {
		p.Release()
	}
	if n := len(p.kept.copies); n != 0 {
		t.Errorf("%d copies are left", n)
	}
}

// The reader needs memory of its own for each kept message. With the smallest messages that memory is
// bounded by the ring, and it is freed later.
func TestMemoryOfKeptMessagesIsBounded(t *testing.T) {
	for name, gap := range map[string]bool{"one behind another": false, "with gaps": true} {
		t.Run(name, func(t *testing.T) {
			p := newPipe(t, Size)
			sent := p.fill(1, 0)
			if sent < Size/16*9/10 {
				t.Fatalf("only %d messages", sent)
			}
			kept := 0
			for i := range sent {
				p.poll()
				if gap && i%2 == 0 {
					p.Drop()
					continue
				}
				p.Keep()
				kept++
			}
			if n := cap(p.kept.steps) * 4; n > Size/4 {
				t.Errorf("%d bytes for a ring of %d", n, Size)
			}
			for ; kept > 0; kept-- {
				if len(p.Front()) != 1 {
					t.Fatalf("with %d messages to come, one of %d bytes", kept, len(p.Front()))
				}
				p.Release()
			}
			if p.Front() != nil {
				t.Error("a message too many is kept")
			}
			if n := len(p.kept.steps); n > stepsIdle {
				t.Errorf("there is room for %d steps when nothing is kept", n)
			}
			p.none()
			p.send(1, 7) // the ring goes on
			p.poll()
			p.Keep()
			if !is(p.Front(), 1, 7) {
				t.Error("another message")
			}
			p.Release()
		})
	}
}

// The length of a kept message is not read from shared memory again: it does not change, whatever the
// peer writes.
func TestKeptLengthIsTheReadersOwn(t *testing.T) {
	p := newPipe(t, minMax)
	for seq := range uint64(3) {
		p.send(100, seq)
		p.poll()
		p.Keep()
	}
	for i := range p.bytes[:400] {
		p.bytes[i] = 0xff
	}
	for i := range 3 {
		if n := len(p.Front()); n != 100 {
			t.Errorf("message %d has %d bytes", i, n)
		}
		p.Release()
	}
}
