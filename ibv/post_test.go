//go:build linux && cgo

package ibv

import (
	"bytes"
	"errors"
	"syscall"
	"testing"
)

func TestASendFillsAReceive(t *testing.T) {
	s := onSite(t)
	a, b := connect(t, s, options{})
	b.postRecv(t, 1, 0, 4096)
	fill(a.buf[:3000], 1)
	a.postSend(t, SendWR{ID: 2, Opcode: OpSend, Flags: Signaled, SGE: a.sge(0, 3000)})
	if wc := a.succeed(t, 2); wc.Opcode != WCSend || wc.QPNum != a.qp.Num {
		t.Errorf("send completed as %+v", wc)
	}
	if wc := b.succeed(t, 1); wc.Opcode != WCRecv || wc.ByteLen != 3000 || wc.QPNum != b.qp.Num {
		t.Errorf("receive completed as %+v", wc)
	}
	if !bytes.Equal(a.buf[:3000], b.buf[:3000]) {
		t.Error("the data differ")
	}
}

// Lists longer than what is translated at a time keep their order, at both ends.
func TestListsKeepTheirOrder(t *testing.T) {
	s := onSite(t)
	a, b := connect(t, s, options{})
	const n, size = 100, 64
	recvs, sends := make([]RecvWR, n), make([]SendWR, n)
	for i := range n {
		recvs[i] = RecvWR{ID: uint64(i), SGE: b.sge(i*size, size)}
		sends[i] = SendWR{ID: uint64(i), Opcode: OpSend, SGE: a.sge(i*size, size)}
	}
	sends[n-1].Flags = Signaled
	if got, err := b.qp.PostRecv(recvs); got != n || err != nil {
		t.Fatalf("PostRecv: %d, %v", got, err)
	}
	fill(a.buf[:n*size], 3)
	a.postSend(t, sends...)
	a.succeed(t, n-1)
	for i := range n {
		b.succeed(t, uint64(i))
	}
	if !bytes.Equal(a.buf[:n*size], b.buf[:n*size]) {
		t.Error("the data differ")
	}
	if len(a.left) > 0 {
		t.Errorf("unsignaled sends completed: %v", a.left)
	}
}

func TestAFullQueueReturnsHowManyWerePosted(t *testing.T) {
	s := onSite(t)
	_, b := connect(t, s, options{})
	wrs := make([]RecvWR, 2000)
	for i := range wrs {
		wrs[i] = RecvWR{ID: uint64(i), SGE: b.sge(0, 64)}
	}
	n, err := b.qp.PostRecv(wrs)
	if n < int(b.qp.Cap.RecvWR) || n >= len(wrs) || !errors.Is(err, syscall.ENOMEM) {
		t.Errorf("%d posted, %v; the queue holds %d", n, err, b.qp.Cap.RecvWR)
	}
}

func TestRDMAReadsAndWritesMoveMemory(t *testing.T) {
	s := onSite(t)
	access := RemoteRead | RemoteWrite
	a, b := connect(t, s, options{access: access})
	const size = 512 << 10

	fill(b.buf[:size], 5)
	a.postSend(t, SendWR{ID: 1, Opcode: OpRead, Flags: Signaled, SGE: a.sge(0, size), RemoteAddr: b.remote(0), RemoteKey: b.mr.RKey})
	if wc := a.succeed(t, 1); wc.Opcode != WCRead {
		t.Errorf("read completed as %+v", wc)
	}
	if !bytes.Equal(a.buf[:size], b.buf[:size]) {
		t.Error("read: the data differ")
	}

	// A send that follows a write arrives after it.
	b.postRecv(t, 2, size, 64)
	fill(a.buf[:size], 9)
	a.postSend(t,
		SendWR{ID: 3, Opcode: OpWrite, SGE: a.sge(0, size), RemoteAddr: b.remote(0), RemoteKey: b.mr.RKey},
		SendWR{ID: 4, Opcode: OpSend, Flags: Signaled, SGE: a.sge(0, 1)})
	b.succeed(t, 2)
	if !bytes.Equal(a.buf[:size], b.buf[:size]) {
		t.Error("write: the data differ")
	}
	a.succeed(t, 4)
}

func TestAReceiveIsMarkedThatHasImmediateData(t *testing.T) {
	s := onSite(t)
	a, b := connect(t, s, options{access: RemoteWrite})
	b.postRecv(t, 1, 4096, 64)
	wr := SendWR{ID: 2, Opcode: OpWriteWithImm, Flags: Signaled, SGE: a.sge(0, 8), RemoteAddr: b.remote(0), RemoteKey: b.mr.RKey}
	if !s.withImm {
		// siw reports it by a negative errno.
		if n, err := a.qp.PostSend([]SendWR{wr}); n != 0 || !errors.Is(err, syscall.EINVAL) {
			t.Fatalf("PostSend: %d, %v, want EINVAL", n, err)
		}
		return
	}
	a.postSend(t, wr)
	if wc := b.succeed(t, 1); wc.Opcode != WCRecvImm || wc.Flags&WCWithImm == 0 || wc.ByteLen != 8 {
		t.Errorf("received %+v", wc)
	}
	a.succeed(t, 2)
}

func TestInlineDataIsCopiedWhenPosted(t *testing.T) {
	s := onSite(t)
	a, b := connect(t, s, options{inline: 64})
	if a.qp.Cap.InlineData < 64 {
		t.Fatalf("granted %d bytes inline", a.qp.Cap.InlineData)
	}
	b.postRecv(t, 1, 0, 64)
	data := []byte("inline data needs no registration, and no memory after the call.")
	want := bytes.Clone(data)
	wr := SendWR{ID: 2, Opcode: OpSend, Flags: Signaled | Inline}
	wr.SGE = SGE{Addr: uint64(addrOf(data)), Length: uint32(len(data))}
	a.postSend(t, wr)
	clear(data)
	a.succeed(t, 2)
	if wc := b.succeed(t, 1); !bytes.Equal(b.buf[:wc.ByteLen], want) {
		t.Errorf("received %q", b.buf[:wc.ByteLen])
	}
}

func TestHotCallsDoNotAllocate(t *testing.T) {
	s := onSite(t)
	a, b := connect(t, s, options{})
	recv := []RecvWR{{SGE: b.sge(0, 64)}}
	send := []SendWR{{Opcode: OpSend, Flags: Signaled, SGE: a.sge(0, 64)}}
	cqs := make([]*CQ, 1)
	wcs := make([]WC, 4) // made once, because what is passed to C is on the heap
	round := func() {
		check(t, b.cq.Notify())
		if _, err := b.qp.PostRecv(recv); err != nil {
			t.Fatal(err)
		}
		if _, err := a.qp.PostSend(send); err != nil {
			t.Fatal(err)
		}
		if _, err := b.ch.Events(cqs); err != nil {
			t.Fatal(err)
		}
		for _, cq := range []*CQ{a.cq, b.cq} {
			for {
				n, err := cq.Poll(wcs)
				if err != nil || n > 0 && wcs[0].Status != Success {
					t.Fatal(n, err, wcs[0])
				}
				if n > 0 {
					break
				}
			}
		}
	}
	if n := testing.AllocsPerRun(100, round); n != 0 {
		t.Errorf("%v allocations in post, wait and poll", n)
	}
}
