//go:build linux && cgo

package ibv

import "testing"

func TestReceivesComeFromTheSharedQueue(t *testing.T) {
	s := onSite(t)
	a, b := connect(t, s, options{srq: true})
	check(t, b.srq.Arm(4))
	for i := range 5 {
		b.postRecv(t, uint64(i), i*64, 64)
	}
	async := must(b.pd.Context.AsyncChannel())(t)
	atEnd(t, "async channel", async)
	for i := range 3 {
		a.postSend(t, SendWR{ID: uint64(i), Opcode: OpSend, Flags: Signaled, NumSGE: 1, SGE: a.sge(0, 32)})
		a.succeed(t, uint64(i))
		if wc := b.succeed(t, uint64(i)); wc.QPNum != b.qp.Num {
			t.Errorf("received %+v, not by QP %d", wc, b.qp.Num)
		}
	}
	if ev := asyncEvent(t, async, EventSRQLimit); ev.SRQ != b.srq {
		t.Errorf("the limit event is of SRQ %p, want %p", ev.SRQ, b.srq)
	}
}
