package ring

import (
	"testing"

	"github.com/sanconn/san/provider/shm/internal/quota"
)

// A pipe is a ring with both of its sides in this process.
type pipe struct {
	Writer
	Reader
	out    Outgoing
	back   Incoming
	spares Cells
	bytes  []byte
	books  Share
	t      testing.TB
}

const plenty = 256 << 20

// newPipe makes a ring that grows to most bytes, with a budget of its own.
func newPipe(t testing.TB, most int) *pipe {
	t.Helper()
	p := &pipe{bytes: make([]byte, Size), books: NewBudget(plenty).Of(quota.Own), t: t}
	p.Writer.Init(&p.out, &p.spares, p.bytes, &p.back, most, 0, p.books)
	p.Reader.Init(&p.out, &p.spares, p.bytes, &p.back)
	return p
}

// free stands in for the system call by which Shrink frees memory.
func (p *pipe) free(pages uint64) bool {
	clear(p.bytes[:pages])
	p.books.Return(pages)
	return true
}

// send sends a message of n bytes with a number, if there is room.
func (p *pipe) send(n int, seq uint64) bool {
	p.t.Helper()
	room, do := p.Reserve(n, n)
	p.unbroken(do)
	if room == nil {
		return false
	}
	pattern(room, seq)
	p.unbroken(p.Commit(n))
	return true
}

// sendControl sends a control message of n bytes with a number, if there is room.
func (p *pipe) sendControl(n int, seq uint64) bool {
	p.t.Helper()
	room, do := p.ReserveControl(n)
	p.unbroken(do)
	if room == nil {
		return false
	}
	pattern(room, seq)
	p.unbroken(p.CommitControl(n))
	return true
}

// fill sends messages of n bytes, numbered from seq on, until there is no room. It returns
// the next number.
func (p *pipe) fill(n int, seq uint64) uint64 {
	p.t.Helper()
	for p.send(n, seq) {
		seq++
	}
	return seq
}

// poll returns the next message, which must have come.
func (p *pipe) poll() []byte {
	p.t.Helper()
	msg, do := p.Poll()
	p.unbroken(do)
	if msg == nil {
		p.t.Fatal("no message")
	}
	return msg
}

// none checks that there is no further message.
func (p *pipe) none() {
	p.t.Helper()
	msg, do := p.Poll()
	p.unbroken(do)
	if msg != nil {
		p.t.Fatalf("a message of %d bytes too many", len(msg))
	}
}

func (p *pipe) unbroken(do Action) {
	p.t.Helper()
	if do&Broken != 0 {
		p.t.Fatalf("broken: writer: %v, reader: %v", p.Writer.Err(), p.Reader.Err())
	}
}

// pattern fills both ends of a message with a number and bytes derived from it.
func pattern(b []byte, seq uint64) {
	ends(b, func(i int) bool { b[i] = patternAt(i, seq); return true })
}

// is reports whether a message is the one that send sent with a number.
func is(msg []byte, n int, seq uint64) bool {
	return len(msg) == n && ends(msg, func(i int) bool { return msg[i] == patternAt(i, seq) })
}

func patternAt(i int, seq uint64) byte { return byte(seq>>(i%8*8)) + byte(i*7) }

// ends calls f for the bytes at both ends of a message, until it returns false.
func ends(b []byte, f func(i int) bool) bool {
	const edge = 64
	for i := 0; i < len(b); i++ {
		if i == edge {
			i = max(i, len(b)-edge)
		}
		if !f(i) {
			return false
		}
	}
	return true
}
