package san

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/finding"
	"github.com/sanconn/san/internal/hello"
	"github.com/sanconn/san/internal/movers"
	"github.com/sanconn/san/internal/moving"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/reason"
	"github.com/sanconn/san/internal/tcpid"
	"github.com/sanconn/san/provider/shm"
	"github.com/sanconn/san/sanconn"
)

// stop stops a process, and returns once it is stopped.
func (p *process) stop(t testing.TB) {
	t.Helper()
	if err := p.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	var status syscall.WaitStatus
	if _, err := syscall.Wait4(p.Process.Pid, &status, syscall.WUNTRACED, nil); err != nil || !status.Stopped() {
		t.Fatalf("not stopped: %v, %v", status, err)
	}
}

func (p *process) goOn(t testing.TB) {
	t.Helper()
	if err := p.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
}

// While the listener's process is stopped, the kernel accepts connections for it, as for any other: the
// dial returns at once, and what is written waits. When the process goes on, it answers, and the
// connection moves.
func TestStoppedListener(t *testing.T) {
	tcp := plainListen(t, "127.0.0.1:0")
	p := startServer(t, tcp, 7)
	p.stop(t)
	c := mustDial(t, atOnce(), tcp.Addr().String())
	if n, err := c.Write(make([]byte, 1)); n != 1 || err != nil {
		t.Fatalf("wrote %d, %v", n, err)
	}
	wantNothing(t, c)
	waitFor(t, "the reason with Require", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := (&Dialer{Policy: Require}).DialContext(ctx, "tcp", tcp.Addr().String())
		if oe := wantOpError(t, err, "dial", context.DeadlineExceeded); !oe.Timeout() {
			t.Errorf("with Require: %v", err)
		}
		why := reasonOf(err)
		if why != ReasonNoListener && why != ReasonTimeout { // ReasonTimeout: the attempt did not have enough time
			t.Fatalf("with Require: %v", err)
		}
		return why == ReasonNoListener
	})
	p.goOn(t)
	wantAnswer(t, c, 7)
	use(t, c, 7)
	wantMoved(t, c, shm.Name)
	wantCarried(t, c, shm.Name)
}

// The acceptor's process is stopped right after it has accepted. The attempt to move fails, and delays
// nobody. Later the connection moves.
func TestStoppedWhileItMoves(t *testing.T) {
	tcp := plainListen(t, "127.0.0.1:0")
	p := startServer(t, tcp, 7)
	d := &Dialer{}
	d.Options.AttemptTimeout = time.Second // later attempts have the same bound
	c := mustDial(t, d, tcp.Addr().String())
	if name, err := ask(c); name != 7 || err != nil {
		t.Fatal(name, err)
	}
	p.stop(t)
	newconn.HandleOf(c).CallUse(0)
	if _, err := c.Write(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	wantTried(t, c, ReasonTimeout)
	wantNothing(t, c)
	p.goOn(t)
	wantAnswer(t, c, 7)
	use(t, c, 7)
	wantMoved(t, c, shm.Name)
	wantCarried(t, c, shm.Name)
}

// Two processes accept on a port. The one that is asked first is stopped: a connection of the other one
// moves all the same, and the stopped process does no harm when it goes on.
func TestStoppedIsAskedInVain(t *testing.T) {
	onlyShm(t)
	tcp := plainListen(t, "127.0.0.1:0")
	stopped := startServer(t, tcp, 7)
	startServer(t, tcp, 8)
	of := func(d *Dialer, name byte) net.Conn { // returns a connection that the named process has accepted
		t.Helper()
		for {
			c := mustDial(t, d, tcp.Addr().String())
			if got, err := ask(c); err != nil {
				t.Fatal(err)
			} else if got == name {
				return c
			}
		}
	}
	c, own := of(unhurried(), 8), of(new(Dialer), 7)
	last := of(atOnce(), 7)
	wantMoved(t, last, shm.Name)
	stopped.stop(t)
	began := time.Now()
	newconn.HandleOf(c).CallUse(0)
	if name, err := ask(c); name != 8 || err != nil {
		t.Fatal(name, err)
	}
	wantMoved(t, c, shm.Name)
	wantCarried(t, c, shm.Name)
	if took := time.Since(began); took > testTimeout/2 { // one that waited for the stopped process would take all of it
		t.Errorf("it took %v", took)
	}
	newconn.HandleOf(own).CallUse(0)
	if _, err := own.Write(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "a move to a stopped process ends", func() bool { return InfoOf(own).Cause != nil && !isTrying() })
	stopped.goOn(t)
	wantAnswer(t, own, 7)
	use(t, own, 7)
	for _, d := range []net.Conn{c, own, last, of(atOnce(), 7)} {
		wantMoved(t, d, shm.Name)
		wantCarried(t, d, shm.Name)
	}
}

// The peer's process of a connection that has moved is stopped. A call that needs the descriptor fails
// within its time. When the process goes on, the connection goes back to TCP, and no byte is lost.
func TestDescriptorOfAConnectionToAStoppedProcess(t *testing.T) {
	onlyShm(t)
	tcp := plainListen(t, "127.0.0.1:0")
	p := startServer(t, tcp, 7)
	ways := []struct {
		name string
		need func(*sanconn.Conn) error
		conn *sanconn.Conn
		err  error
	}{
		{name: "File", need: func(c *sanconn.Conn) error {
			f, err := c.File()
			if err == nil {
				f.Close()
			}
			return err
		}},
		{name: "Control", need: func(c *sanconn.Conn) error {
			raw, err := c.SyscallConn()
			if err == nil {
				err = raw.Control(func(uintptr) {})
			}
			return err
		}},
	}
	for i := range ways {
		ways[i].conn = mustDial(t, atOnce(), tcp.Addr().String()).(*sanconn.Conn)
		wantMoved(t, ways[i].conn, shm.Name)
	}
	p.stop(t)
	began := time.Now()
	var all sync.WaitGroup
	for i := range ways {
		all.Go(func() { ways[i].err = ways[i].need(ways[i].conn) })
	}
	all.Wait()
	if took := time.Since(began); took > testTimeout {
		t.Errorf("after %v", took)
	}
	p.goOn(t)
	for _, w := range ways {
		if !errors.Is(w.err, syscall.ETIMEDOUT) {
			t.Errorf("%s: %v", w.name, w.err)
		}
		if name, err := ask(w.conn); name != 7 || err != nil {
			t.Fatal(w.name, name, err)
		}
		wantCarried(t, w.conn, providerTCP)
		if err := w.need(w.conn); err != nil {
			t.Errorf("%s, once the process goes on: %v", w.name, err)
		}
	}
}

// More connections to a stopped process begin to move than may move at the same time. A connection to
// another process moves meanwhile.
func TestStoppedHoldsUpNobodyElse(t *testing.T) {
	onlyShm(t)
	tcp := plainListen(t, "127.0.0.1:0")
	p := startServer(t, tcp, 7)
	stuck := make([]net.Conn, 4*movers.MostMoving)
	for i := range stuck {
		stuck[i] = mustDial(t, new(Dialer), tcp.Addr().String())
		if name, err := ask(stuck[i]); name != 7 || err != nil {
			t.Fatal(name, err)
		}
	}
	c, turns := otherProcess(t)
	p.stop(t)
	defer p.goOn(t)
	for _, c := range stuck {
		newconn.HandleOf(c).CallUse(0)
		if _, err := c.Write(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
	}
	wantTurn(t, c, turns, len(stuck)-movers.MostMoving+1) // it did not have to wait for the others
}

// otherProcess returns a connection to a server named 8, which answers. On turns it sends how many other
// connections wait each time that one to this server has its turn to move.
func otherProcess(t *testing.T) (c net.Conn, turns <-chan int) {
	t.Helper()
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	go reply(l, 8)
	waiting := make(chan int, 100) // more than there are attempts
	useProviders(t, turnOf{byShm, l.Addr().(*net.TCPAddr).AddrPort(), waiting})
	return mustDial(t, new(Dialer), l.Addr().String()), waiting
}

// wantTurn uses this connection until it has moved, and checks that at least so many others still wait
// when it has its first turn. On a busy machine that attempt may time out, and more use starts another.
func wantTurn(t testing.TB, c net.Conn, turns <-chan int, others int) {
	t.Helper()
	newconn.HandleOf(c).CallUse(0)
	waitFor(t, "it moves", func() bool {
		if name, err := ask(c); name != 8 || err != nil {
			t.Fatal(name, err)
		}
		return InfoOf(c).Provider == shm.Name
	})
	wantCarried(t, c, shm.Name)
	if n := <-turns; n < others {
		t.Errorf("it had its turn behind all but %d of the others", n)
	}
}

// turnOf is the provider of shared memory. It sends how many connections wait when one to a given
// address has its turn.
type turnOf struct {
	moving.Provider
	to      netip.AddrPort
	waiting chan<- int
}

func (o turnOf) Move(ctx context.Context, h newconn.Handle, s moving.Settings) error {
	if h.TCP().RemoteAddr().(*net.TCPAddr).AddrPort() == o.to {
		waiting := 0
		for ok := false; !ok; { // Counts gives up if a lock is held
			_, waiting, ok = moving.Queue.Counts()
		}
		o.waiting <- waiting
	}
	return o.Provider.Move(ctx, h, s)
}

// The peer of a connection that has moved is stopped: what is written waits in memory.
func TestStoppedAfterTheMove(t *testing.T) {
	tcp := plainListen(t, "127.0.0.1:0")
	p := startServer(t, tcp, 7)
	c := mustDial(t, &Dialer{Policy: Require}, tcp.Addr().String())
	p.stop(t)
	if _, err := c.Write(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	wantNothing(t, c)
	p.goOn(t)
	wantAnswer(t, c, 7)
	wantCarried(t, c, shm.Name)
}

// The listener's process is stopped and continued at random moments, while connections are made and
// used, and move. All move if an attempt has enough time to wait until the process goes on. Otherwise
// those stay on TCP that the process has not accepted, or whose proposal it has not answered, in time.
func TestStoppedAtAnyMoment(t *testing.T) {
	for _, tt := range []struct {
		name    string
		outlast bool // each stop is longer than an attempt
	}{
		{name: "for a moment"},
		{name: "for longer than an attempt", outlast: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			onlyShm(t)
			tcp := plainListen(t, "127.0.0.1:0")
			p := startServer(t, tcp, 0)
			d := atOnce()
			if d.Options.AttemptTimeout = testTimeout; tt.outlast {
				d.Options.AttemptTimeout = shortAttempt(t, d, tcp.Addr().String())
			}
			load := startLoad(t, d, tcp.Addr().String())
			for range amount(20, 5) {
				load.wantMore(t, shm.Name, 0)
				p.stop(t)
				if tt.outlast {
					c := mustDial(t, d, tcp.Addr().String())
					for decided(c) == nil && InfoOf(c).Fallback == ReasonTimeout { // an attempt did not have enough time
						c = mustDial(t, d, tcp.Addr().String())
					}
					wantStays(t, c, ReasonNoListener) // it was not accepted
				}
				p.goOn(t)
			}
			load.end()
			if !tt.outlast {
				load.wantNoneBy(t, providerTCP)
			}
			for why, n := range load.stayed {
				switch why {
				case fmt.Sprint(ReasonNoListener, ": ", hello.ErrNotAccepted):
				case fmt.Sprint(ReasonNoListener, ": ", hello.ErrUnknown): // only the kernel has accepted it, as the process was stopped
				default:
					if !strings.HasPrefix(why, ReasonTimeout.String()+": ") {
						t.Errorf("%d stayed on TCP: %s", n, why)
					}
				}
			}
		})
	}
}

// shortAttempt returns a time in which attempts to move succeed even if several are made at once: ten
// times what one takes on the machine now.
func shortAttempt(t *testing.T, d *Dialer, address string) time.Duration {
	t.Helper()
	least, most := time.Duration(amount(50, 500))*time.Millisecond, time.Second
	began := time.Now()
	wantMoved(t, mustDial(t, d, address), shm.Name)
	return min(max(least, 10*time.Since(began)), most)
}

// The same, with a dialer that is stopped as soon as each connection is accepted, and begins to move.
func TestStoppedDialer(t *testing.T) {
	l := mustListen(t, &ListenConfig{Providers: []string{shm.Name}}, "tcp", "127.0.0.1:0")
	accepted := make(chan bool, loadConns)
	var serving sync.WaitGroup
	serving.Go(func() { reply(announced{l, accepted}, 0) })
	defer serving.Wait()
	defer l.Close()
	p := startProcess(t, "load", moves, l.Addr().String(), func(*exec.Cmd) {})
	for range amount(20, 5) {
		select {
		case <-accepted:
			p.stopFor(t, func() {})
		case <-time.After(testTimeout):
			t.Fatalf("no connection has come; it says %q", p.line(t))
		}
	}
	if got := p.line(t); got != fmt.Sprint([4]int{loadConns}) {
		t.Errorf("it was answered by %s", got)
	}
}

// announced reports each connection that it accepts.
type announced struct {
	net.Listener
	accepted chan<- bool
}

func (a announced) Accept() (net.Conn, error) {
	c, err := a.Listener.Accept()
	if err == nil {
		a.accepted <- true
	}
	return c, err
}

// The same, with a dialer that streams. The acceptor waits for nothing.
func TestStoppedDialerStreams(t *testing.T) {
	const total = 4_000_000
	for _, l := range shmLanes {
		t.Run(l.name, func(t *testing.T) {
			ln := l.listen(t, l.here())
			t.Setenv(envBytes, fmt.Sprint(total))
			p := startRole(t, "stream", l, ln.Addr().String())
			c := mustAccept(t, ln)
			l.carries(t, c)
			e := streamEnd{conn: c, seed: 1}
			var streaming sync.WaitGroup
			p.stopFor(t, func() { streaming.Go(func() { e.both(t, total) }) }) // the stream might be over before a later stop
			for range amount(20, 5) {
				p.stopFor(t, func() {})
			}
			streaming.Wait()
			if f := strings.Fields(p.line(t)); len(f) != 3 || f[2] != fmt.Sprint(total) || f[0] != hex.EncodeToString(e.gotSum()) || f[1] != hex.EncodeToString(e.sum()) {
				t.Errorf("the dialer says %v", f)
			}
		})
	}
}

// stopFor stops a process while do runs, unless the process has ended.
func (p *process) stopFor(t testing.TB, do func()) {
	t.Helper()
	if p.Process.Signal(syscall.SIGSTOP) != nil {
		return
	}
	waitFor(t, "the process is stopped, or has ended", func() bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Process.Pid))
		return err != nil || bytes.ContainsAny(stat[bytes.LastIndexByte(stat, ')')+1:][:3], "TZ")
	})
	do()
	p.Process.Signal(syscall.SIGCONT)
}

// wantNothing reads, and expects to find nothing.
func wantNothing(t testing.TB, c interface {
	io.Reader
	SetReadDeadline(time.Time) error
}) {
	t.Helper()
	c.SetReadDeadline(time.Now().Add(time.Millisecond))
	if n, err := c.Read(make([]byte, 1)); n != 0 {
		t.Fatalf("read %d bytes", n)
	} else {
		wantOpError(t, err, "read", os.ErrDeadlineExceeded)
	}
	c.SetReadDeadline(time.Time{})
}

// wantAnswer reads a process's answer to one byte.
func wantAnswer(t testing.TB, c io.Reader, name byte) {
	t.Helper()
	b := make([]byte, 1)
	if _, err := io.ReadFull(c, b); err != nil || b[0] != name {
		t.Fatalf("%d has answered, %v", b[0], err)
	}
}

// use uses a connection until it has moved.
func use(t testing.TB, c net.Conn, name byte) {
	t.Helper()
	c.SetDeadline(time.Now().Add(testTimeout))
	waitFor(t, "it moves", func() bool { // an attempt that fails is repeated after four times as much use
		for range firstTurns {
			if _, err := c.Write(make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
			wantAnswer(t, c, name)
		}
		return InfoOf(c).Provider == shm.Name
	})
	c.SetDeadline(time.Time{})
}

// A program starts other programs all the time while its connections move. Each connection moves, and no
// other program inherits a descriptor.
func TestForkAndExecWhileConnectionsMove(t *testing.T) {
	before := descriptorsOfAChild(t)
	tcp := plainListen(t, "127.0.0.1:0")
	startServer(t, tcp, 0)
	load := startLoad(t, atOnce(), tcp.Addr().String())
	const some = 30
	for range some {
		if got := descriptorsOfAChild(t); got != before {
			t.Errorf("a program has the descriptors %q, and before it had %q", got, before)
		}
	}
	load.wantMore(t, shm.Name, 0)
	load.end()
	load.wantNoneBy(t, providerTCP)
}

func descriptorsOfAChild(t testing.TB) string {
	t.Helper()
	out, err := exec.Command("ls", "/proc/self/fd").CombinedOutput()
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// Processes that are stopped cost only one attempt to move, however many they are: the next attempt asks
// the other processes first.
func TestStoppedCostOneAttempt(t *testing.T) {
	tcp := plainListen(t, "127.0.0.1:0")
	at := finding.Here(tcpid.Namespace(tcp), tcp.Addr().(*net.TCPAddr).AddrPort().Port())
	const stopped = 4
	for i := range stopped {
		p := startServer(t, tcp, byte(i))
		defer p.goOn(t)
		p.stop(t)
	}
	silent, err := shm.Names(t.Context(), at.Peer.Port(), uint32(os.Getuid()), shm.Config{})
	if err != nil || len(silent) != stopped {
		t.Fatal(silent, err)
	}
	startServer(t, tcp, stopped)
	asked := make(map[string]int)
	useProviders(t, watched{byShm, func(move func() error) error {
		const mark = "behind it are those that do not answer this attempt"
		var before []string
		finding.Note(at, func(h *finding.Hint) { // without the name of the process that had the last connection, as that would be asked first
			before = slices.DeleteFunc(slices.Clone(h.Silent), func(s string) bool { return s == mark })
			*h = finding.Hint{Silent: slices.Concat(before, []string{mark})}
		})
		err := move()
		now := finding.HintOf(at).Silent
		now = now[slices.Index(now, mark)+1:]
		stoodStill := func(s string) bool { return !slices.Contains(silent, s) }
		if errors.Is(err, hello.ErrUnknown) || slices.ContainsFunc(slices.Concat(before, now), stoodStill) {
			return err // the right process had not accepted yet, or not answered, so the stopped ones were asked next
		}
		for _, s := range now {
			if asked[s]++; asked[s] > 1 {
				t.Errorf("%s is asked again", s)
			}
		}
		return err
	}})
	for range 10 {
		if by, err := exchange(atOnce(), tcp.Addr().String()); err != nil || by.name != stopped || by.provider != shm.Name {
			t.Errorf("%+v, %v", by, err)
		}
	}
}

// A process that was stopped, and goes on, is asked again soon, however many others are still stopped.
func TestStoppedAmongStopped(t *testing.T) {
	tcp := plainListen(t, "127.0.0.1:0")
	var all []*process
	for i := range 5 {
		all = append(all, startServer(t, tcp, byte(i)))
	}
	at := finding.Here(tcpid.Namespace(tcp), tcp.Addr().(*net.TCPAddr).AddrPort().Port())
	names, err := shm.Names(t.Context(), at.Peer.Port(), uint32(os.Getuid()), shm.Config{})
	if err != nil || len(names) != len(all) {
		t.Fatal(names, err)
	}
	finding.Note(at, func(h *finding.Hint) { h.Silent = names }) // as if each had been asked and had not answered
	for i, p := range all {
		if i < len(all)-1 {
			p.stop(t)
			defer p.goOn(t)
		}
	}
	d := atOnce()
	d.Options.AttemptTimeout = moveTimeout
	var by answeredBy
	for range 10 {
		var err error
		if by, err = exchange(d, tcp.Addr().String()); err != nil {
			t.Fatal(err)
		}
		if by.provider == shm.Name {
			return
		}
	}
	t.Errorf("%+v", by)
}

// Many connections to several stopped processes delay a move to another process only until the first
// attempts there have timed out.
func TestManyStoppedHoldUpNobodyElse(t *testing.T) {
	onlyShm(t)
	var stuck []net.Conn
	for left := movers.MostMoving; left > 0; left /= 2 { // each process's connections leave half of what is left to the others
		tcp := plainListen(t, "127.0.0.1:0")
		p := startServer(t, tcp, 7)
		for range left {
			c := mustDial(t, new(Dialer), tcp.Addr().String())
			if _, err := ask(c); err != nil {
				t.Fatal(err)
			}
			stuck = append(stuck, c)
		}
		defer p.goOn(t)
		p.stop(t)
	}
	c, turns := otherProcess(t)
	for _, c := range stuck {
		newconn.HandleOf(c).CallUse(0)
		if _, err := c.Write(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
	}
	wantTurn(t, c, turns, len(stuck)/4) // after the first attempts, the next ones end soon
}

// A process that is asked only at the very end of an attempt does not count as silent because of that,
// nor as one that has answered.
func TestSilentOnlyIfThereWasTime(t *testing.T) {
	tcp := plainListen(t, "127.0.0.1:0")
	p := startServer(t, tcp, 7)
	c := mustDial(t, new(Dialer), tcp.Addr().String())
	if name, err := ask(c); name != 7 || err != nil {
		t.Fatal(name, err)
	}
	move := func(within time.Duration) (silent bool) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), within)
		defer cancel()
		if err := byShm.Move(ctx, newconn.HandleOf(c), moving.Settings{}); reason.Of(err).Reason != ReasonTimeout {
			t.Fatalf("within %v: %v", within, err)
		}
		return finding.HintOf(finding.Here(tcpid.Namespace(tcp), tcp.Addr().(*net.TCPAddr).AddrPort().Port())).Silent != nil
	}
	if move(0) {
		t.Error("silent, though it was not asked")
	}
	p.stop(t)
	defer p.goOn(t)
	if !move(testTimeout) { // it takes half a second of that
		t.Error("not silent, though it is stopped")
	}
	if !move(finding.AnswersIn / 2) {
		t.Error("not silent any more, though it has not answered")
	}
}
