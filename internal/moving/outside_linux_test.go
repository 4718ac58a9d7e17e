package moving

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/sanconn/san/internal/hello"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/tcpid"
	"github.com/sanconn/san/provider/verbs"
)

// stampedPair returns a connection whose stamp both ends know: the dialed end, its stamp, and the
// accepted end as it is in the table.
func stampedPair(t *testing.T) (tcp *net.TCPConn, stamp tcpid.Stamp, h newconn.Handle, l *Life) {
	t.Helper()
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	ln, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	if err := tcpid.SaveSYN(ln.(*net.TCPListener)); err != nil {
		t.Fatal(err)
	}
	for range 5 { // the most likely stamp is wrong now and then, if clocks were held up
		c, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		a, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		stamps, err := tcpid.DialerStamps(c.(*net.TCPConn), time.Time{})
		if err != nil {
			t.Fatal(err)
		}
		l := new(Life)
		conn := l.TakeOn(a.(*net.TCPConn), newconn.Config{})
		h := newconn.HandleOf(conn)
		t.Cleanup(func() { conn.Close() })
		if half, ok := l.proof.Answer(h.TCP(), stamps[0].Challenge()); ok && stamps[0].Confirm(half) {
			return c.(*net.TCPConn), stamps[0], h, l
		}
	}
	t.Fatal("no connection's likeliest stamp is its own")
	return
}

// A peer that does not accept the more likely stamp is sent the other one, and no third.
func TestBothStampsAreTried(t *testing.T) {
	for right, want := range map[tcpid.Stamp]error{1: nil, 2: nil, 3: hello.ErrOther} {
		var tried []tcpid.Stamp
		err := tryEach([]tcpid.Stamp{1, 2}, func(s tcpid.Stamp) error {
			if tried = append(tried, s); s != right {
				return hello.Answer{Code: hello.Other}.Err()
			}
			return nil
		})
		if !errors.Is(err, want) || len(tried) != int(min(right, 2)) {
			t.Errorf("%v after %d", err, tried)
		}
	}
}

// A stamp proves which host has the connection's other end. So it is accepted from processes of other
// hosts, and from other network namespaces for connections that come from there. It is not accepted from
// processes of this namespace, which have the kernel's cookies and may have learned the stamp.
func TestWhoseStampIsBelieved(t *testing.T) {
	tcp, stamp, h, l := stampedPair(t)
	ends, err := tcpid.EndsOf(tcp)
	if err != nil {
		t.Fatal(err)
	}
	proposal := hello.Proposal{Ends: ends, Stamped: true, Challenge: stamp.Challenge()}
	me := uint32(os.Geteuid())
	for name, r := range map[string]*taker{
		"a process of this namespace": {Came: Came{User: &me}},
		"one of another namespace":    {Came: Came{outside: true}},
	} {
		if a := r.judge(proposal, h, l); a.Code != hello.Other {
			t.Errorf("%s, by a stamp: %v", name, a.Code)
		}
	}
	cookies := hello.Proposal{Ends: ends}
	cookies.Cookie, _ = tcpid.Cookie(tcp)
	cookies.PeerCookie, _ = tcpid.Cookie(h.TCP())
	if a := (&taker{Came: Came{User: &me}}).judge(cookies, h, l); a.Code != hello.Moves {
		t.Errorf("a process of this namespace, by cookies: %v", a.Code)
	}
	if a := (&taker{Came: Came{outside: true}}).judge(cookies, h, l); a.Code != hello.Other {
		t.Errorf("a process of another namespace, by cookies: %v", a.Code)
	}
	other := me + 1
	if a := (&taker{Came: Came{User: &other}}).judge(cookies, h, l); a.Code != hello.Other {
		t.Errorf("another user, by cookies: %v", a.Code)
	}
	for name, r := range map[string]struct {
		own, peer uint64
		want      hello.Code
	}{
		"another socket's own cookie":  {1, 0, hello.Other},
		"the cookie of another's peer": {0, 1, hello.Unknown},
	} {
		p := cookies
		p.Cookie += r.own
		p.PeerCookie += r.peer
		if a := (&taker{Came: Came{User: &me}}).judge(p, h, l); a.Code != r.want {
			t.Errorf("%s: %v", name, a.Code)
		}
	}
	a := (&taker{}).judge(proposal, h, l)
	if a.Code != hello.Moves || !stamp.Confirm(a.Stamp) {
		t.Errorf("a process of another host, by a stamp: %+v", a)
	}
	wrong := proposal
	wrong.Challenge += 1000
	for range tcpid.MostGuesses {
		if a := (&taker{}).judge(wrong, h, l); a.Code != hello.Other {
			t.Errorf("a wrong stamp: %v", a.Code)
		}
	}
	if a := (&taker{}).judge(proposal, h, l); a.Code != hello.Stays {
		t.Errorf("a right one after %d wrong ones: %v", tcpid.MostGuesses, a.Code)
	}
}

// A request over RDMA is admitted if this process has accepted the connection, the stamp is right, and
// there were not too many wrong ones for the connection.
func TestRequestsAreForConnections(t *testing.T) {
	_, stamp, h, _ := stampedPair(t)
	ends, err := tcpid.EndsOf(h.TCP())
	if err != nil {
		t.Fatal(err)
	}
	other := netip.AddrPortFrom(ends.Remote.Addr(), ends.Remote.Port()^1)
	if err := admit(ends.Local, other, stamp.Challenge()); err != verbs.ErrUnknown {
		t.Errorf("for %v, which has no connection: %v", other, err)
	}
	if err := admit(ends.Local, ends.Remote, stamp.Challenge()); err != nil {
		t.Errorf("with its stamp: %v", err)
	}
	for range tcpid.MostGuesses {
		if err := admit(ends.Local, ends.Remote, stamp.Challenge()+1000); err != verbs.ErrOther {
			t.Errorf("with a wrong stamp: %v", err)
		}
	}
	if err := admit(ends.Local, ends.Remote, stamp.Challenge()); err != verbs.ErrOther {
		t.Errorf("with the right one after %d wrong ones: %v", tcpid.MostGuesses, err)
	}
}

// Answers with a wrong stamp are counted for each connection, whoever has sent them.
func TestWrongAnswersAreCounted(t *testing.T) {
	_, stamp, h, l := stampedPair(t)
	wrong := hello.Answer{Code: hello.Moves, Stamp: uint16(stamp>>16) + 1}
	right := hello.Answer{Code: hello.Moves, Stamp: uint16(stamp >> 16)}
	if err := l.confirm(stamp, right); err != nil {
		t.Error(err)
	}
	for range tcpid.MostGuesses {
		if err := l.confirm(stamp, wrong); !errors.Is(err, hello.ErrImpostor) {
			t.Errorf("a wrong answer: %v", err)
		}
	}
	if why := (&Plan{Choice: Choice{Providers: Registry}}).move(context.Background(), h); why != errTooManyGuesses {
		t.Errorf("after %d of them: %v", tcpid.MostGuesses, why)
	}
}
