package shm

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/session"
)

// patience bounds each wait of a test. A test that reaches it has failed.
const patience = 20 * time.Second

// sleeper is a Waker on which a test's goroutine sleeps.
type sleeper struct{ woken chan struct{} }

func newSleeper() *sleeper { return &sleeper{make(chan struct{}, 1)} }

func (s *sleeper) Wake(session.Events) {
	select {
	case s.woken <- struct{}{}:
	default:
	}
}

func (s *sleeper) sleep() bool {
	select {
	case <-s.woken:
		return true
	case <-time.After(patience):
		return false
	}
}

// peer uses an endpoint as a session does: it arms, looks once more, and sleeps. Sending and receiving
// have a sleeper each, so that both can run at the same time.
type peer struct {
	session.Endpoint
	in, out *sleeper
}

func newPeer(ep session.Endpoint) *peer {
	p := &peer{ep, newSleeper(), newSleeper()}
	ep.Start(p)
	return p
}

func (p *peer) Wake(ev session.Events) {
	if ev&session.RecvReady != 0 {
		p.in.Wake(ev)
	}
	if ev&session.SendReady != 0 {
		p.out.Wake(ev)
	}
}

// reserve waits for room. It returns nil when the connection has ended.
func (p *peer) reserve(least, most int) []byte {
	return p.await(func() []byte { return p.Reserve(least, most) })
}

// reserveControl waits for room for a control message.
func (p *peer) reserveControl(n int) []byte {
	return p.await(func() []byte { return p.ReserveControl(n) })
}

func (p *peer) await(room func() []byte) []byte {
	for {
		if b := room(); b != nil {
			return b
		}
		p.Arm(session.SendReady)
		if b := room(); b != nil {
			return b
		}
		if p.Err() != nil {
			return nil
		}
		if !p.out.sleep() {
			panic("no room, and no wake-up")
		}
	}
}

// fill sends messages of n bytes until there is no room, and returns how many it has sent.
func (p *peer) fill(n int) (count int) {
	for ; p.Reserve(n, n) != nil; count++ {
		p.Commit(n)
	}
	return count
}

// control sends n bytes as a control message. It returns false if there is no room.
func (p *peer) control(n int) bool {
	if p.ReserveControl(n) == nil {
		return false
	}
	p.CommitControl(n)
	return true
}

// end closes an endpoint whose memory nobody uses any more.
func end(ep session.Endpoint) {
	ep.Close()
	ep.Retire()
}

// abort aborts an endpoint whose memory nobody uses any more.
func abort(ep session.Endpoint) {
	ep.Abort()
	ep.Retire()
}

func (p *peer) send(b []byte) bool {
	buf := p.reserve(len(b), len(b))
	if buf == nil {
		return false
	}
	p.Commit(copy(buf, b))
	return true
}

// poll waits for the next event. It returns false if there will be no more.
func (p *peer) poll(ev *session.Event) bool {
	for {
		if p.Poll(ev) {
			return true
		}
		p.Arm(session.RecvReady)
		if p.Poll(ev) {
			return true
		}
		if p.Err() != nil {
			return p.Poll(ev)
		}
		if !p.in.sleep() {
			panic("no event, and no wake-up")
		}
	}
}

// pair returns two connected endpoints in this process, and checks at the end of the test that nothing
// leaks.
func pair(t testing.TB, cfg Config) (a, b *peer) {
	t.Helper()
	leaks(t)
	x, y, err := connected(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { end(x); end(y) })
	return newPeer(x), newPeer(y)
}

// resources counts what this process holds.
type resources struct{ goroutines, fds, maps int }

func count(t testing.TB) resources {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return resources{runtime.NumGoroutine(), len(fds), strings.Count(string(maps), "memfd:san-shm")}
}

// leaks fails the test unless everything is released at its end.
func leaks(t testing.TB) {
	t.Helper()
	netWarm()
	before := count(t)
	used := inUse()
	t.Cleanup(func() {
		t.Helper()
		awaitNoLinks(t)
		var after resources
		left := used // at first that of earlier tests, later less
		taken := budget().Used()
		for end := time.Now().Add(patience); time.Now().Before(end); runtime.Gosched() {
			// The budget is counted again as well, because halves that were kept return to it later, as
			// do goroutines.
			after, left, taken = count(t), inUse(), budget().Used()
			if after.goroutines <= before.goroutines && after.fds <= before.fds && after.maps <= before.maps && within(left, used) && taken == 0 {
				break
			}
		}
		if after.goroutines > before.goroutines || after.fds > before.fds || after.maps > before.maps {
			buf := make([]byte, 1<<20)
			t.Errorf("left behind: %+v, was %+v\n%s", after, before, buf[:runtime.Stack(buf, true)])
		}
		if !within(left, used) {
			t.Errorf("by the books, %+v is in use, was %+v", left, used)
		}
		if taken != 0 {
			t.Errorf("%d bytes of the rings' budget are still taken", taken)
		}
	})
}

// awaitNoLinks waits until this process has no link left. Each link has a mapped segment until its
// goroutines have ended.
func awaitNoLinks(t testing.TB) {
	t.Helper()
	testenv.Eventually(t, patience, func() error {
		if n, books := count(t).maps, held.mappings.Used(); n != 0 || books != 0 {
			return fmt.Errorf("%d halves of segments are mapped, %d by the books", n, books)
		}
		return nil
	})
}

// inUse returns what is charged to the peers of this process.
func inUse() limits {
	return limits{held.connections.Used(), held.descriptors.Used(), held.space.Used(), held.mappings.Used()}
}

// within reports whether no field of l exceeds that of most.
func within(l, most limits) bool {
	return l.connections <= most.connections && l.descriptors <= most.descriptors &&
		l.addressSpace <= most.addressSpace && l.mappings <= most.mappings
}

// setIdleTicks sets how long accepting ends keep links without connections, until the end of the test.
// There must be no links when it is called.
func setIdleTicks(t testing.TB, ticks int) {
	t.Helper()
	set := func(n int) (old int) {
		awaitNoLinks(t)
		old, idleTicks[1] = idleTicks[1], n
		return old
	}
	old := set(ticks)
	t.Cleanup(func() { set(old) })
}

// withLimits gives this process other limits, of which nothing is used, for links that are made before
// the end of the test.
func withLimits(t testing.TB, l limits) {
	old := held
	held = newHoldings(l)
	t.Cleanup(func() { held = old })
}

// netWarm makes the runtime create the descriptors of its own poller, which stay open.
func netWarm() {
	if l, err := net.Listen("tcp", "127.0.0.1:0"); err == nil {
		l.Close()
	}
}

// place is what Dial needs to find a process.
type place struct {
	port uint16
	name string
	user uint32
}

func (p place) String() string { return fmt.Sprintf("%d %s %d", p.port, p.name, p.user) }

func parsePlace(s string) (p place, err error) {
	_, err = fmt.Sscan(s, &p.port, &p.name, &p.user)
	return p, err
}

// connect connects a socket to the process, by its name in a directory or, if dir is "", in the network
// namespace.
func (p place) connect(dir string) (*net.UnixConn, error) {
	return linkKey{port: p.port, name: p.name, dir: dir, user: p.user}.connect()
}

// names returns the result of Names for the place's port and user, sorted.
func (p place) names(t testing.TB, dir string) []string {
	t.Helper()
	names, err := Names(t.Context(), p.port, p.user, Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(names)
	return names
}

// dial dials, and repeats that if a link has ended. It waits until the process has taken the connection,
// or it is known that it has not. The default timeout is patience.
func dial(p place, cfg Config) (session.Endpoint, error) {
	ep, err := dialOnce(p, cfg)
	if errors.Is(err, ErrLinkGone) {
		ep, err = dialOnce(p, cfg)
	}
	return ep, err
}

func dialOnce(p place, cfg Config) (session.Endpoint, error) {
	cfg.timeout = cmp.Or(cfg.timeout, patience)
	ep, err := Dial(context.Background(), p.port, p.name, p.user, cfg)
	if err != nil {
		return nil, err
	}
	e := ep.(*endpoint)
	late := time.Now().Add(cfg.timeout)
	for !e.slot.accepted() && err == nil {
		switch err = e.Err(); {
		case e.slot.accepted(): // taken, and ended since
			err = nil
		case err == nil && time.Now().After(late):
			err = unavailable(context.DeadlineExceeded)
		}
		runtime.Gosched()
	}
	if err != nil {
		end(e)
		return nil, err
	}
	return e, nil
}

// freePort returns a port that no other test uses at the same time.
func freePort(t testing.TB) uint16 {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return uint16(l.Addr().(*net.TCPAddr).Port)
}

// served is a Listener whose connections wait for accept.
type served struct {
	*Listener
	at    place
	taken chan session.Endpoint
}

// listen listens on a port of its own, until the end of the test.
func listen(t testing.TB, cfg Config) *served {
	t.Helper()
	return listenAt(t, freePort(t), cfg)
}

func listenAt(t testing.TB, port uint16, cfg Config) *served {
	t.Helper()
	s := &served{taken: make(chan session.Endpoint, 2*linkSlots)}
	var err error
	if s.Listener, err = Listen(port, cfg, func(ep session.Endpoint) { s.taken <- ep }); err != nil {
		t.Fatal(err)
	}
	s.at = place{port, s.name, uint32(os.Geteuid())}
	t.Cleanup(func() {
		s.Close()
		for len(s.taken) > 0 {
			end(<-s.taken)
		}
	})
	return s
}

// accept waits for the next connection.
func (s *served) accept() (session.Endpoint, error) {
	select {
	case ep := <-s.taken:
		return ep, nil
	case <-time.After(patience):
		return nil, errors.New("no connection came")
	}
}

// meet makes a connection to the listener.
func meet(t testing.TB, l *served) (a, b session.Endpoint) {
	t.Helper()
	a, err := dial(l.at, Config{})
	if err != nil {
		t.Fatal(err)
	}
	if b, err = l.accept(); err != nil {
		t.Fatal(err)
	}
	return a, b
}

// pattern fills a message with a number and bytes derived from it.
func pattern(b []byte, n uint64) {
	for i := range b {
		b[i] = byte(n + uint64(i)*7)
	}
	if len(b) >= 8 {
		binary.LittleEndian.PutUint64(b, n)
	}
}

// connected returns two connected endpoints in this process, over a link of their own, which goes
// through the same steps as a link between two processes.
func connected(cfg Config) (a, b session.Endpoint, err error) {
	cfg.timeout = patience
	cfg = cfg.withDefaults()
	conns, err := unixPair()
	if err != nil {
		return nil, nil, err
	}
	accepted := make(chan *endpoint, 1)
	greeted := make(chan error, 1)
	go func() {
		l, err := acceptLink(conns[1], cfg, func(l *link, s *slot) uint8 {
			e := newEndpoint(l, s, s.peers.control.state.turn())
			code := l.attach(e)
			if code == codeOK {
				e.begin()
				accepted <- e
			}
			return code
		})
		if err == nil {
			l.start(nil)
		}
		greeted <- err
	}()
	ctx, cancel := context.WithTimeout(context.Background(), cfg.timeout)
	defer cancel()
	l, err := dialLink(ctx, conns[0], uint32(os.Geteuid()), cfg)
	if err == nil {
		err = l.acquire() // so that it is not idle before it has the connection
		defer l.release()
		l.start(nil)
	}
	if e := <-greeted; err != nil || e != nil {
		return nil, nil, cmp.Or(err, e)
	}
	e, err := l.dial(ctx)
	if err != nil {
		return nil, nil, err
	}
	return e, <-accepted, nil
}

// unixPair returns two connected sockets as links have them.
func unixPair() (conns [2]*net.UnixConn, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return conns, err
	}
	for i, fd := range fds {
		err = errors.Join(err, passCredentials(fd))
		f := os.NewFile(uintptr(fd), "pair")
		c, e := net.FileConn(f)
		f.Close()
		if e != nil {
			err = e
			continue
		}
		conns[i] = c.(*net.UnixConn)
	}
	return conns, err
}

// closeAll closes descriptors of this process.
func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}
