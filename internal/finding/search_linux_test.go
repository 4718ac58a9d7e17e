package finding

import (
	"context"
	"errors"
	"net"
	"os"
	"testing"

	"github.com/sanconn/san/internal/hello"
	"github.com/sanconn/san/internal/reason"
	"github.com/sanconn/san/provider/shm"
	"github.com/sanconn/san/session"
)

// A search whose time is up has not found that nobody is there: it has not asked all.
func TestSearchRunsOutOfTime(t *testing.T) {
	q := Search{At: Here(0, 1)} // for which nobody has a name
	if err := q.Run(isUp{t.Context()}); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
}

// A search ends with the last wrong answer that a connection takes: nobody else is asked.
func TestSearchEndsWhenTooMuchWasGuessed(t *testing.T) {
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	to := tcp.Addr().(*net.TCPAddr).AddrPort()
	for range 3 {
		l, err := shm.Listen(to.Port(), shm.Config{}, drop)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
	}
	asked := 0
	err = Search{At: Here(0, to.Port()), To: to, User: uint32(os.Geteuid()), Propose: func(_ context.Context, ep session.Endpoint) error {
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

// Where another process's end stays on TCP the next one is asked, as it may have the connection by now.
// An end of this process that does not move is proposed to nobody else.
func TestSearchEndsWithAnEndThatStays(t *testing.T) {
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	to := tcp.Addr().(*net.TCPAddr).AddrPort()
	for range 2 {
		l, err := shm.Listen(to.Port(), shm.Config{}, drop)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
	}
	for want, stays := range map[int]error{
		1: &session.Unavailable{Reason: session.ReasonStays, Err: net.ErrClosed},
		2: hello.Answer{Code: hello.Stays}.Err(),
	} {
		asked := 0
		err = Search{At: Here(0, to.Port()), To: to, User: uint32(os.Geteuid()), Propose: func(_ context.Context, ep session.Endpoint) error {
			drop(ep)
			asked++
			return stays
		}}.Run(t.Context())
		if asked != want || err != stays {
			t.Errorf("%v: %d are asked, %v", stays, asked, err)
		}
	}
}

// That nobody had a name of a port does not count once this process has one: ports come again.
func TestSearchOfAPortThatIsOurs(t *testing.T) {
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	to := tcp.Addr().(*net.TCPAddr).AddrPort()
	asked := 0
	q := Search{At: Here(0, to.Port()), To: to, User: uint32(os.Geteuid()), Propose: func(_ context.Context, ep session.Endpoint) error {
		drop(ep)
		asked++
		return nil
	}}
	if err := q.Run(t.Context()); !reason.Is(err, session.ReasonNoListener) {
		t.Fatal(err)
	}
	n, err := Open(Here(0, to.Port()), "", session.Config{}, func(ep Taken, _ session.Config) { drop(ep.Endpoint) })
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	if err := q.Run(t.Context()); err != nil || asked != 1 {
		t.Errorf("%d are asked, %v", asked, err)
	}
}

func drop(ep session.Endpoint) { ep.Abort(); ep.Retire() }

// A search that is given up has found out nothing, neither who is there nor who is stopped.
func TestSearchThatIsGivenUp(t *testing.T) {
	at := Here(0, 2)
	Note(at, func(h *Hint) { *h = Hint{last: 5, known: true, Seen: 1 << 5} })
	defer Note(at, func(h *Hint) { *h = Hint{} })
	before := HintOf(at)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := (Search{At: at}).Run(ctx); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if now := HintOf(at); now != before {
		t.Errorf("%+v is remembered, was %+v", now, before)
	}
	Note(at, func(h *Hint) { *h = Hint{Silent: 1<<shm.Numbers - 1} })
	before = HintOf(at)
	if err := (Search{At: at}).Run(ctx); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if now := HintOf(at); now != before {
		t.Errorf("%+v is remembered, was %+v", now, before)
	}
}

// isUp is the context of an attempt whose time has ended while it asks.
type isUp struct{ context.Context }

func (isUp) Done() <-chan struct{} { return nil }
func (isUp) Err() error            { return context.DeadlineExceeded }
