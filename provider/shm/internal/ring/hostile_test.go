package ring

import (
	"encoding/binary"
	"math/rand"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"
)

// breaches are changes of the shared memory that a peer may make, and which side finds each.
var breaches = []struct {
	name   string
	breaks func(p *pipe)
	writer bool
}{
	{"tail beyond the ring", func(p *pipe) { p.out.tail.Store(3 * Size) }, false},
	{"tail that goes back", func(p *pipe) { p.out.tail.Store(8) }, false},
	{"odd tail", func(p *pipe) { p.out.tail.Add(1) }, false},
	{"no header", func(p *pipe) { p.out.tail.Add(64) }, false},
	{"empty record", func(p *pipe) { p.record(kindMessage, 64) }, false},
	{"long record", func(p *pipe) { p.record(kindMessage|MaxMessage+1, 64) }, false},
	{"record beyond the tail", func(p *pipe) { p.record(kindMessage|1000, 64) }, false},
	{"record of another kind", func(p *pipe) { p.record(3<<32|8, 64) }, false},
	{"record across the end of the ring", func(p *pipe) {
		at := p.out.tail.Load()
		putHeader(p.Reader.mem, at, kindPad|(Size-64-at))
		putHeader(p.Reader.mem, Size-64, kindMessage|1000)
		p.out.tail.Store(Size + 1000)
	}, false},
	{"empty pad", func(p *pipe) { p.record(kindPad, 64) }, false},
	{"odd pad", func(p *pipe) { p.record(kindPad|12, 64) }, false},
	{"pad beyond the tail", func(p *pipe) { p.record(kindPad|72, 64) }, false},
	{"pad across the end of the ring", func(p *pipe) { p.record(kindPad|Size, Size) }, false},
	{"pads without end", func(p *pipe) {
		for range 100 {
			p.record(kindPad|8, 8)
		}
	}, false},
	{"tail of cells", func(p *pipe) { p.out.spareTail.Store(1 << 40) }, false},
	{"long cell", func(p *pipe) { p.spares[0].size.Store(1 << 30); p.out.spareTail.Store(1) }, false},
	{"empty cell", func(p *pipe) { p.out.spareTail.Store(1) }, false},
	{"head beyond the tail", func(p *pipe) { p.back.head.Store(1 << 40) }, true},
	{"odd head", func(p *pipe) { p.back.head.Store(1) }, true},
	{"head that goes back", func(p *pipe) { p.back.head.Store(0) }, true},
	{"head inside a pad", func(p *pipe) {
		if p.lapEnd == 0 || p.Writer.tail/Size == p.Writer.head/Size {
			p.t.Fatal("no pad, so this shows nothing")
		}
		p.back.head.Store(p.lapEnd + 8)
	}, true},
	{"head of cells", func(p *pipe) { p.back.spareHead.Store(1) }, true},
}

// A side that finds an impossible value in the shared memory ends with Broken, and reads nothing more.
func TestPeerThatBreaksTheRules(t *testing.T) {
	for _, tc := range breaches {
		t.Run(tc.name, func(t *testing.T) {
			p := newPipe(t, minMax)
			p.send(100, 0)
			p.poll()
			p.Drop()
			p.none() // returns the room
			p.fill(MaxMessage, 0)
			for msg, _ := p.Poll(); msg != nil; msg, _ = p.Poll() {
				p.Drop()
			}
			p.fill(MaxMessage, 0) // now the writer has read the head
			for msg, _ := p.Poll(); msg != nil && !tc.writer; msg, _ = p.Poll() {
				p.Drop()
			}
			tc.breaks(p)
			if tc.writer {
				p.writerIsBroken()
			} else {
				p.readerIsBroken()
			}
		})
	}
}

// A hostile writer begins its next lap over messages that the reader keeps. The reader finds that before
// it keeps twice as much as the ring holds.
func TestMoreIsKeptThanTheRingHolds(t *testing.T) {
	p := newPipe(t, minMax)
	for kept := 0; kept <= Size; kept += 16 {
		p.record(kindMessage|8, 16)
		if msg, _ := p.Poll(); msg == nil {
			t.Fatalf("behind %d bytes: %v", kept, p.Reader.Err())
		}
		if do := p.Keep(); (do&Broken != 0) != (kept == Size) {
			t.Fatalf("behind %d bytes: %v", kept, p.Reader.Err())
		}
	}
	if msg, _ := p.Poll(); msg != nil {
		t.Error("a message from a broken ring")
	}
}

func (p *pipe) writerIsBroken() {
	p.t.Helper()
	broken := Action(0)
	for range 1000 {
		_, do := p.Reserve(MaxMessage, MaxMessage)
		broken |= do
		p.Commit(0)
		_, do = p.ReserveControl(MaxControl)
		broken |= do
		p.CommitControl(p.ctrlRoom)
	}
	if broken&Broken == 0 || p.Writer.Err() == nil {
		p.t.Fatalf("the writer finds %v", p.Writer.Err())
	}
	if room, _ := p.Reserve(1, 1); room != nil {
		p.t.Error("there is room on a broken ring")
	}
	if room, _ := p.ReserveControl(1); room != nil {
		p.t.Error("there is room for control on a broken ring")
	}
}

func (p *pipe) readerIsBroken() {
	p.t.Helper()
	if _, do := p.Poll(); do&Broken == 0 || p.Reader.Err() == nil {
		p.t.Fatalf("the reader finds %v", p.Reader.Err())
	}
	if msg, _ := p.Poll(); msg != nil {
		p.t.Error("a message from a broken ring")
	}
}

// record publishes n bytes after a header, as a hostile writer would.
func (p *pipe) record(h, n uint64) {
	at := p.out.tail.Load()
	putHeader(p.Reader.mem, at, h)
	p.out.tail.Add(n)
}

// FuzzHostile lets a peer write anything anywhere between the calls of both sides. No call panics, loops
// for ever, or returns memory outside the ring.
func FuzzHostile(f *testing.F) {
	for seed := range int64(8) {
		script := make([]byte, 2000)
		rand.New(rand.NewSource(seed)).Read(script)
		f.Add(script)
	}
	f.Fuzz(func(t *testing.T, script []byte) { newHostile(t).run(script) })
}

// TestHostile runs FuzzHostile with more scripts.
func TestHostile(t *testing.T) {
	for seed := range int64(100) {
		script := make([]byte, 4000)
		rand.New(rand.NewSource(seed)).Read(script)
		newHostile(t).run(script)
	}
}

type hostile struct {
	*pipe
	script []byte
	kept   []int // lengths of kept messages
}

func newHostile(t testing.TB) *hostile { return &hostile{pipe: newPipe(t, 1<<20)} }

// next takes a byte of the script, or 0 at its end.
func (h *hostile) next() byte {
	if len(h.script) == 0 {
		return 0
	}
	b := h.script[0]
	h.script = h.script[1:]
	return b
}

func (h *hostile) word() uint64 {
	var b [8]byte
	for i := range b {
		b[i] = h.next()
	}
	return binary.LittleEndian.Uint64(b[:])
}

func (h *hostile) run(script []byte) {
	h.script = script
	for len(h.script) > 0 {
		switch op := h.next() % 32; {
		case op < 8:
			if room, _ := h.Reserve(1, size(h.next())); room != nil {
				h.inside(room)
				h.Commit(len(room) * int(h.next()) / 255)
			}
		case op < 10:
			h.Reserve(1, size(h.next())) // the reservation stays
		case op < 12:
			if room, _ := h.ReserveControl(1 + int(h.next())); room != nil {
				h.CommitControl(len(room))
			}
		case op < 20:
			h.poll()
		case op < 24:
			h.release()
		case op < 26:
			h.Shrink(h.free)
		case op < 28:
			h.Writer.Arm()
			h.Reader.Arm()
		default:
			h.scribble()
		}
	}
	for h.Front() != nil {
		h.release()
	}
	if len(h.kept) > 0 {
		h.t.Fatalf("%d kept messages are missing", len(h.kept))
	}
}

func (h *hostile) poll() {
	msg, _ := h.Poll()
	if msg == nil {
		return
	}
	h.inside(msg)
	if h.next()%2 == 0 {
		h.Drop()
		return
	}
	h.kept = append(h.kept, len(msg))
	h.Keep()
}

func (h *hostile) release() {
	msg := h.Front()
	if msg == nil {
		return
	}
	if len(msg) != h.kept[0] {
		h.t.Fatalf("a message of %d bytes was kept, and has %d", h.kept[0], len(msg))
	}
	h.kept = h.kept[1:]
	h.Release()
}

// inside checks that memory has the length of a possible message, and is in the ring or a cell.
func (h *hostile) inside(b []byte) {
	if len(b) == 0 || len(b) > MaxMessage || cap(b) != len(b) {
		h.t.Fatalf("%d bytes, capacity %d", len(b), cap(b))
	}
	in := func(base unsafe.Pointer, n uintptr) bool {
		from, at := uintptr(base), uintptr(unsafe.Pointer(&b[0]))
		return at >= from && at+uintptr(len(b)) <= from+n
	}
	if !in(unsafe.Pointer(&h.bytes[0]), Size) && !in(unsafe.Pointer(&h.spares), unsafe.Sizeof(h.spares)) {
		h.t.Fatal("memory outside the ring")
	}
}

// scribble changes a word of the shared memory, to any value or to one near it.
func (h *hostile) scribble() {
	control := unsafe.Slice((*uint64)(unsafe.Pointer(&h.out)), unsafe.Sizeof(h.out)/8)
	if h.next()%2 == 0 {
		control = unsafe.Slice((*uint64)(unsafe.Pointer(&h.back)), unsafe.Sizeof(h.back)/8)
	}
	cells := unsafe.Slice((*uint64)(unsafe.Pointer(&h.spares)), unsafe.Sizeof(h.spares)/8)
	ring := unsafe.Slice((*uint64)(unsafe.Pointer(&h.bytes[0])), Size/8)
	var at *uint64
	switch where := h.next(); {
	case where < 100: // the words in use are at the beginnings of the lines
		at = &control[int(where)*8%len(control)+int(h.next())%2]
	case where < 120:
		at = &cells[int(h.next())%16*(len(cells)/Spares)+int(h.next())%2]
	case where < 200: // a header at the position of one side
		at = &ring[h.scan&mask/8]
	case where < 220:
		at = &ring[h.Writer.tail&mask/8]
	default:
		at = &ring[h.word()%(64<<10)]
	}
	switch how := h.next(); {
	case how < 60:
		*at = h.word()
	case how < 180:
		*at += uint64(int8(h.next())) * 8
	case how < 220:
		*at ^= 1 << (h.next() % 64)
	default:
		*at = [...]uint64{kindPad | 8, kindMessage | MaxMessage, kindMessage | 16, Size, 0}[h.next()%5]
	}
}

// The length of a message is the one that was checked in its header, whatever the writer writes there
// the moment after.
func TestHeaderThatChangesWhileItIsRead(t *testing.T) {
	p := newPipe(t, minMax)
	p.record(kindMessage|8, recordSize(8))
	word := (*atomic.Uint64)(unsafe.Pointer(&p.bytes[0]))
	stop := make(chan struct{})
	var flipping sync.WaitGroup
	flipping.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			for range 100 {
				word.Store(kindMessage | MaxMessage)
				word.Store(kindMessage | 8)
			}
		}
	})
	defer flipping.Wait()
	defer close(stop)
	// Counts the changes that the reader has seen, not its looks: on a busy machine the writer runs
	// during few of these.
	const enough, most = 100_000, 2 * time.Second
	valid := true
	for changes, began := 0, time.Now(); changes < enough && time.Since(began) < most; {
		r := Reader{}
		r.Init(&p.out, &p.spares, p.bytes, &p.back)
		msg, do := r.Poll()
		if do&Broken == 0 && len(msg) != 8 {
			t.Fatalf("a message of %d bytes in a record of 8", len(msg))
		}
		if now := do&Broken == 0; now != valid {
			valid = now
			changes++
		}
	}
}
