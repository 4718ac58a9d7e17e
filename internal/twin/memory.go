package twin

import (
	"fmt"
	"syscall"
	"time"
	"unsafe"

	"github.com/sanconn/san/session"
)

// memory is what an end exposes, has allocated and moves. It implements session.Memory. The wire's lock
// guards it.
type memory struct {
	e         *Endpoint
	exposed   map[uint64]*exposure
	revoked   map[uint64]bool // keys that were valid once
	allocs    map[*byte]int
	allocated int // bytes
	left      Left
	offerFrom int

	ops       fifo[*operation] // posted, in order
	spare     []*operation
	open      int // posted, completion not polled
	lastDone  [2]time.Duration
	completed [2]fifo[*operation] // by kind, not polled yet
}

var _ session.Memory = (*memory)(nil)

func (m *memory) init(e *Endpoint) {
	m.e = e
	m.exposed = map[uint64]*exposure{}
	m.revoked = map[uint64]bool{}
	m.allocs = map[*byte]int{}
	m.offerFrom = e.w.cfg.OfferFrom
}

// PaysToOffer may be called after Close, like PaysToFill.
func (m *memory) PaysToOffer(b []byte) (bool, error) { return m.pays(len(b)), nil }
func (m *memory) PaysToFill(b []byte) (bool, error)  { return m.pays(len(b)), nil }

func (m *memory) pays(n int) bool {
	e := m.e
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	return e.dice.chance(diceOffer, e.w.cfg.Faults.Cheap) || n >= m.offerFrom
}

type exposure struct {
	b        []byte
	addr     uint64
	rights   session.Rights
	returned bool // the peer has given its access back
}

// returnable decides by the key: half of what the peer may read is returnable.
func returnable(key uint64, rights session.Rights) bool {
	return rights == session.RemoteRead && key&1 != 0
}

// operation is a posted Read or Write.
type operation struct {
	kind  opKind
	local []byte
	desc  session.Descriptor
	off   int
	id    uint32
	err   error
	over  bool   // completed, or its end is closed
	seq   uint64 // of the wire's events when it was posted
}

type opKind uint8

const (
	opRead opKind = iota
	opWrite
)

func (k opKind) event() session.EventKind {
	return [...]session.EventKind{session.ReadDone, session.WriteDone}[k]
}

// Expose fails after Close, as does Alloc.
func (m *memory) Expose(b []byte, rights session.Rights) (session.Descriptor, error) {
	e := m.e
	e.enterLate("Expose")
	defer e.leave()
	const all = session.RemoteRead | session.RemoteWrite
	if len(b) == 0 || rights == 0 || rights&^all != 0 {
		e.w.violateLocked(Misuse, e.id, "Expose of %d bytes with rights %#x", len(b), rights)
		return session.Descriptor{}, syscall.EINVAL
	}
	if e.err != nil || e.endedLocked() {
		return session.Descriptor{}, fmt.Errorf("twin: expose: %w", syscall.ENOTCONN)
	}
	if len(b) > e.limits.MaxExpose {
		return session.Descriptor{}, fmt.Errorf("twin: expose %d bytes, at most %d: %w", len(b), e.limits.MaxExpose, syscall.EINVAL)
	}
	if e.dice.chance(diceMemory, e.w.cfg.Faults.Expose) {
		return session.Descriptor{}, fmt.Errorf("twin: expose %d bytes: %w", len(b), syscall.ENOMEM)
	}
	d := session.Descriptor{
		Addr: e.dice[diceMemory].Uint64() >> 1, // no range wraps around
		Key:  e.dice[diceMemory].Uint64(),
		Len:  uint64(len(b)),
	}
	d.Returnable = returnable(d.Key, rights)
	m.exposed[d.Key] = &exposure{b: b, addr: d.Addr, rights: rights}
	return d, nil
}

// Revoke does not wait. It may be called after Close.
func (m *memory) Revoke(d session.Descriptor) {
	m.revoke(d)
	m.e.lock() // the peer may find it revoked, and go on, before Revoke returns
	m.e.leave()
}

func (m *memory) revoke(d session.Descriptor) {
	e := m.e
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	e.notRetiredLocked("Revoke")
	if e.closed || e.aborted {
		return
	}
	if m.exposed[d.Key] == nil {
		e.w.violateLocked(Misuse, e.id, "Revoke of what is not exposed")
		return
	}
	delete(m.exposed, d.Key)
	m.revoked[d.Key] = true
}

// CommitReturn implements session.Memory.
func (m *memory) CommitReturn(n int, from session.Descriptor) {
	e := m.e
	e.w.mu.Lock()
	for _, op := range m.ops.s[m.ops.head:] {
		if op.desc.Key == from.Key {
			e.w.violateLocked(Misuse, e.id, "CommitReturn of memory from which %d is under way", op.id)
		}
	}
	if !from.Returnable {
		e.w.violateLocked(Misuse, e.id, "CommitReturn of what is not returnable")
	}
	e.w.mu.Unlock()
	e.commitControl(n, from.Key)
}

// returnedLocked ends an access that the peer has given back. As on a NIC, only a returnable access can
// be given back, and only once.
func (m *memory) returnedLocked(key uint64) {
	e := m.e
	switch x := m.exposed[key]; {
	case x != nil && !x.returned && returnable(key, x.rights):
		x.returned = true
	case m.revoked[key]:
		e.w.violateLocked(RevokedAccess, e.peer().id, "it returns key %#x", key)
	default:
		e.w.violateLocked(BadAccess, e.peer().id, "it returns key %#x", key)
	}
}

func (m *memory) Read(into []byte, from session.Descriptor, off int, id uint32) error {
	return m.post(opRead, m.e.limits.CanRead, into, from, off, id)
}

func (m *memory) Write(from []byte, to session.Descriptor, off int, id uint32) error {
	return m.post(opWrite, m.e.limits.CanWrite, from, to, off, id)
}

func (m *memory) post(kind opKind, can bool, local []byte, d session.Descriptor, off int, id uint32) error {
	e := m.e
	name := [...]string{"Read", "Write"}[kind]
	e.enter(name)
	defer e.leave()
	if !can || len(local) == 0 || len(local) > e.limits.MaxRDMA || off < 0 {
		e.w.violateLocked(Misuse, e.id, "%s of %d bytes at %d", name, len(local), off)
		return syscall.EINVAL
	}
	if e.err != nil || e.endedLocked() {
		return fmt.Errorf("twin: %s: %w", name, syscall.ENOTCONN)
	}
	if m.open == e.w.cfg.RDMAQueue || e.tx.busyLocked(diceBusy, e.w.cfg.Faults.Busy) {
		return session.ErrWouldBlock
	}
	if !m.oursLocked(local) && e.dice.chance(diceMemory, e.w.cfg.Faults.Local) {
		return fmt.Errorf("twin: %s: registering %d bytes: %w", name, len(local), syscall.ENOMEM)
	}
	if m.oursLocked(local) && e.dice.chance(diceMemory, e.w.cfg.Faults.Evicted) {
		return fmt.Errorf("twin: %s: registering %d bytes: %w", name, len(local), syscall.ENOBUFS)
	}
	m.beginLocked(operation{kind: kind, local: local, desc: d, off: off, id: id})
	return nil
}

// beginLocked schedules an operation: a few pieces, then the completion, in order per kind. All events
// of the operation are before its completion, so that it can be used again afterwards.
func (m *memory) beginLocked(o operation) {
	e := m.e
	var op *operation
	if n := len(m.spare); n > 0 {
		op, m.spare = m.spare[n-1], m.spare[:n-1]
	} else {
		op = new(operation)
	}
	*op = o
	op.seq = e.w.seq
	m.ops.push(op)
	m.open++

	now := e.w.nowLocked()
	end := max(m.lastDone[op.kind], now+e.w.latency(&e.dice, diceRDMA))
	for range e.dice[diceRDMA].IntN(4) {
		if span := end - now; span > 0 {
			e.w.scheduleLocked(now+time.Duration(e.dice[diceRDMA].Int64N(int64(span))), event{end: e, kind: piece, op: op})
		}
	}
	m.lastDone[op.kind] = end
	e.w.scheduleLocked(end, event{end: e, kind: done, op: op})
}

// completeLocked queues the completion of an operation.
func (m *memory) completeLocked(op *operation) {
	e := m.e
	op.over = true
	m.completed[op.kind].push(op)
	e.readyLocked(session.RecvReady)
}

// stopLocked ends posted operations without moving memory, because their end has gone. Messages that
// were sent after a write that does not take place do not arrive either.
func (m *memory) stopLocked(each func(*operation)) {
	lost := false
	for m.ops.len() > 0 {
		op := m.ops.pop()
		if op.kind == opWrite && !lost {
			lost = true
			m.e.w.loseLocked(m.e.peer(), op.seq)
		}
		each(op)
	}
}

// progressLocked moves a piece of memory.
func (m *memory) progressLocked(ev event) {
	e := m.e
	op := ev.op
	if op.over || e.w.cut {
		return
	}
	p := e.peer()
	if p.endedLocked() || p.err != nil {
		return // the notice of the peer's end completes it
	}
	remote, err := m.accessLocked(op)
	if err != nil { // as on a NIC, both ends' queue pairs stop
		m.takeLocked(op)
		op.err = err
		m.completeLocked(op)
		e.failLocked(fmt.Errorf("twin: remote access error: %w", syscall.ECONNRESET))
		p.failLocked(fmt.Errorf("twin: remote access error by the peer: %w", syscall.ECONNRESET))
		return
	}
	if ev.kind == piece {
		target := op.local
		if op.kind == opWrite {
			target = remote
		}
		if n := len(target); n > 0 {
			from := e.dice[diceRDMA].IntN(n)
			fill(target[from:from+min(n-from, 1+e.dice[diceRDMA].IntN(n))], noiseMoving)
		}
		return
	}
	m.takeLocked(op)
	if op.kind == opRead {
		copy(op.local, remote)
	} else {
		copy(remote, op.local)
	}
	m.completeLocked(op)
}

// takeLocked removes an operation from the posted ones.
func (m *memory) takeLocked(op *operation) {
	for n := m.ops.len(); n > 0; n-- {
		if o := m.ops.pop(); o != op {
			m.ops.push(o)
		}
	}
}

// accessLocked finds the memory of an operation, as the peer's NIC would.
func (m *memory) accessLocked(op *operation) ([]byte, error) {
	e := m.e
	p := e.peer()
	x := p.mem.exposed[op.desc.Key]
	switch {
	case x != nil && !x.returned:
	case x != nil || p.mem.revoked[op.desc.Key]:
		e.w.violateLocked(RevokedAccess, e.id, "%d bytes at %d", len(op.local), op.off)
		return nil, fmt.Errorf("twin: revoked: %w", syscall.EACCES)
	default:
		e.w.violateLocked(BadAccess, e.id, "unknown key %#x", op.desc.Key)
		return nil, fmt.Errorf("twin: unknown key: %w", syscall.EACCES)
	}
	need := [...]session.Rights{session.RemoteRead, session.RemoteWrite}[op.kind]
	if x.rights&need == 0 {
		e.w.violateLocked(BadAccess, e.id, "needs rights %#x, has %#x", need, x.rights)
		return nil, fmt.Errorf("twin: not permitted: %w", syscall.EACCES)
	}
	lo := op.desc.Addr + uint64(op.off) - x.addr
	if size := uint64(len(x.b)); lo > size || uint64(len(op.local)) > size-lo {
		e.w.violateLocked(BadAccess, e.id, "%d bytes at %d of %d", len(op.local), int64(lo), size)
		return nil, fmt.Errorf("twin: out of range: %w", syscall.EACCES)
	}
	return x.b[lo:][:len(op.local)], nil
}

func (m *memory) Alloc(n int) []byte {
	e := m.e
	e.enterLate("Alloc")
	defer e.leave()
	if n < 1 {
		e.w.violateLocked(Misuse, e.id, "Alloc(%d)", n)
		return nil
	}
	if e.closed || e.aborted {
		return nil
	}
	if m.allocated+n > e.w.cfg.AllocBudget || e.dice.chance(diceMemory, e.w.cfg.Faults.Alloc) {
		return nil
	}
	b := make([]byte, n)
	fill(b, noiseFreed) // what other users have left there
	m.allocs[&b[0]] = n
	m.allocated += n
	return b
}

// oursLocked reports whether b lies in memory from Alloc.
func (m *memory) oursLocked(b []byte) bool {
	for first, n := range m.allocs {
		if at := uintptr(unsafe.Pointer(&b[0])) - uintptr(unsafe.Pointer(first)); at < uintptr(n) && len(b) <= n-int(at) {
			return true
		}
	}
	return false
}

// inUseLocked reports whether the peer may access a part of b, or a transfer to or from it has not been
// seen to complete. After the end it returns false.
func (m *memory) inUseLocked(b []byte) bool {
	if m.e.closed || m.e.aborted {
		return false
	}
	for _, x := range m.exposed {
		if !x.returned && overlap(x.b, b) {
			return true
		}
	}
	for _, ops := range []*fifo[*operation]{&m.ops, &m.completed[opRead], &m.completed[opWrite]} {
		for _, op := range ops.s[ops.head:] {
			if overlap(op.local, b) {
				return true
			}
		}
	}
	return false
}

// overlap reports whether two slices share a byte.
func overlap(a, b []byte) bool {
	first, second := uintptr(unsafe.Pointer(&a[0])), uintptr(unsafe.Pointer(&b[0]))
	return first < second+uintptr(len(b)) && second < first+uintptr(len(a))
}

// Free may be called after Close.
func (m *memory) Free(b []byte) {
	e := m.e
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	e.notRetiredLocked("Free")
	if len(b) == 0 || m.allocs[&b[0]] == 0 {
		e.w.violateLocked(Misuse, e.id, "Free of what Alloc did not give")
		return
	}
	n := m.allocs[&b[0]]
	if m.inUseLocked(b[:n:n]) {
		e.w.violateLocked(Misuse, e.id, "Free of what the peer may access, or a transfer uses")
	}
	delete(m.allocs, &b[0])
	m.allocated -= n
	fill(b[:n:n], noiseFreed)
}
