package san

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/provider/shm"
	"github.com/sanconn/san/sanconn"
)

var (
	diffFirst = flag.Uint64("diff.first", 1, "the first seed of TestAsTCPDoes")
	diffCount = flag.Int("diff.count", 400, "how many seeds TestAsTCPDoes tries")
	diffTime  = flag.Duration("diff.time", 5*time.Second, "for how long TestAsTCPDoes begins with further seeds")
)

// Random calls at both ends have the results that they have on TCP, whatever carries the
// connection and whenever it moves. Each seed is a sequence of calls, which is made one after the
// other on a TCP connection of net's, and then on each carrier. A difference is reported with
// the smallest sequence that shows it; exceptions are those that are documented.
func TestAsTCPDoes(t *testing.T) {
	var next atomic.Uint64
	var tried, found atomic.Int32
	const enough = 8 // differences: often all are one
	var trying sync.WaitGroup
	exempt := make([]atomic.Int32, len(diffExceptions))
	const workers = 8 // most of the time of a sequence is spent waiting for what does not come
	end := time.Now().Add(*diffTime)
	carriers := diffCarriers()
	moved := make([]atomic.Int32, len(carriers))
	for range workers {
		rigs := make([]*diffRig, len(carriers))
		for i, c := range carriers {
			rigs[i] = newDiffRig(t, c)
			rigs[i].moved = &moved[i]
		}
		trying.Go(func() {
			for {
				n := next.Add(1) - 1
				if n >= uint64(*diffCount) || found.Load() >= enough || time.Now().After(end) {
					return
				}
				tried.Add(1)
				found.Add(trySeed(t, *diffFirst+n, rigs, exempt))
			}
		})
	}
	trying.Wait()
	for i, c := range carriers {
		if c.moves && moved[i].Load() == 0 {
			t.Errorf("%s: none has moved", c.name)
		}
	}
	t.Logf("%d seeds; carriers: TCP and %s", tried.Load(), carriers[2].name)
	for i, e := range diffExceptions {
		t.Logf("%4d times: %s", exempt[i].Load(), e.name)
	}
}

// trySeed compares each carrier with the first, which is TCP, and returns how many differ.
func trySeed(t *testing.T, seed uint64, rigs []*diffRig, exempt []atomic.Int32) (found int32) {
	calls := diffSequence(rand.New(rand.NewPCG(seed, 0)))
	for _, r := range rigs[1:] {
		d := compare(rigs[0], r, calls, 0)
		if d == nil {
			continue
		}
		if i := d.exception(); i >= 0 {
			exempt[i].Add(1)
			continue
		}
		// What differs only without a pause is a matter of time, which it is with TCP as well.
		if d = confirmed(rigs[0], r, calls); d == nil || d.exception() >= 0 {
			continue
		}
		for i := 0; i < len(d.calls); { // the smallest
			less := slices.Delete(slices.Clone(d.calls), i, i+1)
			if smaller := confirmed(rigs[0], r, less); smaller != nil && smaller.exception() < 0 {
				d = smaller
			} else {
				i++
			}
		}
		t.Errorf("seed %d, %s: %v\n%s", seed, r.carrier.name, d.calls, d)
		found++
	}
	return found
}

// difference is the first result that is another than on TCP.
type difference struct {
	carrier   diffCarrier
	calls     []diffCall
	at        int // which call; the ones behind calls are run's own
	call      diffCall
	got, want string
}

func (d *difference) String() string {
	return fmt.Sprintf("call %d, %s: %s; on TCP: %s", d.at, d.call, d.got, d.want)
}

// confirmed returns a difference that is there each time, with pauses between the calls.
func confirmed(tcp, r *diffRig, calls []diffCall) (d *difference) {
	for _, pause := range []time.Duration{3, 30, 300} {
		if d = compare(tcp, r, calls, pause*time.Millisecond); d == nil {
			return nil
		}
	}
	return d
}

// compare makes the calls on TCP and on another carrier.
func compare(tcp, r *diffRig, calls []diffCall, pause time.Duration) *difference {
	want := tcp.run(calls, nil, pause)
	got := r.run(calls, want, pause)
	all := append(slices.Clone(calls), diffAtEnd...)
	for i := range want {
		if got[i] != want[i] {
			return &difference{r.carrier, calls, i, all[i], got[i], want[i]}
		}
	}
	return nil
}

// diffAtEnd are the calls at the end of each sequence: what is left is read, at both ends.
var diffAtEnd = []diffCall{
	{end: 0, what: "Join"}, {end: 1, what: "Join"},
	{end: 0, what: "Read", size: 1 << 20}, {end: 1, what: "Read", size: 1 << 20},
	{end: 0, what: "Close"}, {end: 1, what: "Close"},
}

// diffCarrier is what carries connections.
type diffCarrier struct {
	name  string
	lane  lane
	moves bool // at some call
	async bool // … while that is under way
}

// diffCarriers are TCP, and then those that are compared with it: of shm, or of the device that
// the tests run on.
func diffCarriers() []diffCarrier {
	by := lane{policy: Require, providers: []string{shm.Name}}
	if inGuest != "" {
		by = verbsLanes(inGuest)[0]
	}
	tcp, moving := plainTCP, by
	tcp.host, moving.policy = by.host, Prefer
	return []diffCarrier{
		{name: "TCP", lane: tcp},
		{name: "TCP in a Conn", lane: moving},
		{name: by.providers[0], lane: by},
		{name: "moves between calls", lane: moving, moves: true},
		{name: "moves during a call", lane: moving, moves: true, async: true},
	}
}

// diffRig makes connections of a carrier.
type diffRig struct {
	carrier  diffCarrier
	listener net.Listener
	dialer   *Dialer
	plan     *plan
	moved    *atomic.Int32 // connections that have, of the carrier, where it moves them
}

func newDiffRig(t *testing.T, c diffCarrier) *diffRig {
	t.Helper()
	r := &diffRig{carrier: c, listener: c.lane.listen(t, c.lane.here()), dialer: c.lane.dialer()}
	if c.moves {
		var err error
		if r.plan, err = r.dialer.plan("tcp"); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

// diffPatience is how long anything may take that must happen: not so long that a difference takes
// all of the test's time.
const diffPatience = 3 * time.Second

// diffNothing is how long a Read waits for what must not come.
const diffNothing = 2 * time.Millisecond

// diffEnd is one end of a connection, on which calls are made.
type diffEnd struct {
	net.Conn
	expired       bool // its deadlines have passed
	written, read int
	behind        *behind // a Read that waits in another goroutine; read is that one's
}

// behind is a Read that waits while calls are made.
type behind struct {
	read atomic.Int64
	more chan struct{} // holds a token behind each Read
	done chan string
}

func (r *diffRig) connect() (ends [2]*diffEnd, err error) {
	c, err := r.dialer.Dial("tcp", r.listener.Addr().String())
	if err != nil {
		return ends, err
	}
	s, err := r.listener.Accept()
	if err != nil {
		return ends, err
	}
	if by := InfoOf(c).Provider; r.carrier.lane.policy == Require && by != r.carrier.lane.providers[0] {
		return ends, fmt.Errorf("it went by %q", by)
	}
	if sc, ok := c.(*sanconn.Conn); ok && r.carrier.lane.policy == Prefer {
		newconn.HandleOf(sc).CallUse(never)
	}
	return [2]*diffEnd{{Conn: c}, {Conn: s}}, nil
}

// diffCall is a call at one of the ends.
type diffCall struct {
	end  int
	what string
	size int
	move bool // a connection that moves does it before this call, or meanwhile
}

func (c diffCall) String() string {
	s := fmt.Sprintf("%s.%s", [...]string{"dialer", "acceptor"}[c.end], c.what)
	if slices.Contains([]string{"Read", "ReadBehind", "Write", "ReadFrom", "Buffers"}, c.what) {
		s += fmt.Sprintf("(%d)", c.size)
	}
	if c.move {
		s = "move+" + s
	}
	return s
}

// diffSequence is 2 to 7 calls.
func diffSequence(rnd *rand.Rand) (calls []diffCall) {
	what := []string{"Write", "Write", "ReadFrom", "Buffers", "Read", "Read", "WriteTo", "ReadBehind", "ReadBehind", "Join",
		"Close", "CloseWrite", "CloseRead", "SetLinger0", "expire", "clear", "Control", "File"}
	sizes := []int{0, 1, 100, 5000, 70_000}
	n := 2 + rnd.IntN(6)
	for range n {
		calls = append(calls, diffCall{end: rnd.IntN(2), what: what[rnd.IntN(len(what))], size: sizes[rnd.IntN(len(sizes))]})
	}
	calls[rnd.IntN(n)].move = true
	return calls
}

// run makes the calls on a new connection, and those at the end, and returns their results. want is what they are on TCP, if that is known: a Read that found
// nothing there need not wait long here.
func (r *diffRig) run(calls []diffCall, want []string, pause time.Duration) (results []string) {
	ends, err := r.connect()
	if err != nil {
		return []string{err.Error()}
	}
	defer ends[0].Close()
	defer ends[1].Close()
	// due is how many bytes a Read finds on TCP before it finds nothing for its time; -1: it does not end so.
	due := func() int {
		i, n := len(results), -1
		if want != nil && i < len(want) && strings.Contains(want[i], "timeout") {
			fmt.Sscanf(want[i], "%d,", &n)
		} else if want == nil {
			n = 0 // what is in the kernel already, and what must not come
		}
		return n
	}
	var moving sync.WaitGroup
	defer moving.Wait()
	for _, call := range calls {
		time.Sleep(pause)
		if call.move && r.carrier.moves {
			move := func() {
				ctx, cancel := context.WithTimeout(context.Background(), diffPatience)
				defer cancel()
				h := newconn.HandleOf(ends[0].Conn)
				if r.plan.move(ctx, h, h.Life().(*life)) == nil { // it may have no sense any more
					r.moved.Add(1)
				}
			}
			if r.carrier.async {
				moving.Go(move)
			} else {
				move()
			}
		}
		results = append(results, ends[call.end].do(call, due()))
	}
	time.Sleep(pause)
	moving.Wait()
	for _, call := range diffAtEnd {
		results = append(results, ends[call.end].do(call, due()))
	}
	return results
}

// do makes a call, and returns its result: one that does not depend on how a stream comes in
// pieces.
func (e *diffEnd) do(call diffCall, due int) string {
	type tcp interface {
		CloseWrite() error
		CloseRead() error
		SetLinger(int) error
		File() (*os.File, error)
		SyscallConn() (syscall.RawConn, error)
	}
	c := e.Conn.(tcp)
	switch call.what {
	case "Write":
		b := make([]byte, call.size)
		position(b, e.written)
		if !e.expired {
			e.SetWriteDeadline(time.Now().Add(diffPatience))
		}
		n, err := e.Write(b)
		e.written += n
		return fmt.Sprintf("%d, %s", n, diffError(err))
	case "ReadFrom", "Buffers":
		b := make([]byte, call.size)
		position(b, e.written)
		if !e.expired {
			e.SetWriteDeadline(time.Now().Add(diffPatience))
		}
		var n int64
		var err error
		if call.what == "ReadFrom" {
			n, err = e.Conn.(io.ReaderFrom).ReadFrom(struct{ io.Reader }{bytes.NewReader(b)})
		} else {
			v := net.Buffers{b[:len(b)/3], b[len(b)/3:]}
			if c, ok := e.Conn.(*sanconn.Conn); ok {
				n, err = c.WriteBuffers(&v)
			} else {
				n, err = v.WriteTo(e.Conn)
			}
		}
		e.written += int(n)
		return fmt.Sprintf("%d, %s", n, diffError(err))
	case "Read", "WriteTo", "ReadBehind":
		switch {
		case e.behind != nil:
			return "there is one"
		case call.what == "Read":
			return e.readAll(call.size, due)
		case call.what == "WriteTo":
			return e.writeTo(due)
		}
		e.readBehind(call.size)
		return "begun"
	case "Join":
		return e.join(due)
	case "Close":
		return diffError(e.Close())
	case "CloseWrite":
		return diffError(c.CloseWrite())
	case "CloseRead":
		return diffError(c.CloseRead())
	case "SetLinger0":
		return diffError(c.SetLinger(0))
	case "expire":
		e.expired = true
		return diffError(e.SetDeadline(time.Unix(1, 0)))
	case "clear":
		e.expired = false
		return diffError(e.SetDeadline(time.Time{}))
	case "Control":
		raw, err := c.SyscallConn()
		if err == nil {
			err = raw.Control(func(uintptr) {})
		}
		return diffError(err)
	case "File":
		f, err := c.File()
		if err == nil {
			f.Close()
		}
		return diffError(err)
	}
	panic(call.what)
}

// readAll reads so many bytes, or up to an error. What is due may take its time; behind it
// nothing may come, if due is not negative, which is not waited for for long.
func (e *diffEnd) readAll(size, due int) string {
	b := make([]byte, size)
	n := 0
	for {
		patience := diffPatience
		if due >= 0 && n >= due {
			patience = diffNothing
		}
		if !e.expired {
			e.SetReadDeadline(time.Now().Add(patience))
		}
		k, err := e.Read(b[n:])
		if i := misplaced(b[n:n+k], e.read); i >= 0 {
			return fmt.Sprintf("byte %d is not what was written there", i)
		}
		n, e.read = n+k, e.read+k
		if err != nil || n == size {
			return fmt.Sprintf("%d, %s", n, diffError(err))
		}
	}
}

// writeTo reads as readAll does, without a limit, by one call.
func (e *diffEnd) writeTo(due int) string {
	n, wrong := 0, -1
	limit := func() {
		patience := diffPatience
		if due >= 0 && n >= due {
			patience = diffNothing
		}
		if !e.expired {
			e.SetReadDeadline(time.Now().Add(patience))
		}
	}
	limit()
	_, err := e.Conn.(io.WriterTo).WriteTo(writerFunc(func(b []byte) (int, error) {
		if i := misplaced(b, e.read); i >= 0 && wrong < 0 {
			wrong = i
		}
		n, e.read = n+len(b), e.read+len(b)
		limit()
		return len(b), nil
	}))
	if wrong >= 0 {
		return fmt.Sprintf("byte %d is not what was written there", wrong)
	}
	return fmt.Sprintf("%d, %s", n, diffError(err))
}

// readBehind has a Read of so many bytes wait until join, or up to an error.
func (e *diffEnd) readBehind(size int) {
	if !e.expired {
		e.SetReadDeadline(time.Now().Add(diffPatience))
	}
	w := &behind{more: make(chan struct{}, 1), done: make(chan string, 1)}
	e.behind = w
	go func() {
		b := make([]byte, size)
		for n := 0; ; {
			k, err := e.Read(b[n:])
			if i := misplaced(b[n:n+k], e.read); i >= 0 {
				w.done <- fmt.Sprintf("byte %d is not what was written there", i)
				return
			}
			n, e.read = n+k, e.read+k
			w.read.Store(int64(n))
			select {
			case w.more <- struct{}{}:
			default:
			}
			if err != nil || n == size {
				w.done <- fmt.Sprintf("%d, %s", n, diffError(err))
				return
			}
		}
	}()
}

// join waits until readBehind's Read has ended: it has its time until what is due has come.
func (e *diffEnd) join(due int) string {
	w := e.behind
	if w == nil {
		return "there is none"
	}
	e.behind = nil
	late := time.After(diffPatience)
	for waits := due >= 0; waits && w.read.Load() < int64(due); {
		select {
		case <-w.more:
		case r := <-w.done:
			return r
		case <-late:
			waits = false
		}
	}
	patience := diffPatience
	if due >= 0 {
		patience = diffNothing
	}
	if !e.expired {
		e.SetReadDeadline(time.Now().Add(patience))
	}
	return <-w.done
}

// diffError is an error without addresses, which differ.
func diffError(err error) string {
	var oe, within *net.OpError
	switch {
	case errors.As(err, &oe) && errors.As(oe.Err, &within):
		return oe.Op + ": " + diffError(oe.Err)
	case err == nil || err == io.EOF:
		return fmt.Sprint(err)
	case errors.As(err, &oe) && err == error(oe):
		var errno syscall.Errno
		inner := oe.Err.Error()
		if errors.As(oe.Err, &errno) { // whatever its text
			inner = errno.Error()
		}
		return fmt.Sprintf("%s %s (addresses: %v, %v)", oe.Op, inner, oe.Source != nil, oe.Addr != nil)
	}
	return fmt.Sprintf("%v (%T)", err, err)
}

// diffException is a difference that is known, and documented where it says.
type diffException struct {
	name string
	is   func(d *difference) bool
}

// before reports whether an end has made a call before the one that differs.
func (d *difference) before(end int, what ...string) bool {
	return slices.ContainsFunc(d.calls[:min(d.at, len(d.calls))], func(c diffCall) bool {
		return c.end == end && slices.Contains(what, c.what)
	})
}

// reads and writes report whether it is a call that reads, or writes.
func (d *difference) reads() bool  { return d.on("Read", "WriteTo", "Join") }
func (d *difference) writes() bool { return d.on("Write", "ReadFrom", "Buffers") }

// on reports whether the call that differs is one of these.
func (d *difference) on(what ...string) bool { return slices.Contains(what, d.call.what) }

var diffExceptions = []diffException{
	{"sanconn.Conn.CloseRead: Read returns io.EOF from then on, whatever has come", func(d *difference) bool {
		return d.reads() && d.before(d.call.end, "CloseRead") && (d.got == "0, EOF" || d.got == "0, <nil>")
	}},
	{"sanconn.Conn.File: it fails where bytes that came by the SAN are unread and cannot be returned", func(d *difference) bool {
		return d.on("File") && strings.Contains(d.got, "have not been read")
	}},
	{"sanconn.Conn.File, SyscallConn: they fail once a connection that has moved was reset", func(d *difference) bool {
		return d.on("File", "Control") && strings.Contains(d.got, "connection reset") && d.want == "<nil>"
	}},
	{"sanconn.Conn.CloseRead: it is no error if the connection has ended", func(d *difference) bool {
		return d.on("CloseRead") && d.got == "<nil>" && strings.Contains(d.want, "not connected")
	}},
	{"sanconn.Conn.CloseWrite: it is no error if the stream has ended, or the peer has closed; after a reset it says so", func(d *difference) bool {
		return d.on("CloseWrite") && strings.Contains(d.want, "not connected") && (d.got == "<nil>" || strings.Contains(d.got, "reset by peer"))
	}},
	{"sanconn.Conn.File, SyscallConn: a Write, CloseRead or CloseWrite behind them finds that the peer had closed", func(d *difference) bool {
		return d.before(d.call.end, "File", "Control") && d.before(1-d.call.end, "Close") && strings.HasSuffix(d.want, "<nil>") &&
			(d.writes() && strings.Contains(d.got, "broken pipe") || d.on("CloseRead", "CloseWrite") && strings.Contains(d.got, "not connected"))
	}},
	{"sanconn.Conn.File, SyscallConn: over verbs they fail while a peer that has closed has more to send than this end has read", func(d *difference) bool {
		return d.carrier.lane.provider == "verbs" && d.on("File", "Control") && d.before(1-d.call.end, "Close") && strings.Contains(d.got, "timed out")
	}},
	{"sanconn.Conn.WriteBuffers: without bytes it tells what a Write would", func(d *difference) bool {
		return d.on("Buffers") && d.call.size == 0 && d.want == "0, <nil>"
	}},
	{"sanconn.Conn.ReadFrom: a peer that has closed is found behind the first piece, whose size is another", func(d *difference) bool {
		return d.on("ReadFrom") && d.before(1-d.call.end, "Close") && strings.HasSuffix(d.got, "write broken pipe (addresses: true, true)") &&
			strings.HasSuffix(d.want, "write broken pipe (addresses: true, true)")
	}},
	{"sanconn.Conn.CloseWrite: a Write behind it finds that, also after a reset", func(d *difference) bool {
		return d.writes() && d.before(d.call.end, "CloseWrite") && strings.Contains(d.got, "broken pipe") && strings.Contains(d.want, "reset by peer")
	}},
	{"sanconn.Conn.CloseRead: the peer's Writes wait or end at Close, also behind CloseWrite", func(d *difference) bool {
		peer := 1 - d.call.end
		return d.writes() && d.before(peer, "CloseRead") && d.before(peer, "CloseWrite") &&
			strings.HasSuffix(d.got, "<nil>") && strings.Contains(d.want, "broken pipe")
	}},
	{"a reset: each call finds it, and TCP's first alone", func(d *difference) bool {
		return strings.Contains(d.got, "reset by peer") &&
			(d.reads() && (strings.HasSuffix(d.want, "EOF") || strings.HasSuffix(d.want, "<nil>")) || d.writes() && strings.Contains(d.want, "broken pipe"))
	}},
	{"a reset over verbs comes behind the bytes before it", func(d *difference) bool {
		return d.carrier.lane.provider == "verbs" && d.writes() && strings.HasSuffix(d.got, "<nil>") && strings.Contains(d.want, "reset by peer")
	}},
	{"a reset: TCP may lose bytes that had come before", func(d *difference) bool {
		return d.reads() && strings.Contains(d.got, "reset by peer") && strings.Contains(d.want, "reset by peer")
	}},
}

// exception returns which exception a difference is; -1: none.
func (d *difference) exception() int {
	return slices.IndexFunc(diffExceptions, func(e diffException) bool { return e.is(d) })
}
