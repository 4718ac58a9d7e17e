package endpointtest

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"unsafe"

	"github.com/sanconn/san/session"
)

// direction is one of the two ways to move remote memory. In all tests a is the end that reads or
// writes, and b the end that exposes.
type direction struct {
	kind   session.EventKind
	rights session.Rights // that the access needs
	post   func(e *end, local []byte, d session.Descriptor, off int, id uint32) error
	lacks  []string // cases that the device is known not to refuse
}

var (
	read = direction{session.ReadDone, session.RemoteRead,
		func(e *end, local []byte, d session.Descriptor, off int, id uint32) error {
			return e.mem.Read(local, d, off, id)
		}, nil}
	write = direction{session.WriteDone, session.RemoteWrite,
		func(e *end, local []byte, d session.Descriptor, off int, id uint32) error {
			return e.mem.Write(local, d, off, id)
		}, nil}
)

// expose makes memory accessible and sends its descriptor to the peer, as a session does: a provider
// may order the access by what is committed afterwards.
func (e *end) expose(b []byte, rights session.Rights) (session.Descriptor, error) {
	d, err := e.mem.Expose(b, rights)
	if err == nil {
		err = e.postControl(0, minMessage)
	}
	if err == nil {
		err = e.peer.expect(0)
	}
	return d, err
}

// start posts an access, and waits while the queue is full. Completions that it meets are put aside.
func (d direction) start(e *end, local []byte, desc session.Descriptor, off int, id uint32) error {
	for {
		err := d.post(e, local, desc, off, id)
		if err != session.ErrWouldBlock {
			return err
		}
		e.Arm(session.SendReady | session.RecvReady)
		var ev session.Event
		if e.Poll(&ev) {
			if ev.Kind == session.Message {
				return errors.New("a message on a connection without messages")
			}
			e.done = append(e.done, ev)
			continue
		}
		if err = d.post(e, local, desc, off, id); err != session.ErrWouldBlock {
			return err
		}
		select {
		case <-e.recv:
		default:
			if err := waitEither(e); err != nil {
				return err
			}
		}
	}
}

func waitEither(e *end) error {
	either := make(chan struct{}, 1)
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		select {
		case <-e.recv:
		case <-e.send:
		case <-stop:
			return
		}
		signal(either)
	}()
	return wait(either, "room for an RDMA")
}

// complete waits for the completion of id.
func (d direction) complete(e *end, id uint32) (session.Event, error) {
	ev, err := e.completion()
	if err == nil && (ev.Kind != d.kind || ev.ID != id) {
		err = fmt.Errorf("completion of kind %d, id %d; want %d, %d", ev.Kind, ev.ID, d.kind, id)
	}
	return ev, err
}

// arrived waits until what has completed is in the peer's memory. On iWARP a write may complete when
// the network has its bytes: they are in the peer's memory once it has a message that was committed
// later, on which a session relies.
func (d direction) arrived(e *end) error {
	if d.kind != session.WriteDone {
		return nil
	}
	if err := e.postControl(0, minMessage); err != nil {
		return err
	}
	return e.peer.expect(0)
}

// margin is on both sides of what is exposed or moved, and must not change.
const margin = 64

// framed is memory with a margin.
type framed struct{ all, in []byte }

func frame(n int, seed uint64) framed {
	all := make([]byte, n+2*margin)
	noise(all, seed)
	return framed{all, all[margin : margin+n : margin+n]}
}

// untouched checks that the margins have the seed's bytes.
func (f framed) untouched(seed uint64) error {
	want := frame(len(f.in), seed).all
	end := margin + len(f.in)
	if !bytes.Equal(f.all[:margin], want[:margin]) || !bytes.Equal(f.all[end:], want[end:]) {
		return errors.New("bytes beside the memory have changed")
	}
	return nil
}

// unchanged checks that all of it has the seed's bytes.
func (f framed) unchanged(seed uint64) error {
	if !bytes.Equal(f.all, frame(len(f.in), seed).all) {
		return errors.New("bytes have moved")
	}
	return nil
}

// Exactly the named bytes move, of every size, and completions come in order.
func testMove(t *testing.T, mk Maker, d direction) {
	a, b := pair(t, mk)
	most := min(a.lim.MaxRDMA, b.lim.MaxExpose, 3<<20)
	for i, size := range []int{1, 7, 64, 4096, 4097, 100_000, most} {
		size = min(size, most)
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			const there, here = 11, 12 // seeds
			remote, local := frame(size, there), frame(size, here)
			desc, err := b.expose(remote.in, d.rights)
			must(t, err)
			if desc.Len != uint64(size) {
				t.Errorf("descriptor of %d bytes says %d", size, desc.Len)
			}
			// The bytes move in up to three parts, in order.
			id := uint32(100 * i)
			cuts := []int{0, size / 3, size / 2, size}
			parts := 0
			for c := range 3 {
				if lo, hi := cuts[c], cuts[c+1]; lo < hi {
					must(t, d.start(a, local.in[lo:hi:hi], desc, lo, id+uint32(parts)))
					parts++
				}
			}
			for part := range parts {
				ev, err := d.complete(a, id+uint32(part))
				must(t, err)
				must(t, ev.Err)
			}
			must(t, d.arrived(a))
			b.mem.Revoke(desc)
			if !bytes.Equal(remote.in, local.in) {
				t.Error("not the same bytes at both ends")
			}
			if d.kind == session.ReadDone {
				must(t, remote.unchanged(there))
			} else {
				must(t, local.unchanged(here))
			}
			must(t, remote.untouched(there))
			must(t, local.untouched(here))
		})
	}
	must(t, a.Err())
	must(t, b.Err())
}

// Few bytes move, at the end of a page and across it, at either end.
func testShort(t *testing.T, mk Maker, d direction) {
	const page, longest = 4096, 40
	a, b := pair(t, mk)
	remote, local := frame(3*page, 31), frame(3*page, 32)
	end := func(p []byte) int { // where a page ends
		return page + int(-uintptr(unsafe.Pointer(&p[0]))&(page-1))
	}
	endThere, endHere := end(remote.in), end(local.in)
	id := uint32(0)
	for n := 1; n <= longest; n++ {
		for _, before := range []int{0, 1, n / 2, n - 1, n} {
			there := remote.in[endThere-before:][:n:n]
			here := local.in[endHere-(before+7)%(n+1):][:n:n]
			desc, err := b.expose(there, d.rights)
			must(t, err)
			id++
			must(t, d.start(a, here, desc, 0, id))
			ev, err := d.complete(a, id)
			must(t, err)
			must(t, ev.Err)
			must(t, d.arrived(a))
			b.mem.Revoke(desc)
			if !bytes.Equal(there, here) {
				t.Fatalf("%d bytes, %d of them before the end of a page there: not the same at both ends", n, before)
			}
		}
		noise(local.in, uint64(n))
	}
	must(t, remote.untouched(31))
	must(t, local.untouched(32))
}

// If a message follows a write that was started, the bytes of the write are there when it comes,
// without waiting for the completion.
func testWriteThenMessage(t *testing.T, mk Maker) {
	const rounds, slots, size = 300, 8, 20_000
	a, b := pair(t, mk)
	remote, local := frame(size, 41), frame(slots*size, 42)
	desc, err := b.expose(remote.in, session.RemoteWrite)
	must(t, err)
	for id := range uint32(rounds) {
		if id >= slots { // the bytes of the write before have left the slot
			ev, err := write.complete(a, id-slots)
			must(t, err)
			must(t, ev.Err)
		}
		here := local.in[id%slots*size:][:1+int(id*id*7919)%min(size, a.lim.MaxRDMA)]
		noise(here, uint64(id))
		must(t, write.start(a, here, desc, 0, id))
		must(t, a.postControl(0, minMessage))
		must(t, b.expect(0))
		if !bytes.Equal(remote.in[:len(here)], here) {
			t.Fatalf("round %d: the message was seen before the %d bytes written before it", id, len(here))
		}
	}
	must(t, remote.untouched(41))
}

// More accesses than any queue holds: a full queue is reported, and nothing is lost.
func testQueue(t *testing.T, mk Maker, d direction) {
	const count, size = 500, 256
	a, b := pair(t, mk)
	remote, local := frame(count*size, 21), frame(count*size, 22)
	if len(remote.in) > b.lim.MaxExpose {
		t.Fatalf("MaxExpose %d is too small to be of use", b.lim.MaxExpose)
	}
	desc, err := b.expose(remote.in, d.rights)
	must(t, err)
	for i := range count {
		must(t, d.start(a, local.in[i*size:][:size:size], desc, i*size, uint32(i)))
	}
	for i := range count {
		ev, err := d.complete(a, uint32(i))
		must(t, err)
		must(t, ev.Err)
	}
	must(t, d.arrived(a))
	b.mem.Revoke(desc)
	if !bytes.Equal(remote.in, local.in) {
		t.Error("not the same bytes at both ends")
	}
}

// An access that a NIC would refuse costs the peer an error, at times the connection, but never a byte.
func testRefused(t *testing.T, mk Maker, d direction) {
	size := min(4096, mkLimit(t, mk)-1)
	other := session.RemoteRead | session.RemoteWrite ^ d.rights
	tests := []struct {
		name   string
		rights session.Rights
		change func(*session.Descriptor)
		off, n int
	}{
		{"without the right", other, nil, 0, 16},
		{"one byte beyond", d.rights, nil, size - 15, 16},
		{"all beyond", d.rights, nil, size, 1},
		{"far beyond", d.rights, nil, 1 << 30, 16},
		{"at the largest offset", d.rights, nil, int(^uint(0) >> 1), 16},
		{"longer than exposed", d.rights, nil, 0, size + 1},
		{"by a longer descriptor", d.rights, func(x *session.Descriptor) { x.Len += margin }, size, 16},
		{"by an endless descriptor", d.rights, func(x *session.Descriptor) { x.Len = ^uint64(0) }, size, 16},
		{"in front", d.rights, func(x *session.Descriptor) { x.Addr -= 16 }, 0, 16},
		{"in front, around the address space", d.rights, func(x *session.Descriptor) { x.Addr -= 16; x.Len = ^uint64(0) }, 0, 32},
		{"by another key", d.rights, func(x *session.Descriptor) { x.Key ^= 1 }, 0, 16},
		{"by key zero", d.rights, func(x *session.Descriptor) { *x = session.Descriptor{Addr: x.Addr, Len: x.Len} }, 0, 16},
		{"by no descriptor", d.rights, func(x *session.Descriptor) { *x = session.Descriptor{} }, 0, 16},
	}
	for _, tt := range tests {
		if slices.Contains(d.lacks, tt.name) {
			t.Logf("not refused here: %s", tt.name)
			continue
		}
		t.Run(tt.name, func(t *testing.T) {
			a, b := pair(t, mk)
			remote, local := frame(size, 31), frame(2*size, 32)
			desc, err := b.expose(remote.in, tt.rights)
			must(t, err)
			if tt.change != nil {
				tt.change(&desc)
			}
			refused(t, a, d, local.in[:tt.n:tt.n], desc, tt.off)
			must(t, remote.unchanged(31))
			if d.kind == session.WriteDone {
				must(t, local.unchanged(32))
			}
		})
	}
	// Memory is exposed only to the peer of one connection (R2).
	if slices.Contains(d.lacks, "by the peer of another connection") {
		t.Log("not refused here: by the peer of another connection")
		return
	}
	t.Run("by the peer of another connection", func(t *testing.T) {
		a, _ := pair(t, mk)
		_, b := pair(t, mk)
		remote, local := frame(size, 33), frame(size, 34)
		desc, err := b.expose(remote.in, d.rights)
		must(t, err)
		refused(t, a, d, local.in[:16:16], desc, 0)
		must(t, remote.unchanged(33))
		must(t, b.Err())
	})
}

// refused checks that an access fails, at once or by its completion.
func refused(t *testing.T, a *end, d direction, local []byte, desc session.Descriptor, off int) {
	t.Helper()
	if err := d.start(a, local, desc, off, 7); err != nil {
		return
	}
	ev, err := d.complete(a, 7)
	must(t, err)
	switch {
	case ev.Err == nil && !d.refusedLater(a):
		t.Error("completed without an error")
	case ev.Err != nil && d.kind == session.WriteDone:
		if _, err := a.endOf(); !broken(err) {
			t.Errorf("behind %v the connection ends with %v", ev.Err, err)
		}
	}
}

// refusedLater reports whether the access is a write that has completed before its refusal ends the
// connection. On iWARP a write completes when the network has its bytes.
func (d direction) refusedLater(e *end) bool {
	if d.kind != session.WriteDone {
		return false
	}
	_, err := e.endOf()
	return broken(err)
}

// broken reports whether a connection has ended by a refusal, or for lack of an answer: the network may
// lose the refusal, and its sender does not answer any more.
func broken(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.ETIMEDOUT)
}

// After Revoke no access of the peer touches the memory, even if it was posted before, and new ones
// fail.
func testRevoked(t *testing.T, mk Maker, d direction) {
	for round := range 10 {
		a, b := pair(t, mk)
		r := revoking{
			direction: d, a: a, b: b,
			late:   slices.Contains(d.lacks, "under way"),
			remote: frame(revokedSize, 41), local: frame(revokedSize, 42),
			began: make(chan struct{}, 1),
		}
		fill(r.remote.in, 'r')
		var err error
		r.desc, err = b.expose(r.remote.in, d.rights)
		must(t, err)
		together(t,
			func() error { return r.access(round) },
			r.revoke)
		moved := revokedSize - bytes.Count(r.remote.in, []byte{'x'})
		if d.kind == session.WriteDone && moved > 0 && !(r.late && moved <= revokedPart) {
			t.Fatalf("the peer wrote %d bytes after Revoke returned", moved)
		}
		a.Abort()
		b.Abort()
	}
}

// revoking is an access in parts during which the memory is revoked.
type revoking struct {
	direction
	a, b          *end // the end that accesses, and the end that owns the memory
	late          bool // Revoke does not wait for accesses in progress
	remote, local framed
	desc          session.Descriptor
	began         chan struct{}
	over          atomic.Bool // Revoke has returned, and remote is full of 'x'
}

const revokedSize, revokedPart = 1 << 16, 1 << 10

// access moves one part after the other, until one is refused or all have moved. Before the given part
// it lets the other end revoke.
func (r *revoking) access(part int) error {
	refused := false
	for id := 0; id < revokedSize/revokedPart; id++ {
		off := id * revokedPart
		if id == part {
			signal(r.began)
		}
		over := r.over.Load()
		if err := r.start(r.a, r.local.in[off:][:revokedPart:revokedPart], r.desc, off, uint32(id)); err != nil {
			return nil
		}
		ev, err := r.complete(r.a, uint32(id))
		if err != nil {
			return err
		}
		switch {
		case ev.Err == nil && over && r.refusedLater(r.a):
			return nil
		case ev.Err == nil && over:
			return fmt.Errorf("part %d, posted after Revoke returned, has no error", id)
		case ev.Err == nil && refused:
			return fmt.Errorf("part %d moved behind one that was refused", id)
		case ev.Err == nil && r.late:
		case ev.Err == nil && r.kind == session.ReadDone && bytes.IndexByte(r.local.in[off:][:revokedPart], 'x') >= 0:
			return fmt.Errorf("part %d was read after Revoke returned", id)
		case ev.Err != nil:
			refused = true
			if r.a.Err() != nil {
				return nil
			}
		}
	}
	return nil
}

// revoke revokes during the access, and checks that nothing touches the memory any more.
func (r *revoking) revoke() error {
	if err := wait(r.began, "the first parts"); err != nil {
		return err
	}
	r.b.mem.Revoke(r.desc)
	r.over.Store(true)
	fill(r.remote.in, 'x')
	snapshot := bytes.Clone(r.remote.all)
	// What the peer posts from here on is refused once this end has done some more of its own work.
	for range 50 {
		var ev session.Event
		r.b.Poll(&ev)
		if !r.late && !bytes.Equal(r.remote.all, snapshot) {
			return errors.New("the peer touched memory after Revoke returned")
		}
	}
	return nil
}

// After Abort or Close has returned, at either end, no RDMA touches this process's memory.
func testEndStops(t *testing.T, mk Maker, d direction) {
	size := min(1<<20, mkLimit(t, mk))
	for _, tt := range []struct {
		name   string
		posted bool // by the end that ends the connection, which otherwise has exposed the memory
		end    func(*end)
	}{
		{"Abort by who posted", true, (*end).abort},
		{"Abort by who exposed", false, (*end).abort},
		{"Close by who posted", true, (*end).close},
		{"Close by who exposed", false, (*end).close},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a, b := pair(t, mk)
			remote, local := frame(size, 51), frame(size, 52)
			desc, err := b.expose(remote.in, d.rights)
			must(t, err)
			must(t, d.start(a, local.in, desc, 0, 1))
			mine, here, there := remote, b, a
			if tt.posted {
				mine, here, there = local, a, b
			}
			tt.end(here)
			fill(mine.all, 'm')
			there.endOf() // until the peer has found the end, and longer than any transfer takes
			if bytes.Count(mine.all, []byte{'m'}) != len(mine.all) {
				t.Error("memory was touched after it returned")
			}
		})
	}
}

// mkLimit returns the largest transfer in bytes between the ends.
func mkLimit(t *testing.T, mk Maker) int {
	a, b := pair(t, mk)
	return min(a.lim.MaxRDMA, b.lim.MaxExpose)
}

func testExposeTooMuch(t *testing.T, mk Maker) {
	_, b := pair(t, mk)
	const affordable = 64 << 20
	if b.lim.MaxExpose < affordable {
		if _, err := b.mem.Expose(make([]byte, b.lim.MaxExpose+1), session.RemoteRead|session.RemoteWrite); err == nil {
			t.Errorf("more than MaxExpose (%d) was exposed", b.lim.MaxExpose)
		}
	}
	must(t, b.Err())
}

// Alloc gives other memory each time, up to a budget, and Free gives it back, even after Close.
func testAlloc(t *testing.T, mk Maker) {
	const size, tooMuch = 64 << 10, 1 << 30
	a, _ := pair(t, mk)
	count := 0
	for range 3 {
		var all [][]byte
		for len(all)*size < tooMuch {
			p := a.mem.Alloc(size)
			if p == nil {
				break
			}
			if len(p) != size {
				t.Fatalf("Alloc(%d) gave %d bytes", size, len(p))
			}
			put64(p, uint64(len(all)))
			put64(p[size-8:], uint64(len(all)))
			all = append(all, p)
		}
		if len(all)*size >= tooMuch {
			t.Fatalf("Alloc has no budget: %d bytes", tooMuch)
		}
		if count != 0 && len(all) < count {
			t.Errorf("%d pieces after Free, %d before", len(all), count)
		}
		count = len(all)
		for i, p := range all {
			if get64(p) != uint64(i) || get64(p[size-8:]) != uint64(i) {
				t.Fatalf("piece %d of %d shares memory with another", i, len(all))
			}
			a.mem.Free(p)
		}
	}
	if count == 0 {
		t.Fatal("Alloc gives nothing")
	}
	p := a.mem.Alloc(size)
	if p == nil {
		t.Fatal("Alloc gives nothing after Free")
	}
	must(t, a.Close())
	a.mem.Free(p)
}

// Memory from Alloc may be exposed, and bytes move from and to it as with any other memory.
func testAllocMoves(t *testing.T, mk Maker, d direction) {
	const size = 10_000
	a, b := pair(t, mk)
	n := min(size, a.lim.MaxRDMA, b.lim.MaxExpose)
	remote, local := b.mem.Alloc(n), a.mem.Alloc(n)
	if remote == nil || local == nil {
		t.Fatal("Alloc gives nothing")
	}
	defer b.mem.Free(remote)
	defer a.mem.Free(local)
	noise(remote, 61)
	noise(local, 62)
	desc, err := b.expose(remote, d.rights)
	must(t, err)
	must(t, d.start(a, local, desc, 0, 1))
	ev, err := d.complete(a, 1)
	must(t, err)
	must(t, ev.Err)
	must(t, d.arrived(a))
	b.mem.Revoke(desc)
	if !bytes.Equal(remote, local) {
		t.Error("not the same bytes at both ends")
	}
}
