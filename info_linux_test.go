package san

import (
	"crypto/tls"
	"net"
	"runtime"
	"testing"

	"github.com/sanconn/san/internal/moving"
	"github.com/sanconn/san/provider/shm"
	"github.com/sanconn/san/sanconn"
)

// hidden wraps a connection, and has no method by which InfoOf could find it.
type hidden struct {
	inner
	n int
}

type inner = net.Conn

func TestInfoOf(t *testing.T) {
	useFake(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	c := mustDial(t, atOnce(), l.Addr().String())
	send(t, mustAccept(t, l), c, "eight by") // by TCP or the SAN
	wantMoved(t, c, fakeName)
	unused := mustDial(t, &Dialer{}, l.Addr().String())
	plain := mustAccept(t, l)
	p := mustDial(t, &Dialer{Policy: Never}, l.Addr().String())
	foreign, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer foreign.Close()
	pipe, _ := net.Pipe()
	type limited struct {
		net.Conn
	}
	for _, k := range []struct {
		name string
		conn net.Conn
		want Info
	}{
		{"over the SAN", c, Info{Provider: fakeName}},
		{"inside TLS", tls.Client(c, nil), Info{Provider: fakeName}},
		{"inside TLS twice", tls.Client(tls.Client(c, nil), nil), Info{Provider: fakeName}},
		{"fallback", p, Info{Provider: "tcp", Fallback: ReasonPolicy}},
		{"fallback inside TLS", tls.Client(p, nil), Info{Provider: "tcp", Fallback: ReasonPolicy}},
		{"embedded", &limited{Conn: c}, Info{Provider: fakeName}},
		{"embedded in TLS", tls.Client(limited{Conn: c}, nil), Info{Provider: fakeName}},
		{"fallback embedded", &limited{Conn: p}, Info{Provider: "tcp", Fallback: ReasonPolicy}},
		{"not to be seen through", hidden{c, 0}, Info{}},
		{"not ours", foreign, Info{Provider: "tcp"}},
		{"no network", pipe, Info{Provider: "pipe"}},
		{"nothing", nil, Info{}},
		{"before it is used", unused, Info{Provider: "tcp", Fallback: ReasonUnused}},
		{"accepted, and not proposed to move", plain, Info{Provider: "tcp", Fallback: ReasonPeerPlain}},
	} {
		if k.want.Provider == fakeName {
			got := InfoOf(k.conn)
			k.want.TCPBytes, k.want.SANBytes = got.TCPBytes, 8-got.TCPBytes
		}
		if got := InfoOf(k.conn); got != k.want {
			t.Errorf("%s: %+v, want %+v", k.name, got, k.want)
		}
	}
	unused.Close()
	if got, want := InfoOf(unused), (Info{Provider: "tcp", Fallback: ReasonStays, Cause: moving.ErrShut.Err}); got != want {
		t.Errorf("closed before it was used: %+v, want %+v", got, want)
	}
}

// The reasons of connections that no longer exist are removed.
func TestFallbackReasonsDoNotPileUp(t *testing.T) {
	l := plainListen(t, "127.0.0.1:0")
	for range 100 {
		c, err := (&Dialer{Policy: Never}).Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		wantFallback(t, c, ReasonPolicy)
		c.Close()
	}
	waitFor(t, "the table is empty", func() bool {
		runtime.GC()
		n := 0
		fallbacks.Range(func(any, any) bool { n++; return true })
		return n < 10 // connections of other tests may still exist
	})
}

// If the program has taken the descriptor, or an end cannot accept a proposal, the connection stays on
// TCP, and the reason tells that.
func TestInfoOfWhatStays(t *testing.T) {
	onlyShm(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	c := mustDial(t, atOnce(), l.Addr().String()).(*sanconn.Conn)
	s := mustAccept(t, l).(*sanconn.Conn)
	wantMoved(t, c, shm.Name)
	wantMoved(t, s, shm.Name)
	f, err := c.File()
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	wantStays(t, c, ReasonStays)
	wantStays(t, s, ReasonUnused) // as far as this end knows, its dialer may move it again

	c = mustDial(t, new(Dialer), l.Addr().String()).(*sanconn.Conn)
	s = mustAccept(t, l).(*sanconn.Conn)
	if err := s.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	wantStaysByUse(t, c, s, ReasonStays)
	wantStays(t, s, ReasonStays)
}

// If the other end agrees to a move after the attempt has timed out, both ends count the move.
func TestStatsOfALateMove(t *testing.T) {
	onlyShm(t)
	release, entered := make(chan struct{}), make(chan struct{}, 1)
	l := mustListen(t, &ListenConfig{Condition: func(MoveProposal) error {
		select {
		case entered <- struct{}{}:
		default:
		}
		<-release
		return nil
	}}, "tcp", "127.0.0.1:0")
	before := Stats()
	c := mustDial(t, &Dialer{Options: sanconn.Options{AttemptTimeout: moving.DecideTimeout / 4}}, l.Addr().String()).(*sanconn.Conn)
	s := mustAccept(t, l)
	useUntil(t, c, func() { send(t, c, s, "a use") }, "it is proposed", func() bool { return len(entered) > 0 })
	waitFor(t, "the attempt ends", func() bool { return !isTrying() })
	wantStays(t, c, ReasonTimeout)
	close(release)
	wantMovedByUse(t, c, s, shm.Name)
	wantMoved(t, s, shm.Name)
	after := Stats()
	for what, n := range map[string]int{
		"dialed":   int(after.Dialed[shm.Name] - before.Dialed[shm.Name]),
		"accepted": int(after.Accepted[shm.Name] - before.Accepted[shm.Name]),
		"open":     (after.Open[shm.Name] - before.Open[shm.Name]) / 2,
	} {
		if n != 1 {
			t.Errorf("%s: %d", what, n)
		}
	}
}
