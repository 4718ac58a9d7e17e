//go:build linux && cgo

package ibv

import (
	"bytes"
	"errors"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/testenv"
)

func TestCallsAfterCloseFail(t *testing.T) {
	s := onSite(t)
	a, _ := connect(t, s, options{})
	check(t, a.qp.Close())
	check(t, a.cq.Close())
	_, send := a.qp.PostSend(make([]SendWR, 1))
	_, recv := a.qp.PostRecv(make([]RecvWR, 1))
	_, poll := a.cq.Poll(make([]WC, 1))
	_, query := a.qp.Query(MaskState)
	for what, err := range map[string]error{"PostSend": send, "PostRecv": recv, "Poll": poll, "Query": query, "Notify": a.cq.Notify()} {
		if !errors.Is(err, syscall.EBADF) {
			t.Errorf("%s: %v, want EBADF", what, err)
		}
	}
	for what, c := range map[string]interface{ Close() error }{"QP": a.qp, "CQ": a.cq} {
		if err := c.Close(); err != nil {
			t.Errorf("second close of the %s: %v", what, err)
		}
	}
}

// An object that others use is not closed and still works: its events are delivered.
func TestAnObjectInUseIsNotClosed(t *testing.T) {
	if testenv.Device() == "siw" {
		return // its library unmaps a completion queue before the kernel refuses to destroy it
	}
	s := onSite(t)
	a, b := connect(t, s, options{})
	for what, c := range map[string]interface{ Close() error }{"PD": b.pd, "CQ": b.cq} {
		if err := c.Close(); !errors.Is(err, syscall.EBUSY) {
			t.Errorf("close of the %s in use: %v, want EBUSY", what, err)
		}
	}
	check(t, b.cq.Notify())
	b.postRecv(t, 1, 0, 64)
	a.postSend(t, SendWR{ID: 2, Opcode: OpSend, Flags: Signaled, SGE: a.sge(0, 32)})
	check(t, b.ch.poller.setDeadline(time.Now().Add(patience)))
	var cqs [4]*CQ
	if n, err := b.ch.Events(cqs[:]); n != 1 || err != nil || cqs[0] != b.cq {
		t.Errorf("the queue's event: %d, %v", n, err)
	}
	b.succeed(t, 1)
	a.succeed(t, 2)
}

// onSite checks that nothing is left.
func TestWhatTheDeviceRefusesLeavesNothing(t *testing.T) {
	s := onSite(t)
	a, _ := connect(t, s, options{})
	const tooMany = 1 << 30
	if cq, err := a.pd.Context.CreateCQ(tooMany, nil, 0); err == nil {
		atEnd(t, "CQ", cq)
		t.Errorf("a queue for %d completions", tooMany)
	}
	if qp, err := CreateQP(QPConfig{PD: a.pd, SendCQ: a.cq, RecvCQ: a.cq, Cap: QPCap{SendWR: tooMany, RecvWR: 1}}); err == nil {
		atEnd(t, "QP", qp)
		t.Errorf("a queue pair for %d work requests", tooMany)
	}
}

// A queue pair can be connected by hand, as is done where rdma_cm does not work.
func TestAQueuePairConnectsWithoutTheConnectionManager(t *testing.T) {
	s := onSite(t)
	var ends [2]*end
	var paths [2]QPPath
	var peers [2]QPPeer
	for i, name := range s.devices {
		ctx := must(Open(name))(t)
		atEnd(t, "device", ctx)
		ends[i] = equip(t, ctx, nil, options{access: RemoteRead})
		p := must(ctx.Port(1))(t)
		g, _ := rocev2(must(ctx.GIDs(1))(t), s, i)
		psn := uint32(1000 * (i + 1))
		paths[i] = QPPath{Port: 1, GIDIndex: uint8(g.Index), PSN: psn, MTU: p.ActiveMTU, ReadsIssued: 1, ReadsServed: 1, RetryCount: 6}
		peers[i] = QPPeer{QPNum: ends[i].qp.Num, PSN: psn, GID: g.GID}
	}
	up := func(i int) error {
		if err := ends[i].qp.Init(QPPath{Port: 1}, RemoteRead|RemoteWrite); err != nil {
			return err
		}
		if err := ends[i].qp.ReadyToReceive(paths[i], peers[1-i]); err != nil {
			return err
		}
		return ends[i].qp.ReadyToSend(paths[i])
	}
	if !s.directQP {
		if err := up(0); err == nil {
			t.Error("iWARP connected without rdma_cm")
		}
		return
	}
	check(t, up(0))
	check(t, up(1))
	attr := must(ends[0].qp.Query(MaskState | MaskTimeout | MaskRetryCount | MaskDestQPN | MaskMinRNRTimer))(t)
	if attr.State != QPRTS || attr.Timeout != 14 || attr.RetryCount != 6 || attr.DestQPN != ends[1].qp.Num || attr.MinRNRTimer != 1 {
		t.Errorf("%+v", attr)
	}
	a, b := ends[0], ends[1]
	b.postRecv(t, 1, 0, 4096)
	fill(a.buf[:4096], 11)
	a.postSend(t, SendWR{ID: 2, Opcode: OpSend, Flags: Signaled, SGE: a.sge(0, 4096)})
	a.succeed(t, 2)
	b.succeed(t, 1)
	if !bytes.Equal(a.buf[:4096], b.buf[:4096]) {
		t.Error("the data differ")
	}
	a.postSend(t, SendWR{ID: 3, Opcode: OpRead, Flags: Signaled, SGE: a.sge(8192, 4096), RemoteAddr: b.remote(0), RemoteKey: b.mr.RKey})
	a.succeed(t, 3)

	// In the error state, posted receives are flushed.
	b.postRecv(t, 4, 0, 64)
	check(t, b.qp.Modify(QPAttr{State: QPError}, MaskState))
	if wc := b.completion(t, 4); wc.Status != WRFlushErr {
		t.Errorf("flushed receive: %v", wc.Status)
	}
}
