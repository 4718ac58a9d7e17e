package sanconn_test

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
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

var (
	stressRuns = flag.Int("conn.runs", 100, "runs of the stress test, each with a seed of its own")
	stressSeed = flag.Uint64("conn.seed", 0, "the first of them; 0: a random one")
)

// TestStress uses a connection from both ends in every way, at random, while it moves and goes back, and
// checks each byte by its position. A stream that ends with io.EOF is complete.
func TestStress(t *testing.T) { stressed(t, *stressRuns, anyKind) }

// TestLinksFail does the same over shm. A link fails at one end or both, while the processes and TCP
// live on.
func TestLinksFail(t *testing.T) { stressed(t, (*stressRuns+1)/2, byLink) }

// stressed makes that many runs, which end as kind determines.
func stressed(t *testing.T, runs, kind int) {
	first := *stressSeed
	if first == 0 {
		first = rand.Uint64() >> 32
	}
	var files [2]string // several copies of a table, so that a piece can begin anywhere in the first
	for id, table := range stressTable {
		files[id] = filepath.Join(t.TempDir(), "tables")
		if err := os.WriteFile(files[id], bytes.Repeat(table, 8), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	before, fds, moved := runtime.NumGoroutine(), openFiles(t), 0
	for i := range runs {
		seed := first + uint64(i)
		s := &stress{t: t, files: files, rand: rand.New(rand.NewPCG(seed, 0)), kind: kind}
		s.run()
		if s.moved {
			moved++
		}
		if t.Failed() {
			s.mu.Lock()
			t.Fatalf("seed %d: %s\n%s\n%s\n%s", seed, s.what, strings.Join(s.log, "\n"), s.ends[0].c.Debug(), s.ends[1].c.Debug())
		}
		if i%20 == 19 || i == runs-1 {
			settles(t, seed, "goroutines", before, runtime.NumGoroutine)
			settles(t, seed, "descriptors", fds, func() int { return openFiles(t) })
		}
	}
	if moved < runs/25 { // mostly one in four or five does, on slow machines fewer
		t.Errorf("of %d runs a connection has moved in %d only", runs, moved)
	}
}

// few is how many a process makes only once: the idle poller, the runtime's poller, the sockets of
// RawConns.
const few = 6

// settles waits until there are no more of something than before.
func settles(t *testing.T, seed uint64, what string, before int, count func() int) {
	testenv.Eventually(t, 2*patience, func() error {
		n := count()
		if n <= before+few {
			return nil
		}
		b := make([]byte, 1<<20)
		return fmt.Errorf("seed up to %d: %d %s, and %d before\n%s", seed, n, what, before, b[:runtime.Stack(b, true)])
	})
}

func openFiles(t *testing.T) int {
	f, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(f)
}

// How a run ends.
const (
	inOrder    = iota // both ends end their streams, and read to the end
	byClose           // one end closes at some time
	byReset           // … after SetLinger(0)
	byDeath           // the process of one end dies, and its kernel closes TCP
	byCut             // the session fails at both ends, and TCP lives on
	byTCPReset        // TCP is reset at one end, and sessions live on
	endKinds
	byLink       // the sessions' link fails, and TCP lives on
	anyKind = -1 // any of the first endKinds
)

type stress struct {
	t     *testing.T
	files [2]string  // from which the ends copy
	rand  *rand.Rand // used by one goroutine
	what  string
	ends  [2]*stressEnd
	kind  int
	ender int             // the end that ends the run
	over  context.Context // done when both streams have been written and read
	link  *link           // for byLink
	moved bool            // both ends have agreed to a move

	mu  sync.Mutex          // guards what follows
	eps [2][]*twin.Endpoint // of its sessions; one may outlive a move that has failed
	log []string
}

// stressEnd is one end.
type stressEnd struct {
	*stress
	id      int
	c       *sanconn.Conn
	counts  counted      // c read by a function that counts
	written atomic.Int64 // bytes that its Writes have taken
	read    int64
	total   int64        // bytes to be written
	died    atomic.Int64 // 1 + bytes written when its process died; 0: it has not
	closed  atomic.Bool
	shut    bool        // the program ends the reading direction early
	unsure  bool        // it is not known how many bytes were sent
	pinned  atomic.Bool // the program has had the descriptor, so io.EOF may come from a peer that died or was cut off
	told    bool        // a Write has returned the error: TCP returns a reset only once, and then io.EOF
	readErr error
	ended   atomic.Bool // the program has ended its stream
}

// stressTable is written repeatedly. Its length is a prime, so that no buffer size hides a shift.
var stressTable = func() (tables [2][]byte) {
	r := rand.New(rand.NewPCG(1, 2))
	for i := range tables {
		tables[i] = make([]byte, 65521)
		for k := range tables[i] {
			tables[i][k] = byte(r.Uint32())
		}
	}
	return tables
}()

// bytesAt returns n bytes of an end's stream.
func bytesAt(id int, at, n int64) []byte {
	table := stressTable[id]
	b := make([]byte, 0, n)
	for int64(len(b)) < n {
		from := (at + int64(len(b))) % int64(len(table))
		b = append(b, table[from:min(from+n-int64(len(b)), int64(len(table)))]...)
	}
	return b
}

func (s *stress) run() {
	r := s.rand
	a, b, err := newPair(newconn.Config{}, newconn.Config{})
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, over := context.WithCancel(context.Background())
	s.over = ctx
	s.ender = r.IntN(2)
	if s.kind == byLink {
		if s.link, err = newLink(s.t); err != nil {
			s.t.Fatal(err)
		}
		defer s.link.close()
	} else if s.kind = r.IntN(endKinds); r.IntN(3) > 0 {
		s.kind = inOrder
	}
	s.what = fmt.Sprintf("kind %d by end %d", s.kind, s.ender)
	for i, c := range []*sanconn.Conn{a, b} {
		e := &stressEnd{stress: &stress{t: s.t, rand: rand.New(rand.NewPCG(r.Uint64(), 1))}, id: i, c: c, counts: countedOf(s.t, c)}
		e.total = r.Int64N(1 << (10 + r.IntN(12)))
		if s.kind == byLink {
			e.total <<= 3 // because a move takes a while
		}
		e.shut = r.IntN(20) == 0 && s.kind != inOrder && s.kind != byTCPReset
		s.ends[i] = e
	}
	var wg, extra sync.WaitGroup
	for i, e := range s.ends {
		peer := s.ends[1-i]
		writer, reader := rand.New(rand.NewPCG(e.rand.Uint64(), 2)), rand.New(rand.NewPCG(e.rand.Uint64(), 3))
		wg.Go(func() {
			var streams sync.WaitGroup
			streams.Go(func() { e.write(s, writer) })
			streams.Go(func() { e.readAll(s, peer, reader) })
			streams.Wait()
			if s.kind == byLink && (e.told || e.readErr != io.EOF) {
				e.close() // as programs do: if the other end may have left, it finds no end before
			}
		})
		if r.IntN(2) == 0 {
			leaver := rand.New(rand.NewPCG(r.Uint64(), 4))
			extra.Go(func() { e.leave(s, leaver) })
		}
	}
	mover := rand.New(rand.NewPCG(r.Uint64(), 5))
	extra.Go(func() { s.move(mover) })
	ender := rand.New(rand.NewPCG(r.Uint64(), 6))
	extra.Go(func() { s.end(ender) })

	done := make(chan struct{})
	go func() {
		wg.Wait()
		over()
		extra.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(4 * patience):
		buf := make([]byte, 4<<20)
		s.t.Errorf("it hangs: %d of %d and %d of %d bytes were read\n%s", s.ends[1].read, s.ends[0].written.Load(), s.ends[0].read, s.ends[1].written.Load(), buf[:runtime.Stack(buf, true)])
		return
	}
	for i, e := range s.ends {
		peer := s.ends[1-i]
		switch {
		case s.kind == byLink && e.readErr == io.EOF && !e.shut && !e.told && !peer.unsure && (!peer.ended.Load() || e.read < peer.written.Load()):
			s.t.Errorf("end %d read %d of %d bytes, and io.EOF; the peer's program has ended its stream: %v", i, e.read, peer.written.Load(), peer.ended.Load())
		case s.kind == byTCPReset && peer.told && !e.told && e.readErr == io.EOF:
			s.t.Errorf("end %d reads io.EOF, and a Write of the peer's has failed", i)
		case peer.unsure, e.told, (s.kind == byDeath || s.kind == byCut) && e.pinned.Load():
		case e.readErr == io.EOF && !e.shut && e.read < peer.promised():
			s.t.Errorf("end %d read %d of %d bytes, and io.EOF", i, e.read, peer.promised())
		case s.kind == inOrder && (e.readErr != io.EOF || peer.written.Load() != peer.total):
			s.t.Errorf("end %d read %d of %d bytes: %v", i, e.read, peer.total, e.readErr)
		case e.read > peer.written.Load() && s.kind == inOrder:
			s.t.Errorf("end %d read %d of %d bytes", i, e.read, peer.written.Load())
		}
		e.c.Close()
	}
}

// promised returns how many bytes the other end must have read when it reads io.EOF. What this test
// writes after the process has died does not count.
func (e *stressEnd) promised() int64 {
	if n := e.died.Load(); n > 0 {
		return n - 1
	}
	return e.written.Load()
}

func (s *stress) logf(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.log = append(s.log, fmt.Sprintf(format, args...))
}

// pause lets other goroutines run.
func pause(r *rand.Rand) {
	switch r.IntN(3) {
	case 0:
	case 1:
		runtime.Gosched()
	default:
		time.Sleep(time.Duration(r.IntN(300)) * time.Microsecond)
	}
}

// move moves the connection several times.
func (s *stress) move(r *rand.Rand) {
	for range 1 + r.IntN(4) {
		for range r.IntN(4) {
			pause(r)
		}
		limits := carriers[2+r.IntN(len(carriers)-2)].limits
		d := r.IntN(2)
		ea, eb, err := s.pair(d, limits)
		if err != nil {
			s.logf("no session: %v", err)
			continue
		}
		cfgs := session.Config{CloseTimeout: patience, CancelTimeout: patience} // a peer that gets no processor for a while still has time to take everything
		err = movePair(s.over, s.ends[d].c, s.ends[1-d].c, ea, eb, sessions{Dialer: cfgs, Acceptor: cfgs})
		s.logf("moved by %d to %+v: %v", d, limits, err)
		s.moved = s.moved || err == nil
		select {
		case <-s.over.Done():
			return
		default:
		}
	}
}

// pair makes the endpoints of a session that end d dials.
func (s *stress) pair(d int, limits session.Limits) (a, b session.Endpoint, err error) {
	if s.link != nil {
		s.link.once.Do(func() { close(s.link.used) })
		return s.link.pair()
	}
	ea, eb := twin.Pair(twin.Config{Limits: limits, Violated: func(twin.Violation) {}})
	s.mu.Lock()
	defer s.mu.Unlock()
	s.eps[d], s.eps[1-d] = append(s.eps[d], ea), append(s.eps[1-d], eb)
	return ea, eb, nil
}

// leave makes the connection go back to TCP.
func (e *stressEnd) leave(s *stress, r *rand.Rand) {
	for range 1 + r.IntN(4) {
		for range r.IntN(10) {
			pause(r)
		}
		var err error
		what := r.IntN(12)
		if what < 2 {
			e.pinned.Store(true)
		}
		switch what {
		case 0:
			var f *os.File
			if f, err = e.c.File(); err == nil {
				f.Close()
			}
		case 1:
			raw, _ := e.c.SyscallConn()
			err = raw.Control(func(uintptr) {})
		case 2, 3, 4:
			sanconn.Starve(e.c)
		default:
			err = sanconn.LeaveSAN(e.c)
		}
		s.logf("end %d leaves (%d): %v", e.id, what, err)
		if err != nil && s.kind == inOrder && !strings.Contains(err.Error(), "have not been read") {
			s.t.Errorf("end %d goes back to TCP (%d): %v", e.id, what, err)
		}
		select {
		case <-s.over.Done():
			return
		default:
		}
	}
}

// end ends the connection, unless it ends in order.
func (s *stress) end(r *rand.Rand) {
	if s.kind == inOrder {
		return
	}
	if s.kind == byLink {
		select {
		case <-s.link.used:
		case <-s.over.Done():
		}
	}
	for range r.IntN(30) {
		pause(r)
	}
	e := s.ends[s.ender]
	s.logf("end %d ends it", e.id)
	switch s.kind {
	case byReset:
		e.c.SetLinger(0)
		fallthrough
	case byClose:
		e.close()
	case byDeath:
		e.died.Store(1 + e.written.Load())
		s.kill(e.id)
		newconn.HandleOf(e.c).TCP().Close()
		time.Sleep(10 * time.Millisecond)
		e.close()
	case byCut:
		s.mu.Lock()
		for _, ep := range s.eps[0] {
			ep.Break()
		}
		s.mu.Unlock()
		time.Sleep(time.Duration(r.IntN(20)) * time.Millisecond)
		s.ends[0].close()
		s.ends[1].close()
	case byTCPReset:
		cutTCP(s.t, e.c)
	case byLink:
		ends := 1 + r.IntN(3) // a set of ends
		for role := range 2 {
			if ends&(1<<role) != 0 {
				s.logf("the link fails at its end %d: %v", role, s.link.fail(role))
				pauseSometimes(r)
			}
		}
	}
}

func (s *stress) kill(id int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, ep := range s.eps[id] {
		ep.Kill()
	}
}

func (e *stressEnd) close() {
	e.closed.Store(true)
	e.ended.Store(true)
	began := time.Now()
	e.c.Close()
	if d := time.Since(began); d > 2*patience+5*time.Second {
		e.t.Errorf("Close took %v", d)
	}
}

// goesOn reports whether an error, if any, is only a deadline's. It checks that any other one is allowed
// in this kind of run.
func (e *stressEnd) goesOn(s *stress, what string, err error) bool {
	switch {
	case err == nil, errors.Is(err, os.ErrDeadlineExceeded):
		return true
	case e.closed.Load(), s.kind != inOrder:
	case what != "read" || err != io.EOF:
		s.t.Errorf("end %d, %s: %v\n%s", e.id, what, err, e.c.Debug())
	}
	return false
}

var pastTime = time.Unix(1, 0)

func deadlineOf(r *rand.Rand, set func(time.Time) error) {
	switch r.IntN(12) {
	case 0:
		set(pastTime)
	case 1, 2:
		set(time.Now().Add(time.Duration(r.IntN(1000)) * time.Microsecond))
	case 3, 4, 5, 6:
		set(time.Time{})
	}
}

// write writes all bytes, in every way.
func (e *stressEnd) write(s *stress, r *rand.Rand) {
	c := e.c
	for e.written.Load() < e.total {
		at := e.written.Load()
		n := min(1+r.Int64N(1<<(1+r.IntN(18))), e.total-at)
		deadlineOf(r, c.SetWriteDeadline)
		pauseSometimes(r)
		var k int64
		var err error
		way := r.IntN(8)
		switch way {
		default:
			var m int
			m, err = c.Write(bytesAt(e.id, at, n))
			k = int64(m)
		case 1:
			var v net.Buffers
			for p := bytesAt(e.id, at, n); len(p) > 0; {
				m := 1 + r.IntN(len(p))
				v = append(v, p[:m])
				p = p[m:]
			}
			k, err = c.WriteBuffers(&v)
		case 2:
			var room []byte
			if room, err = c.Reserve(int(n)); err == nil {
				pauseSometimes(r)
				m := copy(room, bytesAt(e.id, at, n))
				if r.IntN(8) == 0 {
					m = 0
				}
				c.SetWriteDeadline(time.Time{}) // otherwise it would not be known how many bytes were sent
				if err = c.Commit(m); err == nil {
					k = int64(m)
				} else {
					e.unsure = true // by TCP some of it may have been sent
				}
			}
		case 3:
			k, err = e.fromFile(s, at, n)
		case 4:
			k, err = e.fromSocket(at, n)
		}
		if k > n || k < 0 {
			s.t.Errorf("end %d took %d bytes of %d", e.id, k, n)
		}
		e.written.Add(k)
		s.logf("end %d wrote (%d) %d of %d at %d: %v", e.id, way, k, n, at, err)
		if !e.goesOn(s, fmt.Sprint("write ", way), err) {
			e.told = true
			if s.kind == byTCPReset {
				e.behindAReset(s, r)
			}
			return
		}
		if errors.Is(err, os.ErrDeadlineExceeded) && r.IntN(2) == 0 {
			c.SetWriteDeadline(time.Time{})
		}
	}
	e.ended.Store(true)
	if err := c.CloseWrite(); err != nil {
		e.goesOn(s, "CloseWrite", err)
	}
}

// behindAReset continues after a Write has found a reset of TCP. Its calls must have no effect.
func (e *stressEnd) behindAReset(s *stress, r *rand.Rand) {
	e.c.SetWriteDeadline(time.Time{})
	for range r.IntN(4) {
		pause(r)
		if n, err := e.c.Write(bytesAt(e.id, e.written.Load()+1, 100)); n > 0 || err == nil {
			s.t.Errorf("end %d writes %d more, %v", e.id, n, err)
		}
	}
	switch pause(r); r.IntN(3) {
	case 0:
		e.c.CloseWrite()
	case 1:
		e.close()
	}
}

func pauseSometimes(r *rand.Rand) {
	if r.IntN(6) == 0 {
		pause(r)
	}
}

// fromFile copies from a file with the end's bytes.
func (e *stressEnd) fromFile(s *stress, at, n int64) (int64, error) {
	f, err := os.Open(s.files[e.id])
	if err != nil {
		return 0, err
	}
	defer f.Close()
	f.Seek(at%int64(len(stressTable[e.id])), io.SeekStart)
	return e.c.ReadFrom(io.LimitReader(f, n))
}

// fromSocket copies from a socket. Bytes that were taken from there and not sent are lost.
func (e *stressEnd) fromSocket(at, n int64) (int64, error) {
	from, to, err := socketsOf()
	if err != nil {
		return 0, err
	}
	defer from.Close()
	go func() {
		from.Write(bytesAt(e.id, at, n))
		from.Close()
	}()
	defer to.Close()
	return e.c.ReadFrom(to)
}

func socketsOf() (a, b net.Conn, err error) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	var ends [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "socket")
		if ends[i], err = net.FileConn(f); err != nil {
			return nil, nil, err
		}
		f.Close()
	}
	return ends[0], ends[1], nil
}

// readAll reads to the end, in every way.
func (e *stressEnd) readAll(s *stress, peer *stressEnd, r *rand.Rand) {
	c := e.c
	usual := r.IntN(8)
	for {
		deadlineOf(r, c.SetReadDeadline)
		pauseSometimes(r)
		if e.shut && r.IntN(20) == 0 {
			if err := c.CloseRead(); err != nil {
				e.goesOn(s, "CloseRead", err)
			}
		}
		var err error
		way := usual
		if r.IntN(4) > 0 {
			way = r.IntN(8)
		}
		switch way {
		default:
			b := make([]byte, 1+r.IntN(1<<(1+r.IntN(17))))
			var n int
			n, err = c.Read(b)
			e.check(s, peer.id, b[:n])
		case 1:
			var b []byte
			if b, err = c.Peek(); err == nil {
				pauseSometimes(r)
				n := r.IntN(len(b) + 1)
				e.check(s, peer.id, b[:n])
				err = c.Discard(n)
			}
		case 2:
			e.pinned.Store(true) // as for Control: see readElsewhere
			err = e.rawRead(s, peer.id, r)
		case 3:
			_, err = c.WriteTo(sink(func(b []byte) (int, error) {
				e.check(s, peer.id, b)
				if r.IntN(5) == 0 {
					return len(b), errEnough
				}
				return len(b), nil
			}))
			if err == nil {
				err = io.EOF
			}
		case 4:
			err = e.toSocket(s, peer.id, r)
		case 5:
			b := make([]byte, 1+r.IntN(1<<(1+r.IntN(17))))
			var n int
			if n, err = e.counts.Read(b); unreadLeft(err) { // until it is known that the function reads by syscall.Read
				err = nil
			}
			e.check(s, peer.id, b[:n])
		}
		s.logf("end %d read (%d) to %d: %v", e.id, way, e.read, err)
		if errors.Is(err, errEnough) {
			continue
		}
		if !e.goesOn(s, "read", err) {
			e.readErr = err
			if s.kind == byLink && (err != io.EOF || e.shut) {
				e.close() // as programs do
			}
			return
		}
		if errors.Is(err, os.ErrDeadlineExceeded) && r.IntN(2) == 0 {
			c.SetReadDeadline(time.Time{})
		}
	}
}

var errEnough = errors.New("enough")

func (e *stressEnd) check(s *stress, id int, b []byte) {
	if want := bytesAt(id, e.read, int64(len(b))); string(b) != string(want) {
		i := 0
		for b[i] == want[i] {
			i++
		}
		there := bytes.Index(bytes.Repeat(stressTable[id], 2), b[i:min(i+8, len(b))])
		s.t.Errorf("end %d reads other bytes from position %d on, by %d at %d: those of position %d, or none", e.id, e.read+int64(i), len(b), e.read, there)
	}
	e.read += int64(len(b))
}

// rawRead reads or peeks once with the descriptor, as a pool does.
func (e *stressEnd) rawRead(s *stress, id int, r *rand.Rand) error {
	raw, err := e.c.SyscallConn()
	if err != nil {
		return err
	}
	b := make([]byte, 1+r.IntN(8000))
	n, peek := 0, r.IntN(2) == 0
	var rerr error
	err = raw.Read(func(fd uintptr) bool {
		flags := 0
		if peek {
			flags = syscall.MSG_PEEK
		}
		n, _, rerr = syscall.Recvfrom(int(fd), b, flags)
		return true
	})
	switch {
	case unreadLeft(err):
		return nil
	case err != nil:
		return err
	case rerr == syscall.EAGAIN:
		return nil
	case rerr != nil:
		return rerr
	case n == 0:
		return io.EOF
	case !peek:
		e.check(s, id, b[:n])
	}
	return nil
}

// unreadLeft reports whether a RawConn's Read has failed because there are unread bytes that it cannot
// show: those of a Peek, or what came back.
func unreadLeft(err error) bool {
	return err != nil && strings.Contains(err.Error(), "have not been read")
}

// toSocket copies to a socket until a deadline.
func (e *stressEnd) toSocket(s *stress, id int, r *rand.Rand) error {
	from, to, err := socketsOf()
	if err != nil {
		return err
	}
	defer from.Close()
	all := make(chan []byte, 1)
	go func() {
		b, _ := io.ReadAll(to)
		all <- b
		to.Close()
	}()
	e.c.SetReadDeadline(time.Now().Add(time.Duration(r.IntN(2000)) * time.Microsecond))
	n, err := e.c.WriteTo(from)
	from.Close()
	b := <-all
	if int64(len(b)) != n {
		s.t.Errorf("end %d: %d bytes were copied, and %d came", e.id, n, len(b))
	}
	e.check(s, id, b)
	if err == nil {
		err = io.EOF
	}
	return err
}
