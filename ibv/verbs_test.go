//go:build linux && cgo

package ibv

import (
	"bytes"
	"errors"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestDevices(t *testing.T) {
	s := onSite(t)
	devices := must(Devices())(t)
	for end, name := range s.devices {
		var found *Device
		for i := range devices {
			if devices[i].Name == name {
				found = &devices[i]
			}
		}
		if found == nil {
			t.Fatalf("%s is not among %v", name, devices)
		}
		if (found.Transport == TransportIWARP) != s.isIWARP || found.Sysfs == "" || found.GUID == 0 {
			t.Errorf("%+v", *found)
		}
		ctx := must(Open(name))(t)
		atEnd(t, "device", ctx)
		caps := must(ctx.Caps())(t)
		if caps.Ports != 1 || caps.MaxSGE < 1 || caps.MaxSGERead < 1 || caps.MaxQP < 1 || caps.MaxQPReadAtomic < 1 {
			t.Errorf("caps: %+v", caps)
		}
		if (caps.MaxMW > 0) != s.windows {
			t.Errorf("%d memory windows", caps.MaxMW)
		}
		p := must(ctx.Port(1))(t)
		if p.State != PortActive || p.LinkLayer != LinkEthernet || p.GIDs < 1 || p.ActiveMTU < 1 {
			t.Errorf("port: %+v", p)
		}
		gids := must(ctx.GIDs(1))(t)
		t.Logf("%s: %+v %+v %v", name, caps, p, gids)
		if s.isIWARP {
			continue
		}
		if _, ok := rocev2(gids, s, end); !ok {
			t.Errorf("no RoCE v2 GID of %v in %v", s.v4[end], gids)
		}
	}
	if _, err := Open("nosuch"); !errors.Is(err, syscall.ENODEV) {
		t.Errorf("Open of a device that is not there: %v", err)
	}
	ctx := must(Open(s.devices[0]))(t)
	atEnd(t, "device", ctx)
	if _, err := ctx.Port(7); err == nil {
		t.Error("there is a port 7")
	}
}

func rocev2(gids []GIDEntry, s site, end int) (GIDEntry, bool) {
	for _, g := range gids {
		if g.Type == GIDTypeRoCEv2 && g.GID.Addr() == s.v4[end] {
			return g, true
		}
	}
	return GIDEntry{}, false
}

func TestSendAndReceive(t *testing.T) {
	s := onSite(t)
	a, b := connect(t, s, options{})
	b.postRecv(t, 1, 0, 4096)
	fill(a.buf[:3000], 1)
	a.postSend(t, SendWR{ID: 2, Opcode: OpSend, Flags: Signaled, NumSGE: 1, SGE: a.sge(0, 3000)})
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

// More than are translated at a time, so that both ends cross that border.
func TestListsKeepTheirOrder(t *testing.T) {
	s := onSite(t)
	a, b := connect(t, s, options{})
	const n, size = 100, 64
	recvs, sends := make([]RecvWR, n), make([]SendWR, n)
	for i := range n {
		recvs[i] = RecvWR{ID: uint64(i), NumSGE: 1, SGE: b.sge(i*size, size)}
		sends[i] = SendWR{ID: uint64(i), Opcode: OpSend, NumSGE: 1, SGE: a.sge(i*size, size)}
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

func TestFullQueueSaysHowMuchWasPosted(t *testing.T) {
	s := onSite(t)
	_, b := connect(t, s, options{})
	wrs := make([]RecvWR, 2000)
	for i := range wrs {
		wrs[i] = RecvWR{ID: uint64(i), NumSGE: 1, SGE: b.sge(0, 64)}
	}
	n, err := b.qp.PostRecv(wrs)
	if n < int(b.qp.Cap.RecvWR) || n >= len(wrs) || !errors.Is(err, syscall.ENOMEM) {
		t.Errorf("%d posted, %v; the queue holds %d", n, err, b.qp.Cap.RecvWR)
	}
}

func TestReadAndWrite(t *testing.T) {
	s := onSite(t)
	access := RemoteRead | RemoteWrite
	a, b := connect(t, s, options{access: access})
	const size = 512 << 10

	fill(b.buf[:size], 5)
	a.postSend(t, SendWR{ID: 1, Opcode: OpRead, Flags: Signaled, NumSGE: 1, SGE: a.sge(0, size), RemoteAddr: b.remote(0), RemoteKey: b.mr.RKey})
	if wc := a.succeed(t, 1); wc.Opcode != WCRead {
		t.Errorf("read completed as %+v", wc)
	}
	if !bytes.Equal(a.buf[:size], b.buf[:size]) {
		t.Error("read: the data differ")
	}

	// A send after a write arrives after it.
	b.postRecv(t, 2, size, 64)
	fill(a.buf[:size], 9)
	a.postSend(t,
		SendWR{ID: 3, Opcode: OpWrite, NumSGE: 1, SGE: a.sge(0, size), RemoteAddr: b.remote(0), RemoteKey: b.mr.RKey},
		SendWR{ID: 4, Opcode: OpSend, Flags: Signaled, NumSGE: 1, SGE: a.sge(0, 1)})
	b.succeed(t, 2)
	if !bytes.Equal(a.buf[:size], b.buf[:size]) {
		t.Error("write: the data differ")
	}
	a.succeed(t, 4)
}

func TestImmediateData(t *testing.T) {
	s := onSite(t)
	a, b := connect(t, s, options{access: RemoteWrite})
	b.postRecv(t, 1, 4096, 64)
	wr := SendWR{ID: 2, Opcode: OpWriteWithImm, Flags: Signaled, NumSGE: 1, SGE: a.sge(0, 8), RemoteAddr: b.remote(0), RemoteKey: b.mr.RKey}
	if !s.withImm {
		// siw says so by a negative errno.
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

func TestInline(t *testing.T) {
	s := onSite(t)
	a, b := connect(t, s, options{inline: 64})
	if a.qp.Cap.InlineData < 64 {
		t.Fatalf("granted %d bytes inline", a.qp.Cap.InlineData)
	}
	b.postRecv(t, 1, 0, 64)
	data := []byte("inline data needs no registration, and no memory after the call.")
	want := bytes.Clone(data)
	wr := SendWR{ID: 2, Opcode: OpSend, Flags: Signaled | Inline, NumSGE: 1}
	wr.SGE[0] = SGE{Addr: uint64(addrOf(data)), Length: uint32(len(data))}
	a.postSend(t, wr)
	clear(data)
	a.succeed(t, 2)
	if wc := b.succeed(t, 1); !bytes.Equal(b.buf[:wc.ByteLen], want) {
		t.Errorf("received %q", b.buf[:wc.ByteLen])
	}
}

func TestSharedReceiveQueue(t *testing.T) {
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

func TestCompletionChannel(t *testing.T) {
	s := onSite(t)
	a, b := connect(t, s, options{})
	b.cq.Owner = "owner"
	b.postRecv(t, 1, 0, 64)
	check(t, b.cq.Notify(false))

	got := make(chan *CQ)
	ended := make(chan error)
	go func() {
		for {
			var cqs [4]*CQ
			n, err := b.ch.Events(cqs[:])
			if err != nil {
				ended <- err
				return
			}
			for _, cq := range cqs[:n] {
				got <- cq
			}
		}
	}()
	a.postSend(t, SendWR{ID: 2, Opcode: OpSend, Flags: Signaled, NumSGE: 1, SGE: a.sge(0, 32)})
	select {
	case cq := <-got:
		if cq != b.cq || cq.Owner != "owner" {
			t.Errorf("event of %+v", cq)
		}
	case err := <-ended:
		t.Fatal(err)
	case <-time.After(patience):
		t.Fatal("no event")
	}
	b.succeed(t, 1)
	a.succeed(t, 2)

	// Not armed: no event. The deadline ends the wait.
	b.postRecv(t, 3, 0, 64)
	a.postSend(t, SendWR{ID: 4, Opcode: OpSend, Flags: Signaled, NumSGE: 1, SGE: a.sge(0, 32)})
	b.succeed(t, 3)
	a.succeed(t, 4)
	check(t, b.ch.poller.setDeadline(time.Now()))
	select {
	case cq := <-got:
		t.Errorf("event of %+v, which was not armed", cq)
	case err := <-ended:
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("Events after its deadline: %v", err)
		}
	case <-time.After(patience):
		t.Fatal("the deadline did not end Events")
	}
}

func TestCloseWakesWaiters(t *testing.T) {
	s := onSite(t)
	ctx := must(Open(s.devices[0]))(t)
	atEnd(t, "device", ctx)
	async := must(ctx.AsyncChannel())(t)
	comp := must(ctx.CreateCompChannel())(t)
	cm := must(NewEventChannel())(t)
	for _, c := range []struct {
		what  string
		wait  func() error
		close func() error
	}{
		{"Events", func() error { _, err := comp.Events(make([]*CQ, 1)); return err }, comp.Close},
		{"Event", func() error { _, err := cm.Event(); return err }, cm.Close},
		{"async Event", func() error { _, err := async.Event(); return err }, async.Close},
	} {
		ended := make(chan error, 1)
		go func() { ended <- c.wait() }()
		select {
		case err := <-ended:
			t.Errorf("%s did not wait: %v", c.what, err)
		case <-time.After(20 * time.Millisecond): // most likely it sleeps by now; right in either case
		}
		check(t, c.close())
		select {
		case err := <-ended:
			if !errors.Is(err, os.ErrClosed) {
				t.Errorf("%s after Close: %v", c.what, err)
			}
		case <-time.After(patience):
			t.Fatalf("%s is not woken by Close", c.what)
		}
	}
}

func TestMemoryWindow(t *testing.T) {
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

func TestRegistrationErrors(t *testing.T) {
	s := onSite(t)
	ctx := must(Open(s.devices[0]))(t)
	atEnd(t, "device", ctx)
	pd := must(ctx.AllocPD())(t)
	atEnd(t, "PD", pd)
	for _, c := range []struct {
		what   string
		addr   uintptr
		length int
		errno  syscall.Errno
	}{
		{"unmapped", 4096, 4096, syscall.EFAULT},
		{"of no length", addrOf(make([]byte, 8)), 0, syscall.EINVAL},
		{"of negative length", addrOf(make([]byte, 8)), -1, syscall.EINVAL},
	} {
		mr, err := pd.RegMR(c.addr, c.length, LocalWrite)
		var e *Error
		if mr != nil || !errors.Is(err, c.errno) || !errors.As(err, &e) || e.Verb != "ibv_reg_mr" || !strings.Contains(err.Error(), s.devices[0]) {
			t.Errorf("memory %s: %v, %v, want %v", c.what, mr, err, c.errno)
		}
	}
}

func TestUseAfterClose(t *testing.T) {
	s := onSite(t)
	a, _ := connect(t, s, options{})
	check(t, a.qp.Close())
	check(t, a.cq.Close())
	_, send := a.qp.PostSend(make([]SendWR, 1))
	_, recv := a.qp.PostRecv(make([]RecvWR, 1))
	_, poll := a.cq.Poll(make([]WC, 1))
	_, query := a.qp.Query(MaskState)
	for what, err := range map[string]error{"PostSend": send, "PostRecv": recv, "Poll": poll, "Query": query, "Notify": a.cq.Notify(false)} {
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

func TestHotCallsDoNotAllocate(t *testing.T) {
	s := onSite(t)
	a, b := connect(t, s, options{})
	recv := []RecvWR{{NumSGE: 1, SGE: b.sge(0, 64)}}
	send := []SendWR{{Opcode: OpSend, Flags: Signaled, NumSGE: 1, SGE: a.sge(0, 64)}}
	cqs := make([]*CQ, 1)
	wcs := make([]WC, 4) // once: what is passed to C is in the heap
	round := func() {
		check(t, b.cq.Notify(false))
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

// A queue pair that is brought up by hand, as where rdma_cm does not work.
func TestQueuePairWithoutCM(t *testing.T) {
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
		if err := ends[i].qp.Init(1, RemoteRead|RemoteWrite); err != nil {
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
	a.postSend(t, SendWR{ID: 2, Opcode: OpSend, Flags: Signaled, NumSGE: 1, SGE: a.sge(0, 4096)})
	a.succeed(t, 2)
	b.succeed(t, 1)
	if !bytes.Equal(a.buf[:4096], b.buf[:4096]) {
		t.Error("the data differ")
	}
	a.postSend(t, SendWR{ID: 3, Opcode: OpRead, Flags: Signaled, NumSGE: 1, SGE: a.sge(8192, 4096), RemoteAddr: b.remote(0), RemoteKey: b.mr.RKey})
	a.succeed(t, 3)

	// To the error state: what was posted is flushed.
	b.postRecv(t, 4, 0, 64)
	check(t, b.qp.Modify(QPAttr{State: QPError}, MaskState))
	if wc := b.completion(t, 4); wc.Status != WRFlushErr {
		t.Errorf("flushed receive: %v", wc.Status)
	}
}
