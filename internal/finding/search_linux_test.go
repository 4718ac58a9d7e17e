package finding

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"reflect"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/hello"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/reason"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/provider/shm"
	"github.com/sanconn/san/session"
)

// A search whose time is over does not report that no process listens: it has not asked all.
func TestSearchRunsOutOfTime(t *testing.T) {
	at := Here(0, unusedPort(t))
	l, err := shm.Listen(at.Peer.Port(), shm.Config{}, drop)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	q := Search{At: at, User: uint32(os.Geteuid())}
	if err := q.Run(isUp{t.Context()}); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
}

// A search ends with the last wrong answer that a connection accepts: no other process is asked.
func TestSearchEndsWhenTooMuchWasGuessed(t *testing.T) {
	to := acceptors(t, 3)
	asked := 0
	err := Search{At: Here(0, to.Port()), To: to, User: uint32(os.Geteuid()), Propose: func(_ context.Context, ep session.Endpoint) error {
		drop(ep)
		if asked++; asked == 2 {
			return &session.Unavailable{Reason: session.ReasonOwner, Err: hello.ErrGuessed}
		}
		return &session.Unavailable{Reason: session.ReasonOwner, Err: hello.ErrImpostor}
	}}.Run(t.Context())
	if asked != 2 || !errors.Is(err, hello.ErrGuessed) {
		t.Errorf("%d are asked, %v", asked, err)
	}
}

// If another process's end stays on TCP, the next process is asked, as it may have the connection by
// now. The same applies after a process that has another version, answers nonsense, has ended, or has no
// room. If this end does not move, or the connection's other end was found, no other process is asked.
// The process that has the other end is remembered.
func TestSearchEndsWithAnEndThatStays(t *testing.T) {
	to := acceptors(t, 2)
	at := Here(0, to.Port())
	defer Note(at, func(h *Hint) { *h = Hint{} })
	for _, of := range []struct {
		answer error
		asked  int
		has    bool
	}{
		{&session.Unavailable{Reason: session.ReasonStays, Err: net.ErrClosed}, 1, false},
		{hello.Answer{Code: hello.Stays}.Err(), 2, false},
		{&session.Unavailable{Reason: session.ReasonVersion}, 2, false},
		{hello.Answer{Code: 77}.Err(), 2, false},
		{newconn.ErrNotTaken, 2, false},
		{&session.Unavailable{Reason: session.ReasonResources}, 2, false},
		{syscall.ECONNRESET, 2, false},
		{syscall.EPIPE, 2, false},
		{newconn.ErrNoAnswer, 1, true},
		{nil, 1, true},
		{hello.Answer{Code: hello.Refused}.Err(), 1, true},
		{hello.Answer{Code: hello.Unknown, Undecided: true}.Err(), 1, true},
	} {
		Note(at, func(h *Hint) { *h = Hint{} })
		asked := 0
		err := Search{At: at, To: to, User: uint32(os.Geteuid()), Propose: func(_ context.Context, ep session.Endpoint) error {
			drop(ep)
			asked++
			return of.answer
		}}.Run(t.Context())
		if asked != of.asked || err != of.answer {
			t.Errorf("%v: %d are asked, %v", of.answer, asked, err)
		}
		if has := HintOf(at).last != ""; has != of.has {
			t.Errorf("%v: who has the other end is remembered: %v", of.answer, has)
		}
	}
}

// If one process has another version, and the others do not have the connection, the reason is the
// version. As another process may accept the connection later, the error is also ErrUnknown.
func TestSearchTellsOfAnotherVersion(t *testing.T) {
	to := acceptors(t, 2)
	unknown, version := hello.Answer{Code: hello.Unknown}.Err(), error(&session.Unavailable{Reason: session.ReasonVersion, Err: net.ErrClosed})
	for _, answers := range [][]error{{unknown, version}, {version, unknown}} {
		asked := 0
		err := Search{At: Here(0, to.Port()), To: to, User: uint32(os.Geteuid()), Propose: func(_ context.Context, ep session.Endpoint) error {
			drop(ep)
			asked++
			return answers[asked-1]
		}}.Run(t.Context())
		if asked != 2 || !reason.Is(err, session.ReasonVersion) || !errors.Is(err, hello.ErrUnknown) {
			t.Errorf("%d are asked, %v", asked, err)
		}
	}
}

// A name that was not listed, because other sockets ended during the listing, is found nevertheless, and
// no process is asked twice.
func TestSearchListsAgain(t *testing.T) {
	to := acceptors(t, 1)
	asked := 0
	q := Search{At: Here(0, to.Port()), To: to, User: uint32(os.Geteuid()), Propose: func(_ context.Context, ep session.Endpoint) error {
		drop(ep)
		if asked++; asked > 1 {
			return nil
		}
		accepts(t, to) // as if it had been left out of the list
		return &session.Unavailable{Reason: session.ReasonOwner, Err: hello.ErrOther}
	}}
	if err := q.Run(t.Context()); asked != 2 || err != nil {
		t.Errorf("%d are asked, %v", asked, err)
	}
}

// That no process had a name of a port is forgotten once this process has one, as ports are used again.
func TestSearchOfAPortThatIsOurs(t *testing.T) {
	for _, dir := range []string{"", t.TempDir()} {
		to := acceptors(t, 0)
		at := Here(0, to.Port())
		if dir != "" {
			at = Place{Dir: dir, Peer: to}
		}
		asked := 0
		q := Search{At: at, To: to, User: uint32(os.Geteuid()), Propose: func(_ context.Context, ep session.Endpoint) error {
			drop(ep)
			asked++
			return nil
		}}
		if err := q.Run(t.Context()); !reason.Is(err, session.ReasonNoListener, session.ReasonNotServed) {
			t.Fatal(err)
		}
		n, err := Open(Here(0, to.Port()), dir, session.Config{}, func(ep session.Endpoint, _ bool, _ session.Config) { drop(ep) })
		if err != nil {
			t.Fatal(err)
		}
		defer n.Close()
		if err := q.Run(t.Context()); err != nil || asked != 1 {
			t.Errorf("directory %q: %d are asked, %v", dir, asked, err)
		}
	}
}

// The process that had the last connection is asked first, and silent ones last. No more than MostNames
// keep links, however many names there are.
func TestWhoIsAsked(t *testing.T) {
	const many = shm.MostNames + 6
	port := unusedPort(t)
	at := Here(0, port)
	asked := make(chan string, many+1)
	names := func() []string {
		names, err := shm.Names(t.Context(), port, uint32(os.Geteuid()), shm.Config{})
		if err != nil {
			t.Fatal(err)
		}
		return names
	}
	var before []string
	open := func() {
		var name string
		ready := make(chan struct{})
		l, err := shm.Listen(port, shm.Config{}, func(ep session.Endpoint) { <-ready; drop(ep); asked <- name })
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		for _, name = range names() {
			if !slices.Contains(before, name) {
				break
			}
		}
		before = append(before, name)
		close(ready)
	}
	search := func() (order []string) {
		q := Search{At: at, To: netip.AddrPortFrom(netip.IPv6Loopback(), port), User: uint32(os.Geteuid()), Propose: func(_ context.Context, ep session.Endpoint) error {
			defer drop(ep)
			order = append(order, <-asked)
			return &session.Unavailable{Reason: session.ReasonOwner, Err: hello.ErrOther}
		}}
		if err := q.Run(t.Context()); err == nil {
			t.Error("found")
		}
		return order
	}
	for range 5 {
		open()
	}
	defer Note(at, func(h *Hint) { *h = Hint{} })
	var order []string
	for range 10 {
		Note(at, func(h *Hint) {
			*h = Hint{last: before[3], user: uint32(os.Geteuid()), Silent: []string{before[0], "gone", before[2]}}
		})
		order = search()
		if len(order) != 5 || order[0] != before[3] || !slices.Contains(before[:3], order[3]) || !slices.Contains(before[:3], order[4]) || slices.Contains(order[3:], before[1]) {
			t.Errorf("of %q these were asked: %q", before, order)
		}
		if silent := HintOf(at).Silent; !slices.Equal(silent, []string{"gone"}) {
			t.Errorf("silent: %q", silent)
		}
	}
	if bits.UintSize == 32 { // so many links would need more addresses than there are
		return
	}
	for len(before) < many {
		open()
	}
	for range 3 {
		order = append(order, search()...)
	}
	slices.Sort(order)
	// More than can have a link at a time are asked only if a link has failed meanwhile, as on a loaded
	// machine.
	if n := len(slices.Compact(order)); n < shm.MostNames {
		t.Errorf("%d of %d have been asked", n, many)
	}
	if n := len(shm.Linked(port, uint32(os.Geteuid()), shm.Config{})); n > shm.MostNames {
		t.Errorf("links with %d", n)
	}
}

// The process that had the last connection is not asked for a connection to a process of another user,
// who may have other addresses of the port.
func TestWhoHadTheLastIsAnotherUsers(t *testing.T) {
	if os.Geteuid() == 0 {
		runtime.LockOSThread() // for good: from here on it runs as another user
		if _, _, errno := syscall.RawSyscall(syscall.SYS_SETRESUID, 1, 1, 1); errno != 0 {
			t.Fatal(errno)
		}
	}
	at, user := Here(0, 8), uint32(os.Geteuid())
	came := make(chan struct{}, 9)
	l, err := net.Listen("unixpacket", fmt.Sprintf("@san-test/%d", os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			came <- struct{}{}
			c.Close()
		}
	}()
	q := Search{At: at, To: netip.AddrPortFrom(netip.IPv6Loopback(), 8), User: user}
	q.noteFound(l.Addr().String())
	defer Note(at, func(h *Hint) { *h = Hint{} })
	q.User++
	defer Note(q.to(), func(h *Hint) { *h = Hint{} })
	if err := q.Run(t.Context()); !reason.Is(err, session.ReasonNoListener) || len(came) > 0 {
		t.Errorf("%v; %d have come to the other user's process", err, len(came))
	}
}

// Processes to which there are links are asked before names are listed. The others are asked if none of
// those has the connection.
func TestLinkedAreAskedFirst(t *testing.T) {
	const none = -1
	port := unusedPort(t)
	at := Here(0, port)
	defer Note(at, func(h *Hint) { *h = Hint{} })
	asked := make(chan int, 1)
	open := func(which int) {
		l, err := shm.Listen(port, shm.Config{}, func(ep session.Endpoint) { drop(ep); asked <- which })
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
	}
	search := func(has ...int) (order []int) {
		Note(at, func(h *Hint) { *h = Hint{} })
		Search{At: at, To: netip.AddrPortFrom(netip.IPv6Loopback(), port), User: uint32(os.Geteuid()), Propose: func(_ context.Context, ep session.Endpoint) error {
			defer drop(ep)
			which := <-asked
			if order = append(order, which); slices.Contains(has, which) {
				return nil
			}
			return &session.Unavailable{Reason: session.ReasonNoListener, Err: hello.ErrUnknown}
		}}.Run(t.Context())
		return order
	}
	open(0)
	open(1)
	testenv.Eventually(t, 20*time.Second, func() error { // then there are links to both
		if order := search(none); len(order) < 2 {
			return fmt.Errorf("these were asked: %d", order)
		}
		return nil
	})
	open(2)
	for range 20 {
		if order := search(0, 1); len(order) != 1 || order[0] == 2 {
			t.Errorf("these were asked: %d", order)
		}
	}
	if order := search(2); len(order) != 3 || order[2] != 2 {
		t.Errorf("these were asked for what the last one has: %d", order)
	}
}

// A search asks no more than MostNames processes, even if there are more names of the user, by which nobody
// answers.
func TestNamesWithoutEnd(t *testing.T) {
	const many = 3 * shm.MostNames
	port := unusedPort(t)
	l, err := shm.Listen(port, shm.Config{}, drop)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	names, err := shm.Names(t.Context(), port, uint32(os.Geteuid()), shm.Config{})
	if err != nil || len(names) != 1 {
		t.Fatal(names, err)
	}
	came, done := make([]bool, many), sync.WaitGroup{}
	var all []net.Listener
	for i := range many {
		l, err := net.Listen("unixpacket", fmt.Sprintf("%s%016x", names[0][:len(names[0])-16], i))
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, l)
		done.Go(func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				came[i] = true
				c.Close()
			}
		})
	}
	q := Search{At: Here(0, port), To: netip.AddrPortFrom(netip.IPv6Loopback(), port), User: uint32(os.Geteuid()), Propose: func(_ context.Context, ep session.Endpoint) error {
		drop(ep)
		return &session.Unavailable{Reason: session.ReasonOwner, Err: hello.ErrOther}
	}}
	defer Note(q.to(), func(h *Hint) { *h = Hint{} })
	err = q.Run(t.Context())
	for _, l := range all {
		l.Close()
	}
	done.Wait()
	asked := 0
	if errors.Is(err, hello.ErrOther) { // the answer of the one that answers
		asked++
	}
	for _, c := range came {
		if c {
			asked++
		}
	}
	if asked != shm.MostNames || !errors.Is(err, hello.ErrOther) && !reason.Is(err, session.ReasonNoListener) {
		t.Errorf("%d of %d were asked, %v", asked, many, err)
	}
}

// lastPort is the last port that unusedPort has tried. It begins at random, as other processes test, too.
var lastPort = rand.Uint32()

// unusedPort returns another port each time, because links of a port's names outlive a test. No process
// has a name for it, and the system does not give it to sockets, so no other program's process is found.
func unusedPort(t *testing.T) uint16 {
	for {
		lastPort++
		port := uint16(1 + lastPort%(1<<15-1))
		if names, err := shm.Names(t.Context(), port, uint32(os.Geteuid()), shm.Config{}); err != nil {
			t.Fatal(err)
		} else if len(names) == 0 {
			return port
		}
	}
}

// acceptors returns a port of TCP at which n listeners accept on shm until the end of the test.
func acceptors(t *testing.T, n int) (to netip.AddrPort) {
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tcp.Close() })
	to = tcp.Addr().(*net.TCPAddr).AddrPort()
	for range n {
		accepts(t, to)
	}
	return to
}

// accepts adds a listener that accepts on shm.
func accepts(t *testing.T, to netip.AddrPort) {
	l, err := shm.Listen(to.Port(), shm.Config{}, drop)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
}

func drop(ep session.Endpoint) { ep.Abort(); ep.Retire() }

// A search that is given up has found out nothing, neither which processes listen nor which are stopped.
func TestSearchThatIsGivenUp(t *testing.T) {
	at := Here(0, unusedPort(t))
	for range 3 {
		l, err := shm.Listen(at.Peer.Port(), shm.Config{}, drop)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
	}
	Note(at, func(h *Hint) { *h = Hint{last: "somebody"} })
	defer Note(at, func(h *Hint) { *h = Hint{} })
	before := HintOf(at)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := (Search{At: at}).Run(ctx); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if now := HintOf(at); !reflect.DeepEqual(now, before) {
		t.Errorf("%+v is remembered, was %+v", now, before)
	}
	names, err := shm.Names(t.Context(), at.Peer.Port(), uint32(os.Geteuid()), shm.Config{})
	if err != nil || len(names) != 3 {
		t.Fatal(names, err)
	}
	Note(at, func(h *Hint) { *h = Hint{Silent: names} })
	before = HintOf(at)
	if err := (Search{At: at}).Run(ctx); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if now := HintOf(at); !reflect.DeepEqual(now, before) {
		t.Errorf("%+v is remembered, was %+v", now, before)
	}
}

// isUp is the context of an attempt whose time ends during the search.
type isUp struct{ context.Context }

func (isUp) Done() <-chan struct{} { return nil }
func (isUp) Err() error            { return context.DeadlineExceeded }

// That nobody was found is remembered for nobodyFor, and forgotten once somebody is.
func TestNobodyIsRemembered(t *testing.T) {
	to := acceptors(t, 0)
	asked := 0
	q := Search{At: Here(0, to.Port()), To: to, User: uint32(os.Geteuid()), Propose: func(_ context.Context, ep session.Endpoint) error {
		drop(ep)
		asked++
		return nil
	}}
	defer Note(q.At, func(h *Hint) { *h = Hint{} })
	if err := q.Run(t.Context()); !reason.Is(err, session.ReasonNoListener) || HintOf(q.to()).nobodyAt.IsZero() {
		t.Fatal(err)
	}
	accepts(t, to)
	found := func(at time.Time) bool {
		Note(q.to(), func(h *Hint) { h.nobodyAt = at })
		return q.Run(t.Context()) == nil
	}
	if found(time.Now().Add(time.Hour)) || asked > 0 { // however slow the test is
		t.Error("it is searched again at once")
	}
	if !found(time.Now().Add(-nobodyFor)) || !HintOf(q.to()).nobodyAt.IsZero() {
		t.Errorf("%v is remembered behind that time", HintOf(q.to()).nobodyAt)
	}
}

// A process was silent if it has not answered in a time that was long enough.
func TestWhoIsSilent(t *testing.T) {
	to := acceptors(t, 1)
	at := Here(0, to.Port())
	defer Note(at, func(h *Hint) { *h = Hint{} })
	timeout := &session.Unavailable{Reason: session.ReasonTimeout}
	for name, of := range map[string]struct {
		left   time.Duration // of the search's time; 0: it has no end
		cancel bool
		err    error
		silent bool
	}{
		"it has not taken the proposal": {0, false, newconn.ErrNotTaken, true},
		"it has not answered":           {time.Hour, false, timeout, true},
		"there was no time":             {AnswersIn / 2, false, timeout, false},
		"it was given up":               {0, true, newconn.ErrNotTaken, false},
		"it has not decided":            {0, false, hello.Answer{Code: hello.Unknown, Undecided: true}.Err(), false},
		"it has answered":               {0, false, hello.Answer{Code: hello.Refused}.Err(), false},
	} {
		Note(at, func(h *Hint) { *h = Hint{} })
		ctx, cancel := context.WithCancel(t.Context())
		Search{At: at, To: to, User: uint32(os.Geteuid()), Propose: func(_ context.Context, ep session.Endpoint) error {
			drop(ep)
			if of.cancel {
				cancel()
			}
			return of.err
		}}.Run(ends{ctx, of.left})
		cancel()
		if silent := len(HintOf(at).Silent) > 0; silent != of.silent {
			t.Errorf("%s: silent: %v", name, silent)
		}
	}
}

// ends is the context of an attempt that has so much time left, whenever it looks.
type ends struct {
	context.Context
	left time.Duration
}

func (e ends) Deadline() (time.Time, bool) { return time.Now().Add(e.left), e.left > 0 }
