package ring

import (
	"bytes"
	"math/rand"
	"testing"
)

// FuzzModel compares a ring with a queue of messages, for any sizes, and any order of reserving,
// committing, abandoning, dropping and keeping messages, while the ring grows, shrinks, wraps and
// rewinds.
func FuzzModel(f *testing.F) {
	for seed := range int64(8) {
		script := make([]byte, 3000)
		rand.New(rand.NewSource(seed)).Read(script)
		f.Add(script)
	}
	f.Add(bytes.Repeat([]byte{0, 255, 2, 0, 255, 2, 5}, 100))                  // more and more is unread
	f.Add(bytes.Repeat([]byte{0, 190, 2, 4, 4, 7, 7}, 300))                    // rewinds and shrinks again and again
	f.Add(append(bytes.Repeat([]byte{0, 90, 2, 1, 20, 5, 4}, 300), 6, 6, 4))   // messages are kept, with gaps
	f.Add(bytes.Repeat([]byte{0, 255, 0, 255, 0, 255, 2, 3, 1, 9, 4, 5}, 200)) // reservations are abandoned
	f.Fuzz(func(t *testing.T, script []byte) { newModel(t).run(script) })
}

// TestModel runs FuzzModel with longer scripts.
func TestModel(t *testing.T) {
	for seed := range int64(8) {
		script := make([]byte, 30_000)
		rand.New(rand.NewSource(seed)).Read(script)
		newModel(t).run(script)
	}
}

// sent is a message in the model.
type sent struct {
	seq uint64
	n   int
}

type model struct {
	*pipe
	seq    uint64
	queued []sent // committed, and not polled
	kept   []sent
	room   []byte // reserved for data
	data   int    // data messages that were neither dropped nor released
}

func newModel(t testing.TB) *model { return &model{pipe: newPipe(t, 1<<20)} }

// run runs a script, in which each byte is an operation, some with an argument.
func (m *model) run(script []byte) {
	for i := 0; i < len(script); i++ {
		arg := byte(0)
		if i+1 < len(script) {
			arg = script[i+1]
		}
		switch script[i] % 10 {
		case 0:
			m.reserve(arg)
			i++
		case 1:
			m.control(arg)
			i++
		case 2:
			m.commit(len(m.room))
		case 3:
			m.commit(int(arg) % (len(m.room) + 1))
			i++
		case 4, 8:
			m.poll(false)
		case 5:
			m.poll(true)
		case 6, 9:
			m.release()
		case 7:
			m.Shrink(m.free)
		}
		if m.out.Unread(&m.back) != (m.data > 0) {
			m.t.Fatalf("unread is %v", m.out.Unread(&m.back))
		}
	}
	m.drain()
}

// size turns a byte into a message size. Small sizes are frequent, and the largest is possible.
func size(arg byte) int { return 1 + min(int(arg)*int(arg)*int(arg)/250, MaxMessage-1) }

func (m *model) reserve(arg byte) {
	most := size(arg)
	least := 1 + int(arg)*(most-1)/511
	room, do := m.Reserve(least, most)
	m.unbroken(do)
	if room != nil && (len(room) < least || len(room) > most) {
		m.t.Fatalf("Reserve(%d, %d) gave %d bytes", least, most, len(room))
	}
	m.room = room
	m.fillRoom()
}

// fillRoom writes to reserved room, so that the test notices if something else writes there, too.
func (m *model) fillRoom() {
	ends(m.room, func(i int) bool { m.room[i] = 0xa5; return true })
}

func (m *model) roomIsMine() {
	if !ends(m.room, func(i int) bool { return m.room[i] == 0xa5 }) {
		m.t.Fatal("reserved room was overwritten")
	}
}

func (m *model) commit(n int) {
	if m.room == nil {
		return
	}
	m.roomIsMine()
	if n > 0 {
		pattern(m.room[:n], m.seq)
		m.queued = append(m.queued, sent{m.seq, n})
		m.seq++
		m.data++
	}
	m.unbroken(m.Commit(n))
	m.room = nil
}

// control sends a control message, or abandons its reservation.
func (m *model) control(arg byte) {
	n := 1 + int(arg)
	room, do := m.ReserveControl(n)
	m.unbroken(do)
	if room == nil || arg%16 == 0 {
		return
	}
	if len(room) != n {
		m.t.Fatalf("ReserveControl(%d) gave %d bytes", n, len(room))
	}
	pattern(room, m.seq|isControl)
	m.unbroken(m.CommitControl(n))
	m.queued = append(m.queued, sent{m.seq | isControl, n})
	m.seq++
}

const isControl = 1 << 63

func (m *model) poll(keep bool) {
	msg, do := m.Poll()
	m.unbroken(do)
	if len(m.queued) == 0 {
		if msg != nil {
			m.t.Fatalf("a message of %d bytes that was not sent", len(msg))
		}
		return
	}
	want := m.queued[0]
	if !is(msg, want.n, want.seq) {
		m.t.Fatalf("message %d: %d bytes of %d, or wrong ones", want.seq&^isControl, len(msg), want.n)
	}
	m.queued = m.queued[1:]
	// If earlier data is kept, data is kept as well, as in a session.
	if want.seq&isControl != 0 || !keep && len(m.kept) == 0 {
		m.unbroken(m.Drop())
		if want.seq&isControl == 0 {
			m.data--
		}
		return
	}
	m.unbroken(m.Keep())
	m.kept = append(m.kept, want)
}

func (m *model) release() {
	msg := m.Front()
	if len(m.kept) == 0 {
		if msg != nil {
			m.t.Fatal("a message that was not kept")
		}
		return
	}
	if want := m.kept[0]; !is(msg, want.n, want.seq) {
		m.t.Fatalf("kept message %d: %d bytes of %d, or wrong ones", want.seq, len(msg), want.n)
	}
	m.kept = m.kept[1:]
	m.data--
	m.unbroken(m.Release())
}

// drain reads everything. Afterwards there must be room for the largest message, and once the ring has
// idled it must use nothing of the budget.
func (m *model) drain() {
	m.commit(len(m.room))
	for len(m.queued) > 0 {
		m.poll(true)
	}
	for len(m.kept) > 0 {
		m.release()
	}
	m.none()
	if m.seq > 0 && m.out.Backlog(&m.back) != 0 {
		m.t.Fatal("the reader holds something back")
	}
	if !m.send(MaxMessage, m.seq) {
		m.t.Fatal("an empty ring has no room")
	}
	if !is(m.pipe.poll(), MaxMessage, m.seq) {
		m.t.Fatal("the last message is wrong")
	}
	m.Drop()
	m.none()
	for range 3 {
		m.Shrink(m.free)
	}
	if n := m.books.Used(); n != 0 || m.Pages() != Start {
		m.t.Fatalf("%d bytes of the budget are in use, %d bytes may have memory", n, m.Pages())
	}
}
