//go:build linux && cgo

package ibv

import (
	"bytes"
	"errors"
	"syscall"
	"testing"
)

func TestNoWindowsOnADeviceWithoutThem(t *testing.T) {
	s := onSite(t)
	if s.windows {
		return
	}
	ctx := must(Open(s.devices[0]))(t)
	atEnd(t, "device", ctx)
	pd := must(ctx.AllocPD())(t)
	atEnd(t, "PD", pd)
	if mw, err := pd.AllocMW(); err == nil {
		t.Errorf("a window %v on a device that has none", mw)
	}
}

// Invalidate clears what a work request has from an earlier send.
func TestAWindowsRequestHasNoPieceOfMemory(t *testing.T) {
	wr := SendWR{Opcode: OpSend, SGE: SGE{Addr: 1, Length: 1, LKey: 1}}
	if new(MW).Invalidate(&wr, 1); wr.SGE != (SGE{}) {
		t.Errorf("an invalidation with %+v", wr.SGE)
	}
}

const windowSize = 64 << 10

// windowed is a connection whose end b has a window on the first windowSize bytes of its buffer, which a
// may read.
type windowed struct {
	a, b *end
	mw   *MW
}

func newWindowed(t *testing.T, s site) *windowed {
	t.Helper()
	w := new(windowed)
	w.a, w.b = connect(t, s, options{access: MWBind})
	w.mw = must(w.b.pd.AllocMW())(t)
	atEnd(t, "window", w.mw)
	return w
}

func (w *windowed) bind(t *testing.T, id uint64) (key uint32) {
	t.Helper()
	wr := SendWR{ID: id, Flags: Signaled}
	key = w.mw.Bind(&wr, w.b.mr, addrOf(w.b.buf), windowSize, RemoteRead)
	w.b.postSend(t, wr)
	if wc := w.b.succeed(t, id); wc.Opcode != WCBindMW {
		t.Errorf("bind completed as %+v", wc)
	}
	return key
}

func (w *windowed) invalidate(t *testing.T, id uint64, key uint32) {
	t.Helper()
	wr := SendWR{ID: id, Flags: Signaled}
	w.mw.Invalidate(&wr, key)
	w.b.postSend(t, wr)
	if wc := w.b.succeed(t, id); wc.Opcode != WCLocalInv {
		t.Errorf("invalidate completed as %+v", wc)
	}
}

// wantRefused posts a list of that many invalidations, which must fail.
func (w *windowed) wantRefused(t *testing.T, key uint32, count int, why string) {
	t.Helper()
	wrs := make([]SendWR, count)
	for i := range wrs {
		wrs[i] = SendWR{ID: 99, Flags: Signaled}
		w.mw.Invalidate(&wrs[i], key)
	}
	if n, err := w.b.qp.PostSend(wrs); n != 0 || !errors.Is(err, syscall.EINVAL) {
		t.Fatalf("invalidate %s: %d, %v, want EINVAL", why, n, err)
	}
}

func (w *windowed) read(t *testing.T, id uint64, key uint32) Status {
	t.Helper()
	w.a.postSend(t, SendWR{ID: id, Opcode: OpRead, Flags: Signaled, SGE: w.a.sge(0, windowSize), RemoteAddr: w.b.remote(0), RemoteKey: key})
	return w.a.completion(t, id).Status
}

func TestAMemoryWindowGivesAccessUntilItIsInvalidated(t *testing.T) {
	s := onSite(t)
	if !s.windows {
		return
	}
	w := newWindowed(t, s)
	for round := range uint64(2) { // the second bind needs the key of the first one
		fill(w.b.buf[:windowSize], byte(round))
		key := w.bind(t, 10+round)
		if st := w.read(t, 20+round, key); st != Success || !bytes.Equal(w.a.buf[:windowSize], w.b.buf[:windowSize]) {
			t.Fatalf("read through the window: %v", st)
		}
		w.invalidate(t, 30+round, key)
	}

	// Bind and Invalidate go in one list.
	var list [2]SendWR
	list[0] = SendWR{ID: 40}
	key := w.mw.Bind(&list[0], w.b.mr, addrOf(w.b.buf), windowSize, RemoteRead)
	list[1] = SendWR{ID: 41, Flags: Signaled}
	w.mw.Invalidate(&list[1], key)
	w.b.postSend(t, list[:]...)
	w.b.succeed(t, 41)

	if st := w.read(t, 50, key); st != RemAccessErr {
		t.Errorf("read after the invalidation: %v, want %v", st, RemAccessErr)
	}
	if st := w.a.state(t); st != QPError {
		t.Errorf("the reader's QP is in %v", st)
	}
}

// A window can be invalidated once for each bind, and only with its key.
func TestOtherInvalidationsAreRefused(t *testing.T) {
	s := onSite(t)
	if !s.windows {
		return
	}
	w := newWindowed(t, s)
	w.wantRefused(t, 1, 1, "what was never bound")
	for round := range uint64(2) {
		key := w.bind(t, 10+round)
		w.wantRefused(t, key+1, 1, "with another key")
		w.wantRefused(t, key, 2, "twice in a list")
		w.invalidate(t, 20+round, key)
		w.wantRefused(t, key, 1, "a second time")
	}
}
