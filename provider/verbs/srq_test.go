package verbs

import (
	"errors"
	"sync"
	"syscall"
	"testing"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/session"
)

// groupsOf are the groups of the endpoint's domain, and how many shares of
// buffers they have.
func groupsOf(e *Endpoint) (groups, shares, closed int) {
	e.dom.mu.Lock()
	defer e.dom.mu.Unlock()
	for _, g := range e.dom.groups {
		shares += g.shares
		if g.closed {
			closed++
		}
	}
	return len(e.dom.groups), shares, closed
}

// crowd makes n connections between shared domains.
func crowd(t testing.TB, l *Listener, cfg Config, n int) (all []*Endpoint) {
	t.Helper()
	for range n {
		a, b := pair(t, l, cfg)
		all = append(all, a, b)
	}
	return all
}

// chat sends messages both ways on all connections at once.
func chat(t testing.TB, all []*Endpoint, count int) {
	t.Helper()
	var wg sync.WaitGroup
	for i, e := range all {
		peer := all[i^1]
		wg.Go(func() {
			for n := range count {
				// One ahead at most: what a session's credits see to.
				var room []byte
				if !until(e, func() bool { room = e.ReserveControl(64); return room != nil }) {
					t.Errorf("connection %d, no room for message %d: %v", i/2, n, e.Err())
					return
				}
				room[0] = byte(n)
				e.CommitControl(64)
				var ev session.Event
				if !until(e, func() bool { return e.Poll(&ev) }) {
					t.Errorf("connection %d, message %d: %v, the peer %v", i/2, n, e.Err(), peer.Err())
					return
				}
				if ev.Msg[0] != byte(n) {
					t.Errorf("connection %d: message %d came instead of %d", i/2, ev.Msg[0], n)
				}
				e.Drop()
			}
		})
	}
	wg.Wait()
}

// leave ends a connection with a whole window of messages that nobody has read, in the
// way whose turn it is.
func leave(t *testing.T, from, to *Endpoint, turn int) {
	t.Helper()
	d := expose(t, from, to, make([]byte, 64), session.RemoteRead)
	fill(t, from)
	// When this has come back they have all arrived.
	if err := read(t, from, make([]byte, 64), d); err != nil {
		t.Fatal(err)
	}
	switch turn {
	case 0:
		for range 10 {
			event(t, to)
			to.Keep()
		}
		event(t, to) // and neither kept nor dropped
		from.Close()
		to.Close()
	case 1:
		from.Close()
		to.Abort()
	default: // before the other's end is known
		to.Abort()
		from.Abort()
	}
	from.Retire()
	to.Retire()
}

// expectOneGroup of n members at most.
func expectOneGroup(t *testing.T, e *Endpoint, n int) {
	t.Helper()
	groups, shares, closed := groupsOf(e)
	t.Logf("%d groups of %d shares, %d closed", groups, shares, closed)
	// Where a device does not say when a queue pair has taken its
	// last receive (siw), groups may be given up.
	if testenv.Device() != "siw" && (groups != 1 || shares > n || closed != 0) {
		t.Errorf("%d groups with %d shares for %d members, %d closed", groups, shares, n, closed)
	}
}

// Connections share a queue, whose buffers are as many as its members need at
// their peak, and which goes with the last of them.
func TestSharedQueueGrowsAndGoes(t *testing.T) {
	nothingLeft(t)
	cfg := Config{SharedDomain: true, SRQFrom: 1, BufferSize: smallestMTU} // so that rxe loses nothing
	l := listen(t, cfg)
	const n = 4
	all := crowd(t, l, cfg, n)
	for i, e := range all {
		if e.recv.group != all[i%2].recv.group {
			t.Errorf("endpoint %d is in another group", i)
		}
	}
	chat(t, all, 30)
	for turn := range 5 {
		for i := 0; i < n; i += 2 { // half of them
			leave(t, all[i], all[i+1], turn)
		}
		for i := 0; i < n; i += 2 {
			all[i], all[i+1] = pair(t, l, cfg)
		}
		useInFull(t, all)
		chat(t, all, 20)
		for _, e := range all[:2] {
			expectOneGroup(t, e, n)
		}
	}
	for _, e := range all {
		e.Close()
		e.Retire()
	}
	for i := range 2 {
		if groups, _, _ := groupsOf(all[i]); groups != 0 {
			t.Errorf("%d groups are left", groups)
		}
	}
}

// From SRQFrom on, and only in a domain that is shared.
func TestSharedQueueFrom(t *testing.T) {
	nothingLeft(t)
	for _, tt := range []struct {
		name string
		cfg  Config
		want [4]bool
	}{
		{"third", Config{SharedDomain: true, SRQFrom: 3}, [4]bool{false, false, true, true}},
		{"disabled", Config{SharedDomain: true, SRQFrom: 1, Disable: session.FeatureSRQ}, [4]bool{}},
		{"own domains", Config{SRQFrom: 1}, [4]bool{}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := listen(t, tt.cfg)
			var all []*Endpoint
			for i, want := range tt.want {
				a, b, err := connect(l, tt.cfg)
				if err != nil {
					t.Fatal(err)
				}
				defer a.discard()
				defer b.discard()
				begin(a)
				begin(b)
				for _, e := range []*Endpoint{a, b} {
					if got := e.recv.group != nil; got != want {
						t.Errorf("connection %d has a shared queue: %v, want %v", i+1, got, want)
					}
					if w := e.Limits().Window; w < session.MinWindow || want && w != session.MinWindow {
						t.Errorf("connection %d has a window of %d", i+1, w)
					}
				}
				all = append(all, a, b)
			}
			chat(t, all, 20)
		})
	}
}

// Nobody joins a group whose queue has failed, though it has room.
func TestFailedGroupTakesNobody(t *testing.T) {
	nothingLeft(t)
	cfg := Config{SharedDomain: true, SRQFrom: 1}
	l := listen(t, cfg)
	a, _ := pair(t, l, cfg)
	b, _ := pair(t, l, cfg)
	if a.recv.group == nil || a.recv.group != b.recv.group {
		t.Fatal("they have no group in common")
	}
	a.recv.group.close()
	if c, d := pair(t, l, cfg); c.recv.group == a.recv.group || d.recv.group == a.recv.group {
		t.Error("it takes one more")
	}
}

// More than one group, each at its full depth with all credits in use at once.
func TestSharedQueuesInFullUse(t *testing.T) {
	nothingLeft(t)
	cfg := Config{SharedDomain: true, SRQFrom: 1, BufferSize: session.MaxControl, SendBuffer: 1}
	l := listen(t, cfg)
	all := crowd(t, l, cfg, groupMembers+2)
	if groups, shares, _ := groupsOf(all[0]); groups != 2 || shares != groupMembers+2 {
		t.Errorf("%d groups, %d shares", groups, shares)
	}
	useInFull(t, all)
	chat(t, all, 20)
}

// fill sends as many messages as the peer has given credit for.
func fill(t testing.TB, e *Endpoint) {
	t.Helper()
	for sent := range e.Limits().Window {
		if !until(e, func() bool { return trySend(e, 16, sent%2 == 0) || trySend(e, 16, sent%2 != 0) }) {
			t.Fatalf("no room for message %d: %v", sent, e.Err())
		}
	}
}

// trySend sends a message of n bytes, if there is room.
func trySend(e *Endpoint, n int, control bool) bool {
	switch {
	case control && e.ReserveControl(n) != nil:
		e.CommitControl(n)
	case !control && e.Reserve(n, n) != nil:
		e.Commit(n)
	default:
		return false
	}
	return true
}

// useInFull fills every window before anybody looks.
func useInFull(t testing.TB, all []*Endpoint) {
	t.Helper()
	for _, e := range all {
		fill(t, e)
	}
	for _, e := range all {
		for range e.Limits().Window {
			event(t, e)
			e.Drop()
		}
	}
}

// A peer that sends more than it has credit for is found out, and its group
// goes on.
func TestPeerOverspends(t *testing.T) {
	nothingLeft(t)
	cfg := Config{SharedDomain: true, SRQFrom: 1}
	l := listen(t, cfg)
	all := crowd(t, l, cfg, 4)
	chat(t, all, 10)
	hostile, victim := all[0], all[1]
	for range 2 * srqShare {
		if !until(hostile, func() bool { return hostile.Reserve(16, 16) != nil }) {
			break
		}
		hostile.Commit(16)
	}
	n := 0
	var ev session.Event
	until(victim, func() bool {
		for victim.Poll(&ev) {
			n++
			victim.Keep()
		}
		return false
	})
	if victim.Err() == nil {
		t.Fatalf("not found out after %d messages", n)
	}
	if err := victim.Err(); !errors.Is(err, syscall.ECONNRESET) || n > srqShare {
		t.Errorf("%d messages, %v; want %d at most, ECONNRESET", n, err, srqShare)
	}
	victim.discard()
	hostile.discard()
	chat(t, all[2:], 50)
	if _, _, closed := groupsOf(all[3]); closed == 0 {
		t.Error("a group from which receives may be missing takes members")
	}
	a, b := pair(t, l, cfg)
	chat(t, append(all[2:], a, b), 50)
}

// A message that does not fit its buffer costs its connection alone.
func TestMessageTooLong(t *testing.T) {
	nothingLeft(t)
	cfg := Config{SharedDomain: true, SRQFrom: 1, BufferSize: 512}
	l := listen(t, cfg)
	all := crowd(t, l, cfg, 3)
	e := all[0]
	e.q.mu.Lock()
	e.send.wr[0] = ibv.SendWR{Opcode: ibv.OpSend, NumSGE: 1}
	e.send.wr[0].SGE[0] = ibv.SGE{Addr: uint64(addressOf(e.send.mem)), Length: 1024, LKey: e.send.mr.LKey}
	e.send.postLocked(true)
	e.q.mu.Unlock()
	if err := endOf(t, all[1]); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%v, want ECONNRESET", err)
	}
	e.discard()
	all[1].discard()
	chat(t, all[2:], 50)
}

// Connections end in the middle of messages that several packets have: where the device
// does not give back what it had taken for them from the shared queue (rxe), nobody
// counts on that queue any more.
func TestSharedQueueLosesNothingUnnoticed(t *testing.T) {
	nothingLeft(t)
	const size = 32 << 10
	cfg := Config{SharedDomain: true, SRQFrom: 1, BufferSize: size, SendBuffer: 1 << 20}
	l := listen(t, cfg)
	a, b := pair(t, l, cfg)
	rounds := 60
	if testenv.Device() == "siw" { // which makes no event, and is waited for each time
		rounds = 6
	}
	for range rounds {
		c, d := pair(t, l, cfg)
		for range 16 {
			if c.Reserve(size, size) == nil {
				break
			}
			c.Commit(size)
		}
		event(t, d) // the next one is under way
		d.Drop()
		d.discard()
		c.discard()
	}
	c, d := pair(t, l, cfg)
	groups, shares, closed := groupsOf(b)
	t.Logf("%d groups of %d shares, %d closed; the newest shares the first's: %v", groups, shares, closed, d.recv.group == b.recv.group)
	if testenv.Device() == "rxe" && closed == 0 {
		t.Error("no connection has ended in the middle of a message, or nobody has noticed")
	}
	useInFull(t, []*Endpoint{a, b, c, d})
	for _, e := range []*Endpoint{a, b, c, d} {
		e.discard()
	}
}

// What a connection of a group brings along fills what the arena gives for it.
func TestShareFillsItsMemory(t *testing.T) {
	c := Config{}.withDefaults()
	const size = 1 << 20
	arena := regcache.NewArena(size, size)
	n := 0
	for ; n <= size; n++ {
		if _, err := arena.Get(srqShare * c.BufferSize); err != nil {
			break
		}
	}
	if want := size / (srqShare * c.BufferSize); n != want || want == 0 {
		t.Errorf("%d shares of %d bytes in %d bytes, want %d", n, srqShare*c.BufferSize, size, want)
	}
}
