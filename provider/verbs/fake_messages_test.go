//go:build linux && cgo

package verbs

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"slices"
	"syscall"
	"testing"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/session"
)

// Room for messages is used again when the device has said so, and not before; and it is
// said soon enough that nobody waits for ever.
func testSendRoom(t *testing.T) {
	useFake(t)
	for i, cfg := range []Config{{}, {SendBuffer: 1}} { // the least
		e, _ := fakePair(t, 44_000+i, cfg)
		sendRoom(t, e)
	}
}

func sendRoom(t *testing.T, e *Endpoint) {
	e.send.inline = 64
	m := sendModel{t: t, e: e}
	r := rand.New(rand.NewPCG(1, 1))
	var room []byte // reserved for data
	const steps = 50_000
	waits := 0
	for i := range steps {
		m.step = i
		most := e.cfg.BufferSize
		if i/100%2 == 0 {
			most = 100
		}
		if r.IntN(4) == 0 {
			n := 1 + r.IntN(session.MaxControl)
			if e.ReserveControl(n) == nil {
				waits++
				m.wait()
			} else if r.IntN(64) != 0 {
				m.committed(e.send.control.at, n, e.CommitControl)
			}
			continue
		}
		if room != nil {
			n := r.IntN(len(room) + 1)
			if r.IntN(64) == 0 {
				n = 0
			}
			room = nil
			m.committed(e.send.data.at, n, e.Commit)
			continue
		}
		lo := 1 + r.IntN(most)
		room = e.Reserve(lo, lo+r.IntN(most-lo+1))
		switch {
		case room == nil:
			waits++
			m.wait()
		case len(room) < lo:
			t.Fatalf("step %d: %d bytes of %d", i, len(room), lo)
		case e.send.underwayLocked() >= maxSends-session.ControlReserve:
			t.Fatalf("step %d: data takes what is control's", i)
		}
	}
	if e.Err() != nil || waits < steps/100 {
		t.Errorf("%v, %d waits", e.Err(), waits)
	}
}

// sendModel knows what the device still sends.
type sendModel struct {
	t              *testing.T
	e              *Endpoint
	step           int
	flying         []sending
	signaled, done uint64 // the last message that asks for a completion, that has one
}

type sending struct {
	id       uint64
	from, to int // of the send region
}

// wait completes what asks for it.
func (m *sendModel) wait() {
	m.t.Helper()
	if m.signaled == m.done {
		m.t.Fatalf("step %d: no room, and nothing that is under way asks for a completion", m.step)
	}
	m.e.complete(ibv.WC{ID: kindSend | m.signaled})
	m.done = m.signaled
	m.flying = slices.DeleteFunc(m.flying, func(s sending) bool { return s.id <= m.done })
}

// committed commits n bytes from there.
func (m *sendModel) committed(from, n int, commit func(int)) {
	m.t.Helper()
	before := m.e.send.posted
	commit(n)
	if posted := m.e.send.posted - before; posted != min(uint64(n), 1) || m.e.send.underwayLocked() > maxSends {
		m.t.Fatalf("step %d: %d messages of %d bytes are posted, %d in all", m.step, posted, n, m.e.send.underwayLocked())
	}
	if n > m.e.send.inline {
		for _, s := range m.flying {
			if from < s.to && s.from < from+n {
				m.t.Fatalf("step %d: bytes %d to %d are used while the device sends %d to %d", m.step, from, from+n, s.from, s.to)
			}
		}
		m.flying = append(m.flying, sending{m.e.send.posted, from, from + n})
	}
	if m.e.send.unsignaled == 0 {
		m.signaled = m.e.send.posted
	}
}

// buffers is the model of a receive queue: which buffers are posted, in order.
type buffers struct {
	f      *fake
	posted []int
	seen   int64
}

func (q *buffers) look() {
	for ; q.seen < q.f.get(fakeRecvs); q.seen++ {
		n := int(uint64(q.f.get(fakePosted+int(q.seen%fakeRing))) &^ kindMask)
		if slices.Contains(q.posted, n) {
			q.f.t.Errorf("buffer %d is posted twice", n)
		}
		q.posted = append(q.posted, n)
	}
}

// deliver fills the next buffer with a message.
func (q *buffers) deliver(e *Endpoint, number uint64) {
	q.f.t.Helper()
	if len(q.posted) == 0 {
		q.f.t.Fatal("no buffer is posted, though the peer has credit")
	}
	n := q.posted[0]
	q.posted = q.posted[1:]
	mem, _ := e.recv.buffer(n)
	binary.LittleEndian.PutUint64(mem, number)
	e.complete(ibv.WC{ID: kindRecv | uint64(n), Opcode: ibv.WCRecv, ByteLen: 8})
}

// receiveModel knows what the peer has sent, within its window, and which buffers that takes.
type receiveModel struct {
	buffers
	t          *testing.T
	e          *Endpoint
	all        int // the queue's buffers
	sent, next uint64
	kept       []uint64
}

func newReceiveModel(t *testing.T, f *fake, e *Endpoint) *receiveModel {
	m := &receiveModel{buffers: buffers{f: f}, t: t, e: e, all: e.cfg.Buffers}
	if e.recv.group != nil {
		m.all = e.recv.group.shares * srqShare
	}
	for n := range m.all {
		m.posted = append(m.posted, n)
	}
	f.set(fakeRecvs, 0)
	return m
}

func (m *receiveModel) send() {
	m.t.Helper()
	m.deliver(m.e, m.sent)
	m.sent++
}

func numberOf(msg []byte) uint64 { return binary.LittleEndian.Uint64(msg) }

func (m *receiveModel) poll(keep bool) {
	m.t.Helper()
	var ev session.Event
	got := m.e.Poll(&ev)
	m.look()
	if got != (m.next < m.sent) || got && numberOf(ev.Msg) != m.next {
		m.t.Fatalf("message %d of %d: %v, %+v", m.next, m.sent, got, ev)
	}
	if !got {
		return
	}
	if keep {
		m.e.Keep()
		m.kept = append(m.kept, m.next)
	} else {
		m.e.Drop()
	}
	m.next++
}

func (m *receiveModel) release() {
	m.t.Helper()
	if msg := m.e.Front(); numberOf(msg) != m.kept[0] {
		m.t.Fatalf("the oldest kept is %d, want %d", numberOf(msg), m.kept[0])
	}
	m.e.Release()
	m.kept = m.kept[1:]
}

// use sends, polls and releases at random.
func (m *receiveModel) use(steps int) {
	m.t.Helper()
	r := rand.New(rand.NewPCG(2, 2))
	for range steps {
		switch r.IntN(4) {
		case 0, 1:
			if int(m.sent-m.next)+len(m.kept) < m.e.limits.Window {
				m.send()
			}
		case 2:
			m.poll(r.IntN(2) == 0)
		case 3:
			if len(m.kept) > 0 {
				m.release()
			}
		}
		m.look()
	}
}

// readAll leaves nothing to be read or released.
func (m *receiveModel) readAll() {
	m.t.Helper()
	for m.next < m.sent {
		m.poll(false)
	}
	for len(m.kept) > 0 {
		m.release()
	}
	m.poll(false)
	m.look()
}

// Each buffer is posted again once, when nobody reads it any more, so that a peer which
// keeps to its window finds one; those of a group also when its member ends.
func testReceiveBuffers(t *testing.T) {
	f := useFake(t)
	f.set(fakeSRQs, 16)
	for i, cfg := range append(fakeConfigs, fakeConfigs[1]) {
		e, _ := fakePair(t, 45_000+i, cfg)
		if shared := e.recv.group != nil; shared != (cfg.SharedDomain && !without(session.FeatureSRQ)) {
			t.Fatalf("a shared queue: %v", shared)
		}
		m := newReceiveModel(t, f, e)
		m.use(20_000)
		m.readAll()
		if waiting := m.all - len(m.posted); e.Err() != nil || waiting >= repostBatch/2 || e.recv.taken != waiting {
			t.Errorf("%v; %d of %d buffers are not posted, it thinks %d", e.Err(), waiting, m.all, e.recv.taken)
		}
		if e.recv.group != nil {
			memberEnds(m, i < len(fakeConfigs))
		}
	}
}

// memberEnds ends a member of a group that has not read all its messages, nor decided
// about the last one that it has read, if that is so.
func memberEnds(m *receiveModel, undecided bool) {
	m.t.Helper()
	for range 10 {
		m.send()
	}
	m.poll(true)
	m.poll(true)
	if undecided {
		var ev session.Event
		if m.e.Poll(&ev); ev.Kind != session.Message { // and neither kept nor dropped
			m.t.Fatal("no message")
		}
	}
	n := m.posted[0]
	m.posted = m.posted[1:]
	m.e.complete(ibv.WC{ID: kindRecv | uint64(n), Status: ibv.WRFlushErr})
	posted := len(m.posted)
	m.e.Abort()
	m.look()
	if len(m.posted) != posted {
		m.t.Error("buffers of a member are posted before it is retired")
	}
	m.e.Retire()
	m.look()
	if len(m.posted) != m.all {
		m.t.Errorf("%d of %d buffers are posted behind a member's end", len(m.posted), m.all)
	}
}

// What comes and is no message ends the connection, and is not handed out.
func testNoMessages(t *testing.T) {
	useFake(t)
	i := 0
	for what, tt := range map[string]struct {
		wc  ibv.WC
		end error
	}{
		"the disconnect message": {ibv.WC{Opcode: ibv.WCRecv}, syscall.EPIPE},
		"of another kind":        {ibv.WC{Opcode: ibv.WCSend, ByteLen: 8}, syscall.ECONNRESET},
		"written, with a tag":    {ibv.WC{Opcode: ibv.WCRecvImm, Flags: ibv.WCWithImm, ByteLen: 8}, syscall.ECONNRESET},
		"with a tag":             {ibv.WC{Opcode: ibv.WCRecv, Flags: ibv.WCWithImm, ByteLen: 8}, syscall.ECONNRESET},
		"too long":               {ibv.WC{Opcode: ibv.WCRecv, ByteLen: 1 << 20}, syscall.ECONNRESET},
		"that takes a key":       {ibv.WC{Opcode: ibv.WCRecv, Flags: ibv.WCWithInv, ByteLen: 8}, syscall.ECONNRESET},
		"that failed":            {ibv.WC{Status: ibv.RemAccessErr}, syscall.ECONNRESET},
		"of a silent peer":       {ibv.WC{Status: ibv.RetryExcErr}, syscall.ETIMEDOUT},
		"of a slow responder":    {ibv.WC{Status: ibv.RespTimeoutErr}, syscall.ETIMEDOUT},
	} {
		e, _ := fakePair(t, 46_000+i, Config{})
		i++
		w := make(wakes, 1)
		e.Start(w)
		tt.wc.ID = kindRecv
		e.complete(tt.wc)
		var ev session.Event
		if err := e.Err(); e.Poll(&ev) || !errors.Is(err, tt.end) {
			t.Errorf("a completion %s: %+v, %v", what, ev, err)
		}
		if len(w) == 0 {
			t.Errorf("a completion %s: nobody is woken", what)
		}
	}
}

func admit(g *recvGroup, cfg Config) error {
	g.dom.mu.Lock()
	defer g.dom.mu.Unlock()
	return g.admitLocked(cfg)
}

// quit ends the membership of one that has taken nothing.
func quit(g *recvGroup) {
	g.leave(false)
	g.giveBack(nil)
}

// Members of a group have buffers of one size, and a share of them each; nobody joins one
// from which some may be missing.
func testGroups(t *testing.T) {
	f := useFake(t)
	if without(session.FeatureSRQ) {
		return
	}
	f.set(fakeSRQs, 16)
	cfg := Config{SharedDomain: true, SRQFrom: 1}
	small := cfg
	small.BufferSize = 512
	a, b := fakePair(t, 48_000, cfg)
	c, _ := fakePair(t, 48_001, cfg)
	d, _ := fakePair(t, 48_002, small)
	g := a.recv.group
	if g == nil || b.recv.group != g || c.recv.group != g || g.members != 4 || g.shares != 4 {
		t.Errorf("%d members with %d shares", g.members, g.shares)
	}
	if d.recv.group == nil || d.recv.group == g {
		t.Error("buffers of different sizes in a group")
	}
	for i := 0; len(g.dom.groups) == 2; i++ { // until it is full
		e, peer := fakePair(t, 48_010+i, cfg)
		e.recv.tookLast() // which a device reports when it ends: it is not waited for then
		peer.recv.tookLast()
		if e.recv.group != g && g.members != groupMembers {
			t.Fatalf("a group of %d members takes nobody", g.members)
		}
	}
	if g.members != groupMembers || g.shares != groupMembers {
		t.Errorf("%d members with %d shares", g.members, g.shares)
	}
	quit(g)
	if err := admit(g, a.cfg); err != nil || g.shares != groupMembers {
		t.Errorf("who follows another member: %v, %d shares", err, g.shares)
	}
	g.close()
	e, _ := fakePair(t, 48_003, cfg)
	if e.recv.group == nil || e.recv.group == g {
		t.Error("it joins a group that takes nobody")
	}
	for n := 0; n < srqShare+1; n++ { // more than it has credit for
		e.complete(ibv.WC{ID: kindRecv | uint64(n), Opcode: ibv.WCRecv, ByteLen: 8})
	}
	if err := e.Err(); !errors.Is(err, syscall.ECONNRESET) || e.recv.arrived.n != srqShare || !e.recv.buffersLost {
		t.Errorf("%v, %d messages", err, e.recv.arrived.n)
	}
	f.set(fakeErrno, int64(syscall.ENOMEM))
	f.set(fakeCountdown, 1) // the call behind the registration
	h := e.recv.group
	if err := admit(h, a.cfg); err == nil || !h.closed || f.failed() != "post_srq_recv" {
		t.Errorf("a share that %s does not post: %v, nobody joins: %v", f.failed(), err, h.closed)
	}
	quit(h)
	h.closed = false
	e.discard()
	if !h.closed {
		t.Error("a group from which receives may be missing takes members")
	}
}
