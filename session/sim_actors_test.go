package session_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"time"

	"github.com/sanconn/san/session"
)

const (
	// offeredInline is how many bytes of a large Write are in its offer's message. If a Read takes
	// exactly these, the next one, with room for the rest, has no bytes yet when the offer is withdrawn.
	offeredInline = 1 << 10
	cutWrite      = 50_000
	readWhole     = 150_000

	usedWrite = 0xEE // what the test fills a slice with after Write has returned
	usedRead  = 0x77 // … and after Read did
)

func split(r *rand.Rand, b []byte) (v [][]byte) {
	for len(b) > 0 {
		n := min(len(b), int(duration(r, 1, 20_000)))
		v = append(v, b[:n:n])
		b = b[n:]
	}
	return v
}

var errDead = errors.New("dead")

var errWrongBytes = errors.New("wrong bytes")

func (p *party) writes() {
	r := rand.New(rand.NewPCG(p.seed, uint64(10+p.id)))
	total := p.total
	moveAt := rand.New(rand.NewPCG(p.seed, uint64(40+p.id))).Int64N(2*total + 1) // in half of the runs this is after the end
	for pos := int64(0); pos < total; {
		if pos >= moveAt && p.movedTo.Load() < 0 {
			p.movesBack(pos)
		}
		n := int(duration(r, 1, longest))
		switch {
		case p.cuts():
			n = cutWrite
		case p.long:
			n = int(duration(r, 1, longWrite))
		}
		n = int(min(int64(n), total-pos))
		b := make([]byte, n)
		stream(b, p.seed, p.id, pos)
		k, err := p.writesOnce(r, b)
		fill(b, usedWrite)
		if k < 0 || k > n || (k < n) != (err != nil) && !errors.Is(err, errShortLoan) {
			p.errorf("%d: Write of %d bytes: %d, %v", p.id, n, k, err)
			return
		}
		pos += int64(k)
		if p.ep.Killed() {
			p.writeErr = errDead // there is no process any more to which Write could return
			return
		}
		p.accepted.Store(pos)
		p.logf("%d: Write %d: %d, %v → %d", p.id, n, k, err, pos)
		if errors.Is(err, errShortLoan) {
			continue
		}
		if errors.Is(err, session.ErrInterrupted) {
			if !p.cuts() {
				p.rest(r)
			} else if r.IntN(4) == 0 { // possibly the last Write
				total = min(total, pos+int64(duration(r, 1, 2000)))
			}
			p.s.InterruptWrite(false)
			continue
		}
		if err != nil {
			p.writeErr = err
			return
		}
		if r.IntN(8) == 0 {
			p.rest(r)
		}
	}
	if p.end == lastByte && p.id == p.who {
		return // Close also ends the stream
	}
	p.lendsForEver(r)
	if err := p.s.CloseWrite(); err != nil {
		p.writeErr = err
	}
	p.logf("%d: CloseWrite: %v", p.id, p.writeErr)
}

// movesBack sends the peer a note that its stream ends here at pos.
func (p *party) movesBack(pos int64) {
	at := p.s.WritePosition()
	err := p.s.SendNote(u64(at))
	p.logf("%d: a note: %d, %v", p.id, at, err)
	unaware := p.end == earlyClose && p.who != p.id && int64(at) < pos // a Write that meets the peer's end succeeds, but its bytes are not counted
	if err == nil && int64(at) != pos && !unaware {
		p.errorf("%d: it moves back at %d of %d", p.id, at, pos)
	}
	p.movedTo.Store(int64(at))
}

// sawNote is called with the peer's note of the position at which its stream ends.
func (p *party) sawNote(note []byte) {
	if note == nil {
		return // the end of the connection
	}
	at := le.Uint64(note)
	p.logf("%d: the peer moves back at %d", p.id, at)
	if was := p.peerMove.Swap(int64(at)); was >= 0 {
		p.errorf("%d: the peer moves back at %d, and before that at %d", p.id, at, was)
	}
}

// writesOnce writes b, or as much of it as one call takes, in one of the possible ways.
func (p *party) writesOnce(r *rand.Rand, b []byte) (n int, err error) {
	if p.cuts() && r.IntN(4) > 0 {
		// The time in which the offer comes to the peer and its read begins, which the interrupt should
		// meet.
		d := time.Duration(3 * r.Float64() * float64(p.net.MaxLatency))
		defer time.AfterFunc(d, func() { p.s.InterruptWrite(true) }).Stop()
	}
	switch {
	case p.lends(r):
		return p.writesLent(r, b)
	case r.IntN(4) > 0:
		return p.s.Write(b)
	}
	v := split(r, b)
	pieces := len(v)
	k, err := p.s.WriteBuffers(v)
	if len(v) != pieces {
		p.errorf("%d: WriteBuffers changed its argument", p.id)
	}
	return int(k), err
}

func (p *party) reads() {
	r := rand.New(rand.NewPCG(p.seed, uint64(20+p.id)))
	header := false
	var old [][]byte // slices of Reads that returned
	defer func() {
		for _, b := range old {
			if i := changed(b, usedRead); i >= 0 {
				p.errorf("%d: byte %d of %d was touched after Read returned", p.id, i, len(b))
				return
			}
		}
	}()
	for {
		size := int(duration(r, 1, readWhole))
		if p.cut && !p.cuts() {
			size = readWhole
			if header = !header; header {
				size = offeredInline
			}
		}
		if p.lends(r) {
			if p.readErr = p.readsLent(r); p.readErr != nil {
				return
			}
			continue
		}
		b := make([]byte, size)
		n, err := p.s.Read(b)
		header = header && n == len(b)
		if n < 0 || n > len(b) || n == 0 && err == nil || n > 0 && err != nil {
			p.errorf("%d: Read of %d bytes: %d, %v", p.id, len(b), n, err)
			return
		}
		if !p.isNext(b[:n]) {
			p.readErr = errWrongBytes
			return
		}
		fill(b, usedRead)
		if old = append(old, b); len(old) > 20 {
			if i := changed(old[0], usedRead); i >= 0 {
				p.errorf("%d: byte %d of %d was touched after Read returned", p.id, i, len(old[0]))
			}
			old = old[1:]
		}
		p.received += int64(n)
		p.logf("%d: Read %d: %d, %v → %d", p.id, len(b), n, err, p.received)
		if p.readErr = p.readEnd(r, err); p.readErr != nil {
			return
		}
		if r.IntN(8) == 0 {
			p.rest(r)
		}
	}
}

// readEnd returns why reading ends after a Read that returned err, or nil if it goes on.
func (p *party) readEnd(r *rand.Rand, err error) error {
	if errors.Is(err, session.ErrInterrupted) {
		p.rest(r)
		p.s.InterruptRead(false)
		return nil
	}
	if p.end == lastByte && p.id == p.who && p.received == p.peer().total {
		return io.EOF
	}
	return err
}

// isNext reports whether b are the next bytes of the peer's stream, and aborts if not.
func (p *party) isNext(b []byte) bool {
	want := make([]byte, len(b))
	stream(want, p.seed, 1-p.id, p.received)
	if bytes.Equal(b, want) {
		return true
	}
	i := 0
	for b[i] == want[i] {
		i++
	}
	p.errorf("%d: wrong byte at %d (%d of %d in this Read): %x instead of %x", p.id, p.received+int64(i), i, len(b), b[i:min(len(b), i+8)], want[i:min(len(b), i+8)])
	p.whereFrom(b[i:])
	p.s.Abort()
	return false
}

// whereFrom reports which bytes of the stream came instead.
func (p *party) whereFrom(b []byte) {
	all := make([]byte, p.peer().total)
	stream(all, p.seed, 1-p.id, 0)
	if len(b) > 64 {
		b = b[:64]
	}
	p.errorf("%d: %d bytes there are those of position %d", p.id, len(b), bytes.Index(all, b))
}

// rest lets some time pass, at times more than anything else takes. Now and then the connection is idle
// for long enough to give back its send buffer and inbox.
func (p *party) rest(r *rand.Rand) {
	if p.pry {
		return
	}
	least, most := time.Microsecond, 20*time.Millisecond
	if r.IntN(6) == 0 && !p.real {
		least, most = most, 3*time.Second
	}
	nap(duration(r, least, most))
}

// disturbs interrupts, sends urgent data and changes settings, until reading and writing have ended.
func (p *party) disturbs() {
	r := rand.New(rand.NewPCG(p.seed, uint64(30+p.id)))
	often := pick(r, 0, 0, 50*time.Microsecond, 2*time.Millisecond)
	if often == 0 {
		return
	}
	last := uint64(0)
	for range 300 { // not longer: some seeds interrupt faster than any byte moves
		select {
		case <-p.stop:
			return
		case <-time.After(duration(r, often/10, often*10)):
		}
		switch r.IntN(6) {
		case 0:
			p.s.InterruptRead(true)
		case 1:
			p.s.InterruptWrite(true)
		case 2:
			b := binary.LittleEndian.AppendUint64(nil, p.urgentSent.Add(1))
			_, err := p.s.WriteUrgent(b)
			p.logf("%d: WriteUrgent: %v", p.id, err)
		case 3:
			b := make([]byte, 100)
			n, err := p.s.ReadUrgent(b)
			if errors.Is(err, session.ErrNoUrgent) {
				continue
			}
			got := uint64(0)
			if n == 8 {
				got = binary.LittleEndian.Uint64(b)
			}
			if err != nil || n != 8 || got <= last || got > p.peer().urgentSent.Load() {
				p.errorf("%d: urgent data: %d bytes, %d after %d, %v", p.id, n, got, last, err)
			}
			last = got
		case 4:
			p.s.KeepAlivePeriod(duration(r, 10*time.Second, 30*time.Second))
		case 5:
			p.s.Stats()
		}
	}
}

// pries polls without pause while a Read waits, so that its polls find what ends the transfers into the
// Read's slice.
func (p *party) pries() {
	b := make([]byte, 100)
	for {
		select {
		case <-p.stop:
			return
		default:
			p.s.ReadUrgent(b)
		}
	}
}
