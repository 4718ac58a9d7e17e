//go:build linux && cgo

package ibv

import (
	"bytes"
	"errors"
	"syscall"
	"testing"
)

func TestAMemoryWindowGivesAccessUntilItIsInvalidated(t *testing.T) {
	s := onSite(t)
	if !s.windows {
		ctx := must(Open(s.devices[0]))(t)
		atEnd(t, "device", ctx)
		pd := must(ctx.AllocPD())(t)
		atEnd(t, "PD", pd)
		if mw, err := pd.AllocMW(); err == nil {
			t.Errorf("a window %v on a device that has none", mw)
		}
		return
	}
	a, b := connect(t, s, options{access: MWBind})
	mw := must(b.pd.AllocMW())(t)
	atEnd(t, "window", mw)
	const size = 64 << 10
	read := func(id uint64, key uint32) Status {
		t.Helper()
		a.postSend(t, SendWR{ID: id, Opcode: OpRead, Flags: Signaled, NumSGE: 1, SGE: a.sge(0, size), RemoteAddr: b.remote(0), RemoteKey: key})
		return a.completion(t, id).Status
	}
	var wr SendWR
	refused := func(key uint32, why string) {
		t.Helper()
		wr = SendWR{ID: 99, Flags: Signaled}
		mw.Invalidate(&wr, key)
		if n, err := b.qp.PostSend([]SendWR{wr}); n != 0 || !errors.Is(err, syscall.EINVAL) {
			t.Fatalf("invalidate %s: %d, %v, want EINVAL", why, n, err)
		}
	}
	refused(1, "what was never bound")

	// Twice: the second bind needs the key of the first one.
	var key uint32
	for round := range uint64(2) {
		fill(b.buf[:size], byte(round))
		wr = SendWR{ID: 10 + round, Flags: Signaled}
		key = mw.Bind(&wr, b.mr, addrOf(b.buf), size, RemoteRead)
		b.postSend(t, wr)
		if wc := b.succeed(t, 10+round); wc.Opcode != WCBindMW {
			t.Errorf("bind completed as %+v", wc)
		}
		if st := read(20+round, key); st != Success || !bytes.Equal(a.buf[:size], b.buf[:size]) {
			t.Fatalf("read through the window: %v", st)
		}
		refused(key+1, "with another key")
		wr = SendWR{ID: 30 + round, Flags: Signaled}
		mw.Invalidate(&wr, key)
		if n, err := b.qp.PostSend([]SendWR{wr, wr}); n != 0 || !errors.Is(err, syscall.EINVAL) {
			t.Fatalf("two invalidations in a list: %d, %v, want EINVAL", n, err)
		}
		b.postSend(t, wr)
		if wc := b.succeed(t, 30+round); wc.Opcode != WCLocalInv {
			t.Errorf("invalidate completed as %+v", wc)
		}
		refused(key, "a second time")
	}

	// Bind and invalidate in one list.
	var list [2]SendWR
	list[0] = SendWR{ID: 40}
	key = mw.Bind(&list[0], b.mr, addrOf(b.buf), size, RemoteRead)
	list[1] = SendWR{ID: 41, Flags: Signaled}
	mw.Invalidate(&list[1], key)
	b.postSend(t, list[:]...)
	b.succeed(t, 41)

	if st := read(50, key); st != RemAccessErr {
		t.Errorf("read after the invalidation: %v, want %v", st, RemAccessErr)
	}
	if st := a.state(t); st != QPError {
		t.Errorf("the reader's QP is in %v", st)
	}
}
