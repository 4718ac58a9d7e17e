package session

import (
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/sanconn/san/session/internal/credit"
)

// Describer is implemented by an endpoint that can describe itself to people: in one line, at any time
// before Retire, from any goroutine, without waiting.
type Describer interface {
	Describe() string
}

// Debug describes the session for people: what its operations wait for and since when, and what is in
// progress in both directions. Its form may change; docs/DEBUGGING.md explains it. It may be called at
// any time, and waits a few milliseconds at most: a lock that is held for longer is shown as busy.
func (s *Session) Debug() string {
	d := &description{}
	d.line("session %d by %s, for %v", s.number, s.lim.Provider, since(s.began))
	for i, sd := range s.sides() {
		d.line("  %-8s%s", [...]string{"read", "write", "urgent"}[i], sd.describe())
	}
	d.locked(&s.txMu, "send", func() { s.tx.describe(d) })
	d.locked(&s.rxMu, "receive", func() { s.rx.describe(d) })
	if n := s.loans.Load(); n > 0 {
		d.line("  lent    to the application: %d", n)
	}
	d.locked(&s.epMu, "endpoint", func() { s.describeEndpoint(d) })
	return d.String()
}

// description is what Debug writes.
type description struct{ strings.Builder }

func (d *description) line(format string, args ...any) { fmt.Fprintf(d, format+"\n", args...) }

// locked calls f, which describes what mu guards, unless mu is held for long.
func (d *description) locked(mu *sync.Mutex, name string, f func()) {
	if !LockSoon(mu) {
		d.line("  %-8sbusy: its lock is held", name)
		return
	}
	defer mu.Unlock()
	f()
}

const (
	// A lock that cannot be had in lockTries looks, lockPause apart, is held by an operation that waits
	// for something: for a copy it is held some 100 µs.
	lockTries = 40
	lockPause = 50 * time.Microsecond
)

// LockSoon locks mu, unless it is held for longer than copies and system calls take. It reports whether
// it has locked mu.
func LockSoon(mu *sync.Mutex) bool {
	for range lockTries {
		if mu.TryLock() {
			return true
		}
		time.Sleep(lockPause)
	}
	return mu.TryLock()
}

// since returns how long ago t was, rounded.
func since(t time.Time) time.Duration { return time.Since(t).Round(10 * time.Microsecond) }

func (sd *side) describe() string {
	users := sd.op.users.Load()
	text := "idle"
	if users > 0 {
		text = "runs"
	}
	if wants, at := Events(sd.wants.Load()), sd.since.Load(); wants != 0 && at != 0 {
		text = fmt.Sprintf("waits for %v, for %v", wants, since(processStart.Add(time.Duration(at))))
	}
	if users > 1 {
		text += fmt.Sprintf(", %d more behind it", users-1)
	}
	return text + sd.describeState()
}

// describeState describes why the operation has to end.
func (sd *side) describeState() (text string) {
	st := sd.state.Load()
	for i, name := range []string{"interrupted", "shut", "closed", "the peer has closed", "taken", "the peer has reset"} {
		if st&(1<<i) != 0 {
			text += "; " + name
		}
	}
	return text
}

// String returns the events' names.
func (ev Events) String() string {
	switch ev {
	case RecvReady:
		return "messages"
	case SendReady:
		return "room"
	}
	return "messages or room"
}

func (t *sender) describe(d *description) {
	room := "without credits"
	if left, _ := t.credits.Available(); left < credit.Max {
		room = fmt.Sprintf("credit for %d more", left)
	}
	d.line("  send    %d bytes in %d messages, %s", t.stats.bytes, t.stats.messages, room)
	if t.closed {
		d.line("          the endpoint is closed")
	}
	for _, c := range t.control.list {
		d.line("          waits for room: %v", c.Type())
	}
	if t.control.credit {
		d.line("          waits for room: Credit")
	}
	if t.stalled {
		d.line("          data waits for credit")
	}
	if t.last.typ != 0 {
		d.line("          last message: %v, sent: %v", t.last.typ, t.last.sent)
	}
	if t.stats.unregistered > 0 {
		d.line("          Writes copied as their memory could not be registered: %d", t.stats.unregistered)
	}
	if o := &t.buffer; o.state != bufferNone {
		d.line("  buffer  %d bytes: filled to %d, sent to %d, free to %d; RDMA writes under way: %d%s%s", len(o.buf), o.tail, o.sent, o.written,
			o.writes.len(), when(o.state == bufferPlain, "; leaves in messages"), when(o.queueFull.Load(), "; the queue is full"))
		d.line("          the peer's inbox: %d bytes, filled to %d, read to %d%s", o.inbox.Len, o.filled, o.emptied,
			when(o.state == bufferAsked, "; asked for"))
	}
	if o := &t.offer; o.state != offerNone {
		d.line("  offer   %d of this end: %d bytes, %s", o.id, o.total, [...]string{"none", "open", "cancelled", "over"}[o.state])
	}
}

func when(is bool, text string) string {
	if is {
		return text
	}
	return ""
}

func (rx *receiver) describe(d *description) {
	d.line("  receive %d bytes in %d messages, %d messages unread%s%s", rx.stats.bytes, rx.stats.messages, rx.kept,
		when(rx.stage == negotiating, "; not negotiated"), when(rx.gone, "; thrown away"))
	if rx.end != notYet {
		d.line("          the stream has ended%s%s", when(rx.end >= byClose, "; the peer has closed"), when(rx.end == byAbort, "; by a reset"))
	}
	if rx.stats.unregistered > 0 {
		d.line("          Reads copied as their memory could not be registered: %d", rx.stats.unregistered)
	}
	if in := &rx.inbox; in.buf != nil {
		d.line("  inbox   %d bytes: filled to %d, read to %d, of which the peer knows %d%s", len(in.buf), in.filled, in.emptied, in.reported,
			when(in.state >= inboxLeft, "; the peer has left it"))
	}
	if t := rx.fetch.open; t != nil {
		d.line("  offer   %d of the peer: %d bytes, asked for %d, got %d, RDMA reads under way: %d%s%s", t.id, t.total, t.asked, t.got, t.reading,
			[...]string{"", "; no memory", "; refused", "; cancelled", "; over"}[t.state], when(rx.fetch.queueFull.Load(), "; the queue is full"))
	}
	if n := rx.fetch.inChunks; n > 0 {
		d.line("  ahead   %d bytes of %d that may be fetched before a Read", n, rx.fetch.bounds.budget)
	}
}

// describeEndpoint describes the endpoint, with epMu held.
func (s *Session) describeEndpoint(d *description) {
	if s.retired {
		d.line("  endpoint retired")
		return
	}
	if e, ok := s.provider.(Describer); ok {
		d.line("  endpoint %s", e.Describe())
	}
	if p := s.failure.Load(); p != nil {
		d.line("  over    %v", *p)
	} else if err := s.ep.Err(); err != nil {
		d.line("  over    %v", err)
	}
}
