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

// Room for messages is used again after the device has reported that they were sent, and not before.
// Completions are requested often enough that nobody waits for ever.
func testSendRoom(t *testing.T) {
	useFake(t)
	for i, cfg := range []Config{{}, {sendBuffer: 1}} { // the smallest
		e, _ := fakePair(t, 44_000+i, cfg)
		sendRoom(t, e)
	}
	e, _ := fakePair(t, 44_002, Config{})
	e.Reserve(8, 8)
	for e.ReserveControl(8) != nil {
		e.CommitControl(8)
	}
	e.Commit(8)
	if n := e.send.underwayLocked(); n > maxSends {
		t.Errorf("%d messages are posted at a time, and the queue has room for %d", n, maxSends)
	}
}

func sendRoom(t *testing.T, e *Endpoint) {
	e.send.inline = 64
	m := sendModel{t: t, e: e}
	r := rand.New(rand.NewPCG(1, 1))
	var room []byte // room that is reserved for data
	const steps = 50_000
	waits := 0
	for i := range steps {
		m.step = i
		most := e.cfg.bufferSize
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

// sendModel tracks which messages the device has still to send.
type sendModel struct {
	t              *testing.T
	e              *Endpoint
	step           int
	flying         []sending
	signaled, done uint64 // the last message that requests a completion, and the last that has one
}

type sending struct {
	id       uint64
	from, to int // offsets in the send region
}

// wait completes all messages that request a completion.
func (m *sendModel) wait() {
	m.t.Helper()
	if m.signaled == m.done {
		m.t.Fatalf("step %d: no room, and nothing that is under way asks for a completion", m.step)
	}
	m.e.complete(ibv.WC{ID: kindSend | m.signaled})
	m.done = m.signaled
	m.flying = slices.DeleteFunc(m.flying, func(s sending) bool { return s.id <= m.done })
}

// committed commits n bytes at an offset.
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

// buffers models a receive queue: the buffers that are posted, in their order.
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

// deliver fills the next posted buffer with a message.
func (q *buffers) deliver(e *Endpoint, number uint64) {
	q.f.t.Helper()
	if len(q.posted) == 0 {
		q.f.t.Fatal("no buffer is posted, though the peer has credit")
	}
	n := q.posted[0]
	q.posted = q.posted[1:]
	binary.LittleEndian.PutUint64(e.recv.buffer(n), number)
	e.complete(ibv.WC{ID: kindRecv | uint64(n), Opcode: ibv.WCRecv, ByteLen: 8})
}

// receiveModel tracks which messages the peer has sent, within its window, and which buffers these
// occupy.
type receiveModel struct {
	buffers
	t          *testing.T
	e          *Endpoint
	sent, next uint64
	kept       []uint64
}

func newReceiveModel(t *testing.T, f *fake, e *Endpoint) *receiveModel {
	m := &receiveModel{buffers: buffers{f: f}, t: t, e: e}
	for n := range e.cfg.buffers {
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

// use sends, polls and releases messages at random.
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

// readAll reads and releases everything.
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

// Each buffer is posted again, once, when nobody reads it any more. So a peer that keeps to its window
// always finds a buffer.
func testReceiveBuffers(t *testing.T) {
	f := useFake(t)
	e, _ := fakePair(t, 45_000, Config{})
	m := newReceiveModel(t, f, e)
	m.use(20_000)
	m.readAll()
	if waiting := e.cfg.buffers - len(m.posted); e.Err() != nil || waiting >= repostBatch/2 || e.recv.unpostedLocked() != waiting {
		t.Errorf("%v; %d of %d buffers are not posted, it thinks %d", e.Err(), waiting, e.cfg.buffers, e.recv.unpostedLocked())
	}
}

// A completion that is not a valid message ends the connection, and is not delivered.
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
