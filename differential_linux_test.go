package san

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sanconn/san/internal/moving"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/provider/shm"
	"github.com/sanconn/san/sanconn"
)

var (
	diffFirst = flag.Uint64("diff.first", 1, "the first seed of TestAsTCPDoes")
	diffCount = flag.Int("diff.count", 400, "how many seeds TestAsTCPDoes tries")
	diffTime  = flag.Duration("diff.time", 5*time.Second, "for how long TestAsTCPDoes begins with further seeds")
)

// Random calls at both ends give the same results as on TCP, whatever carries the connection, and
// whenever it moves. Each seed is a sequence of calls, which are made one after the other on a TCP
// connection of package net, and then on each carrier. A difference is reported with the smallest
// sequence that shows it. Differences that are documented are excepted.
func TestAsTCPDoes(t *testing.T) {
	testenv.AsBuilt(t)
	var next atomic.Uint64
	var tried, found atomic.Int32
	const enough = 8 // stop after so many differences: often all have one cause
	var trying sync.WaitGroup
	exempt := make([]atomic.Int32, len(diffExceptions))
	const workers = 8 // a sequence spends most of its time waiting for bytes that do not come
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

// trySeed compares each carrier with the first one, which is TCP, and returns how many differ.
func trySeed(t *testing.T, seed uint64, rigs []*diffRig, exempt []atomic.Int32) (found int32) {
	calls := diffSequence(rand.New(rand.NewPCG(seed, 0)))
	for _, r := range rigs[1:] {
		d := compare(rigs[0], r, calls, 0, exempt)
		if d == nil {
			continue
		}
		if d.got == diffHangs {
			t.Errorf("seed %d, %s: %v\n%s", seed, r.carrier.name, d.calls, d)
			return found + 1
		}
		// A difference that disappears with pauses between the calls is one of timing, which TCP has as
		// well.
		if d = confirmed(rigs[0], r, calls); d == nil {
			continue
		}
		began := time.Now()
		for i := 0; i < len(d.calls) && time.Since(began) < diffShrinking; { // looks for the smallest sequence that differs
			less := slices.Delete(slices.Clone(d.calls), i, i+1)
			if smaller := confirmed(rigs[0], r, less); smaller != nil {
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

const (
	// diffHangs is the result of a call that has not returned within diffHangTime, which is several
	// times what any call may wait.
	diffHangs    = "hangs"
	diffHangTime = 30 * time.Second

	// diffShrinking bounds the search for the smallest sequence: each try may wait for diffPatience at
	// each of its calls.
	diffShrinking = 20 * time.Second
)

// difference is a call whose result differs from that on TCP.
type difference struct {
	carrier   diffCarrier
	calls     []diffCall
	at        int // the index of the call in all; the calls after calls were added by run
	call      diffCall
	got, want string
	all       []diffCall // calls, and those that run has added
	onTCP     []string   // the results of all; before at, those on the carrier are the same or excepted
}

func (d *difference) String() string {
	return fmt.Sprintf("call %d, %s: %s; on TCP: %s", d.at, d.call, d.got, d.want)
}

// confirmed returns a difference that shows in each of several runs with pauses between the calls.
func confirmed(tcp, r *diffRig, calls []diffCall) (d *difference) {
	for _, pause := range []time.Duration{3, 30, 300} {
		if d = compare(tcp, r, calls, pause*time.Millisecond, nil); d == nil {
			return nil
		}
	}
	return d
}

// compare makes the calls on TCP and on another carrier, and returns the first difference that is not
// excepted. After an excepted difference it goes on, unless the numbers of bytes differ: then the later
// reads differ as well, and at Close it matters that something is unread. If exempt is not nil, it
// counts the exceptions.
func compare(tcp, r *diffRig, calls []diffCall, pause time.Duration, exempt []atomic.Int32) *difference {
	want := tcp.run(calls, nil, pause)
	got := r.run(calls, want, pause)
	all := append(slices.Clone(calls), diffAtEnd(calls)...)
	for i := range want {
		if got[i] == want[i] {
			continue
		}
		d := &difference{r.carrier, calls, i, all[i], got[i], want[i], all, want}
		e := d.exception()
		if e < 0 {
			return d
		}
		if exempt != nil {
			exempt[e].Add(1)
		}
		if bytesIn(d.got) != bytesIn(d.want) {
			return nil
		}
	}
	return nil
}

// diffAtEnd returns the calls at the end of a sequence, by which both ends read what is left, and close.
func diffAtEnd(calls []diffCall) (all []diffCall) {
	for _, what := range []string{"Join", "Read", "Close"} {
		for end := range 2 * diffConns(calls) {
			all = append(all, diffCall{end: end, what: what, size: 1 << 20})
		}
	}
	return all
}

// diffConns returns on how many connections the calls are made.
func diffConns(calls []diffCall) (n int) {
	for _, c := range calls {
		n = max(n, c.conn()+1)
	}
	return max(n, 1)
}

// diffCarrier is a way to carry connections.
type diffCarrier struct {
	name  string
	lane  lane
	moves bool // they move at some call
	async bool // and the call is made while they move
}

// diffCarriers returns TCP, and then those that are compared with it: carriers of shm, or of the device
// on which the tests run.
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

// diffRig makes connections of one carrier.
type diffRig struct {
	carrier  diffCarrier
	listener net.Listener
	dialer   *Dialer
	plan     *moving.Plan
	moved    *atomic.Int32 // counts the connections that have moved, if the carrier moves them
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
		newconn.HandleOf(sc).CallUse(newconn.Never)
	}
	there, back := new(diffStream), new(diffStream)
	return [2]*diffEnd{{Conn: c, out: there, in: back}, {Conn: s, out: back, in: there}}, nil
}

// diffCall is one call at one of the ends.
type diffCall struct {
	end  int // 0 and 1 are the ends of one connection, 2 and 3 those of another
	what string
	size int
	move bool // a connection that moves does so before this call, or during it
}

func (c diffCall) conn() int { return c.end / 2 }
func (c diffCall) peer() int { return c.end ^ 1 }

func (c diffCall) String() string {
	s := fmt.Sprintf("%s.%s", [...]string{"dialer", "acceptor", "dialer 2", "acceptor 2"}[c.end], c.what)
	if slices.Contains(diffSized, c.what) {
		s += fmt.Sprintf("(%d)", c.size)
	}
	if c.move {
		s = "move+" + s
	}
	return s
}

// diffSized are the names of calls that have a size.
var diffSized = []string{"Read", "Peek", "RawRead", "ReadBehind", "FileRead", "Write", "WriteTwo", "ReadFrom", "FromFile", "FromTCP", "FromUnix",
	"Buffers", "Reserve", "RawWrite", "FileWrite"}

// diffSequence returns 2 to 7 calls, in one of four sequences on two connections.
func diffSequence(rnd *rand.Rand) (calls []diffCall) {
	what := []string{"Write", "Write", "WriteTwo", "ReadFrom", "Buffers", "Reserve", "RawWrite",
		"FromFile", "FromTCP", "FromUnix", "FileWrite", "FileRead", "ToFile", "ToTCP", "ToUnix",
		"Read", "Read", "Peek", "Peek", "RawRead", "RawRead", "WriteTo", "ReadBehind", "ReadBehind", "Join", "Look",
		"Close", "CloseWrite", "CloseRead", "SetLinger0", "SetLinger1", "options", "expire", "clear", "Control", "File"}
	sizes := []int{0, 1, 100, 5000, 70_000}
	ends := 2
	if rnd.IntN(4) == 0 {
		ends = 4
	}
	n := 2 + rnd.IntN(6)
	for range n {
		calls = append(calls, diffCall{end: rnd.IntN(ends), what: what[rnd.IntN(len(what))], size: sizes[rnd.IntN(len(sizes))]})
	}
	calls[rnd.IntN(n)].move = true
	return calls
}

// run makes the calls on new connections, then those of diffAtEnd, and returns the results. want has the
// results on TCP, if they are known: where a Read has found nothing on TCP, it need not wait long here.
func (r *diffRig) run(calls []diffCall, want []string, pause time.Duration) (results []string) {
	var ends []*diffEnd
	for range diffConns(calls) {
		both, err := r.connect()
		if err != nil {
			return []string{err.Error()}
		}
		ends = append(ends, both[:]...)
	}
	var moving sync.WaitGroup
	defer func() {
		if slices.Contains(results, diffHangs) {
			return // further calls might hang as well
		}
		moving.Wait()
		for _, e := range ends {
			e.Close()
		}
	}()
	// due returns how many bytes a Read has found on TCP before it found nothing until its deadline. It
	// returns -1 if the Read did not end so.
	due := func() int {
		i, n := len(results), -1
		if want != nil && i < len(want) && strings.Contains(want[i], "timeout") {
			fmt.Sscanf(want[i], "%d,", &n)
		} else if want == nil {
			n = 0 // bytes that are in the kernel already, or must not come
		}
		return n
	}
	do := func(call diffCall) (goesOn bool) {
		result := ends[call.end].doInTime(call, due())
		results = append(results, result)
		return result != diffHangs
	}
	for _, call := range calls {
		time.Sleep(pause)
		if call.move && r.carrier.moves {
			move := func() {
				ctx, cancel := context.WithTimeout(context.Background(), diffPatience)
				defer cancel()
				h := newconn.HandleOf(ends[2*call.conn()].Conn)
				if r.plan.Providers[0].Move(ctx, h, r.plan.Settings) == nil { // after some calls a move is no longer possible
					r.moved.Add(1)
				}
			}
			if r.carrier.async {
				moving.Go(move)
			} else {
				move()
			}
		}
		if !do(call) {
			return results
		}
	}
	time.Sleep(pause)
	moving.Wait()
	for _, call := range diffAtEnd(calls) {
		if !do(call) {
			return results
		}
	}
	return results
}

// diffException is a known difference. Its name tells where it is documented.
type diffException struct {
	name string
	is   func(d *difference) bool
}

// before reports whether an end has made such a call, with success, before the one that differs.
func (d *difference) before(end int, what ...string) bool {
	return d.last(end, d.at, what...) >= 0
}

// last returns the index of the last such call before another one, or -1 if there was none. Only calls
// that succeeded on TCP count, or failed there because the connection had ended already.
func (d *difference) last(end, before int, what ...string) int {
	for i := before - 1; i >= 0; i-- {
		had := d.onTCP[i] == "<nil>" || strings.Contains(d.onTCP[i], "not connected")
		if c := d.all[i]; c.end == end && slices.Contains(what, c.what) && had {
			return i
		}
	}
	return -1
}

// failedOnTCP reports whether an earlier call of the same end has found a reset on TCP.
func (d *difference) failedOnTCP() bool {
	for i, c := range d.all[:d.at] {
		if c.end == d.call.end && (strings.Contains(d.onTCP[i], "reset by peer") || strings.Contains(d.onTCP[i], "broken pipe")) {
			return true
		}
	}
	return false
}

// reset reports whether the connection was reset before the call that differs, as its end can know: an
// earlier call there has found the reset, or the peer's Close was a reset, because of SetLinger(0) or
// unread bytes.
func (d *difference) reset() bool {
	end, peer := d.call.end, d.call.peer()
	for i, c := range d.all[:d.at] {
		if c.end == end && strings.Contains(d.onTCP[i], "reset by peer") {
			return true
		}
	}
	closed := d.last(peer, d.at, "Close")
	if closed < 0 {
		return false
	}
	linger := d.last(peer, closed, "SetLinger0", "SetLinger1")
	// What a background Read has read is only in the result of Join, which may come after Close.
	return linger >= 0 && d.all[linger].what == "SetLinger0" ||
		d.written(end, closed) > d.read(peer, len(d.onTCP))
}

// found reports whether an earlier Read of the same end has found a reset on TCP.
func (d *difference) found() bool {
	for i, c := range d.all[:d.at] {
		if c.end == d.call.end && (c.on("Read", "Peek", "Join") || c.copiesTo()) && strings.Contains(d.onTCP[i], "reset by peer") {
			return true
		}
	}
	return false
}

// unread reports whether the peer has written bytes that this end has not read before the call that
// differs.
func (d *difference) unread() bool {
	return d.written(d.call.peer(), d.at) > d.read(d.call.end, d.at)
}

// written and read return how many bytes an end has written or read, on TCP, before another call.
func (d *difference) written(end, before int) int { return d.bytes(end, before, diffCall.writes) }
func (d *difference) read(end, before int) int    { return d.bytes(end, before, diffCall.reads) }

func (d *difference) bytes(end, before int, which func(diffCall) bool) (n int) {
	for i, c := range d.all[:before] {
		if c.end == end && which(c) {
			n += bytesIn(d.onTCP[i])
		}
	}
	return n
}

// bytesIn returns the number of bytes in a result. A result of WriteTwo has two numbers.
func bytesIn(result string) (n int) {
	for _, number := range diffNumber.FindAllStringSubmatch(result, -1) {
		k, _ := strconv.Atoi(number[1])
		n += k
	}
	return n
}

var diffNumber = regexp.MustCompile(`(\d+), `)

// reads and writes report whether the call reads, or writes.
func (c diffCall) reads() bool {
	return c.on("Read", "Peek", "RawRead", "FileRead", "Join") || c.copiesTo()
}
func (c diffCall) writes() bool {
	return c.on("Write", "WriteTwo", "Buffers", "Reserve", "RawWrite", "FileWrite") || c.copiesFrom()
}
func (c diffCall) copiesTo() bool   { return c.on("WriteTo", "ToFile", "ToTCP", "ToUnix") }
func (c diffCall) copiesFrom() bool { return c.on("ReadFrom", "FromFile", "FromTCP", "FromUnix") }

// on reports whether the call has one of these names.
func (c diffCall) on(what ...string) bool { return slices.Contains(what, c.what) }

// The same for the call that differs.
func (d *difference) reads() bool            { return d.call.reads() }
func (d *difference) writes() bool           { return d.call.writes() }
func (d *difference) on(what ...string) bool { return d.call.on(what...) }

var diffExceptions = []diffException{
	{"sanconn.Conn.CloseRead: Read returns io.EOF from then on, whatever has come", func(d *difference) bool {
		return d.reads() && d.before(d.call.end, "CloseRead") && (d.got == "0, EOF" || d.call.copiesTo() && d.got == "0, <nil>")
	}},
	{"sanconn.Conn.CloseRead: SyscallConn's Read shows the end from then on, whatever has come", func(d *difference) bool {
		return d.on("Look") && d.before(d.call.end, "CloseRead") && d.got == "the end, <nil>"
	}},
	{"sanconn.Conn.File: it fails where bytes that came by the SAN are unread and cannot be returned; SyscallConn's Read where TCP's come before them", func(d *difference) bool {
		return d.on("File", "FileRead", "FileWrite", "Look", "RawRead") && strings.Contains(d.got, "have not been read") && d.unread()
	}},
	{"sanconn.Conn.File, SyscallConn: they fail once a connection that has moved was reset", func(d *difference) bool {
		return d.reset() && strings.Contains(d.got, "connection reset") && (d.on("File", "Control") && d.want == "<nil>" || d.on("Look", "RawRead", "RawWrite") && strings.Contains(d.got, "raw-") || d.on("FileRead", "FileWrite") && strings.Contains(d.got, "file "))
	}},
	{"sanconn.Conn.CloseRead: it is no error if the connection has ended", func(d *difference) bool {
		return d.on("CloseRead") && d.got == "<nil>" && strings.Contains(d.want, "not connected")
	}},
	{"sanconn.Conn.CloseWrite: it is no error if the stream has ended, or the peer has closed; after a reset it says so", func(d *difference) bool {
		return d.on("CloseWrite") && strings.Contains(d.want, "not connected") && (d.got == "<nil>" || d.reset() && strings.Contains(d.got, "reset by peer"))
	}},
	{"sanconn.Conn.File, SyscallConn: a Write, CloseRead or CloseWrite behind them finds that the peer had closed", func(d *difference) bool {
		back := d.before(d.call.end, "File", "Control") ||
			slices.ContainsFunc(d.all[:d.at+1], func(c diffCall) bool { return c.end == d.call.end && c.on("RawWrite", "FileWrite", "FileRead") })
		return back && d.before(d.call.peer(), "Close") && strings.HasSuffix(d.want, "<nil>") &&
			(d.writes() && strings.Contains(d.got, "broken pipe") || d.on("CloseRead", "CloseWrite") && strings.Contains(d.got, "not connected"))
	}},
	{"sanconn.Conn.File, SyscallConn: over verbs they fail while a peer that has closed has more to send than this end has read", func(d *difference) bool {
		return d.carrier.lane.provider == "verbs" && d.on("File", "Control") && d.before(d.call.peer(), "Close") && strings.Contains(d.got, "timed out")
	}},
	{"sanconn.Conn.WriteBuffers: without bytes it tells what a Write would", func(d *difference) bool {
		return d.on("Buffers") && d.call.size == 0 && d.want == "0, <nil>" && (strings.Contains(d.got, "use of closed") && d.before(d.call.end, "Close") ||
			strings.Contains(d.got, "i/o timeout") && d.before(d.call.end, "expire") ||
			strings.Contains(d.got, "broken pipe") && (d.before(d.call.end, "CloseWrite") || d.before(d.call.peer(), "Close")) ||
			strings.Contains(d.got, "reset by peer") && d.reset())
	}},
	{"sanconn.Conn.ReadFrom: a peer that has closed is found behind the first piece, whose size is another", func(d *difference) bool {
		return d.call.copiesFrom() && d.before(d.call.peer(), "Close") && strings.Contains(d.got, "broken pipe") &&
			(bytesIn(d.got) > 0 || strings.Contains(d.want, "broken pipe"))
	}},
	{"sanconn.Conn.Reserve: a peer that has closed is found behind the first piece", func(d *difference) bool {
		peer := d.call.peer()
		closed := d.before(peer, "Close") || d.before(peer, "CloseRead") && d.before(peer, "CloseWrite")
		return d.on("Reserve") && closed && bytesIn(d.got) > 0 && strings.Contains(d.got, "broken pipe")
	}},
	{"two Writes to a peer that has closed: which of them finds that is a matter of time", func(d *difference) bool {
		return d.on("WriteTwo") && d.before(d.call.peer(), "Close") && strings.Contains(d.got+d.want, "broken pipe")
	}},
	{"sanconn.Conn.CloseWrite: a Write behind it finds that, also after a reset", func(d *difference) bool {
		return d.writes() && d.before(d.call.end, "CloseWrite") && strings.Contains(d.got, "broken pipe") && strings.Contains(d.want, "reset by peer")
	}},
	{"sanconn.Conn.CloseRead: the peer's Writes wait or end at Close, also behind CloseWrite", func(d *difference) bool {
		peer := d.call.peer()
		return d.writes() && d.before(peer, "CloseRead") && d.before(peer, "CloseWrite") &&
			!strings.Contains(d.got, "broken pipe") && strings.Contains(d.want, "broken pipe")
	}},
	{"a reset: a Read finds it once, and each Write, and TCP's first call alone", func(d *difference) bool {
		return d.reset() && strings.Contains(d.got, "reset by peer") && bytesIn(d.got) == bytesIn(d.want) &&
			(d.reads() && (!d.found() || d.on("RawRead")) && (strings.HasSuffix(d.want, "EOF") || strings.HasSuffix(d.want, "<nil>")) || d.writes() && strings.Contains(d.want, "broken pipe"))
	}},
	{"a reset over verbs comes behind the bytes before it", func(d *difference) bool {
		return d.carrier.lane.provider == "verbs" && d.writes() && strings.HasSuffix(d.got, "<nil>") && strings.Contains(d.want, "reset by peer")
	}},
	{"a reset: TCP may lose bytes that had come before", func(d *difference) bool {
		reset := strings.Contains(d.want, "reset by peer") || strings.HasSuffix(d.want, "EOF") && d.failedOnTCP() // a Write has found it
		if !d.reads() || !reset || bytesIn(d.got) <= bytesIn(d.want) {
			return false
		}
		peer := d.call.peer() // on the carrier no byte is lost, and after a Close in order the Read finds the end
		all := d.read(d.call.end, d.at)+bytesIn(d.got) == d.written(peer, d.at)
		return strings.Contains(d.got, "reset by peer") || strings.HasSuffix(d.got, "EOF") && all && d.before(peer, "Close")
	}},
}

// exception returns the index of the exception that covers the difference, or -1.
func (d *difference) exception() int {
	return slices.IndexFunc(diffExceptions, func(e diffException) bool { return e.is(d) })
}
