package san

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/hello"
	"github.com/sanconn/san/internal/moving"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/sanconn"
)

// conditions records the proposals with which a listener's condition was called.
type conditions struct {
	mu        sync.Mutex // guards what follows
	proposals []MoveProposal
}

func (c *conditions) note(o MoveProposal) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.proposals = append(c.proposals, o)
}

func (c *conditions) list() []MoveProposal {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]MoveProposal(nil), c.proposals...)
}

var errStranger = errors.New("only who is known")

// A condition gets who proposes a move. A connection that it allows moves; one that it refuses stays on
// TCP for good, with the reason at both ends.
func TestConditionSeesWhoProposesAndDecides(t *testing.T) {
	onlyShm(t)
	for _, refusal := range []error{nil, errStranger} {
		var seen conditions
		l := mustListen(t, &ListenConfig{Condition: func(o MoveProposal) error { seen.note(o); return refusal }}, "tcp", "127.0.0.1:0")
		client := mustDial(t, atOnce(), l.Addr().String())
		server := mustAccept(t, l)
		if refusal == nil {
			wantMoved(t, client, "shm")
			wantMoved(t, server, "shm")
		} else {
			wantStays(t, client, ReasonRefused)
			wantStays(t, server, ReasonRefused)
			if cause := InfoOf(client).Cause; !errors.Is(cause, syscall.ECONNREFUSED) || errors.Is(cause, errStranger) {
				t.Errorf("the dialer has %v", cause)
			}
			if cause := InfoOf(server).Cause; cause != errStranger {
				t.Errorf("the listener has %v", cause)
			}
		}
		send(t, client, server, "question")
		send(t, server, client, "answer")
		proposals := seen.list()
		if len(proposals) != 1 {
			t.Fatalf("%d calls", len(proposals))
		}
		o := proposals[0]
		if o.Provider != "shm" || o.UID != int64(os.Geteuid()) ||
			o.LocalAddr.String() != server.LocalAddr().String() || o.RemoteAddr.String() != client.LocalAddr().String() {
			t.Errorf("%+v of a connection %v to %v", o, client.LocalAddr(), server.LocalAddr())
		}
	}
}

// With Require, a Dial that the condition refuses fails at once, with that reason.
func TestRefusedDialWithRequire(t *testing.T) {
	onlyShm(t)
	l := mustListen(t, &ListenConfig{Condition: func(MoveProposal) error { return errStranger }}, "tcp", "127.0.0.1:0")
	accepted, over := make(chan error, 1), make(chan struct{})
	go func() {
		c, err := l.Accept()
		if err == nil {
			<-over
			c.Close()
		}
		accepted <- err
	}()
	began := time.Now()
	c, err := (&Dialer{Policy: Require}).Dial("tcp", l.Addr().String())
	close(over)
	if err == nil {
		c.Close()
	}
	if !errors.Is(err, syscall.ECONNREFUSED) || reasonOf(err) != ReasonRefused {
		t.Errorf("%v", err)
	}
	if d := time.Since(began); d > requireTimeout/2 {
		t.Errorf("after %v", d)
	}
	if err := <-accepted; err != nil {
		t.Error(err)
	}
}

// A refused connection is not proposed again, however much it is used, and the failures of other
// providers do not replace the reason. A refusal that does not come from the other end does not count.
func TestRefusedConnectionIsNotOfferedAgain(t *testing.T) {
	for name, tt := range map[string]struct {
		impostor error
		why      Reason
		again    bool
	}{
		"refused":        {nil, ReasonRefused, false},
		"by an impostor": {&Unavailable{Reason: ReasonOwner, Err: hello.ErrImpostor}, ReasonOwner, true},
	} {
		t.Run(name, func(t *testing.T) {
			broken, f := &fake{called: "broken"}, &fake{impostor: tt.impostor}
			broken.fail = func(context.Context) error { return &Unavailable{Reason: ReasonNotServed} }
			if useProviders(t, broken, f); tt.again {
				useProviders(t, f) // its error has to become the reason
			}
			l := mustListen(t, &ListenConfig{Condition: func(MoveProposal) error { return errStranger }}, "tcp", "127.0.0.1:0")
			dial := func() (client, server net.Conn) {
				client = mustDial(t, unhurried(), l.Addr().String())
				server = mustAccept(t, l)
				sendZeros(t, client, server, moving.FirstUse)
				wantTried(t, client, tt.why)
				return client, server
			}
			client, server := dial()
			tries := f.tried()
			sendZeros(t, client, server, 2*moving.MoreUse*moving.FirstUse)
			if tt.again {
				waitFor(t, "it is proposed again", func() bool { return f.tried() > tries })
				return
			}
			dial() // by then the first connection would have been proposed again, too
			if n := f.tried(); n != tries+1 {
				t.Errorf("%d proposals of two connections", n)
			}
		})
	}
}

// sendZeros sends bytes from one end to the other.
func sendZeros(t *testing.T, from, to net.Conn, bytes int) {
	t.Helper()
	wrote := make(chan error, 1)
	go func() {
		_, err := from.Write(make([]byte, bytes))
		wrote <- err
	}()
	if _, err := io.ReadFull(to, make([]byte, bytes)); err != nil {
		t.Fatal(err)
	}
	if err := <-wrote; err != nil {
		t.Fatal(err)
	}
}

// A condition that blocks delays the move of its own connection, which then fails, and no other
// connection's move.
func TestConditionThatBlocks(t *testing.T) {
	onlyShm(t)
	release, entered := make(chan struct{}), make(chan struct{}, 1)
	t.Cleanup(func() { close(release) })
	var called atomic.Bool
	l := mustListen(t, &ListenConfig{Condition: func(MoveProposal) error {
		if !called.Swap(true) {
			entered <- struct{}{}
			<-release
		}
		return nil
	}}, "tcp", "127.0.0.1:0")
	stuck := mustDial(t, &Dialer{Options: sanconn.Options{MoveAtOnce: true, AttemptTimeout: 2 * moving.DecideTimeout}}, l.Addr().String())
	server := mustAccept(t, l)
	// The attempts are short, and the first may end before the condition is called.
	useUntil(t, stuck, func() { send(t, stuck, server, "a use") }, "it is asked", func() bool { return len(entered) > 0 })
	send(t, stuck, server, "question")
	send(t, server, stuck, "answer")
	wantStays(t, stuck, ReasonTimeout)
	other := mustDial(t, atOnce(), l.Addr().String())
	mustAccept(t, l)
	wantMoved(t, other, "shm")
}

// blocking is a condition that waits until the test releases it, and then returns err. It counts its
// calls.
type blocking struct {
	calls atomic.Int32
	let   chan struct{}
	err   error
}

func (b *blocking) decide(MoveProposal) error {
	b.calls.Add(1)
	<-b.let
	return b.err
}

// Calls that end a stream or take the descriptor wait for a condition that blocks for at most half a
// second.
func TestConditionThatBlocksHoldsUpNothingElse(t *testing.T) {
	onlyShm(t)
	for name, use := range map[string]func(t *testing.T, client, server *sanconn.Conn) error{
		"CloseWrite": func(t *testing.T, client, server *sanconn.Conn) error {
			client.Write([]byte("all"))
			if err := client.CloseWrite(); err != nil {
				return err
			}
			return readsAll(server)
		},
		"end": func(t *testing.T, client, server *sanconn.Conn) error {
			server.Write([]byte("all"))
			if err := server.CloseWrite(); err != nil {
				return err
			}
			return readsAll(client)
		},
		"Control": func(t *testing.T, client, server *sanconn.Conn) error {
			raw, err := client.SyscallConn()
			if err != nil {
				return err
			}
			return raw.Control(func(uintptr) {})
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := blocking{let: make(chan struct{})}
			t.Cleanup(func() { close(b.let) })
			l := mustListen(t, &ListenConfig{Condition: b.decide}, "tcp", "127.0.0.1:0")
			client := mustDial(t, atOnce(), l.Addr().String()).(*sanconn.Conn)
			server := mustAccept(t, l).(*sanconn.Conn)
			waitFor(t, "it is asked", func() bool { return b.calls.Load() > 0 })
			if err := use(t, client, server); err != nil {
				t.Error(err)
			}
			if n := b.calls.Load(); n != 1 {
				t.Errorf("%d calls", n)
			}
		})
	}
}

// readsAll reads "all" and the end of the stream. It has to do so before the proposal that waits for the
// condition is too old.
func readsAll(c net.Conn) error {
	c.SetReadDeadline(time.Now().Add(moving.ProposalTimeout / 2))
	if b, err := io.ReadAll(c); string(b) != "all" || err != nil {
		return fmt.Errorf("read %q, %v", b, err)
	}
	return nil
}

// If a condition decides after its proposal has been given up, its result is the answer to the next
// proposal.
func TestConditionThatDecidesLate(t *testing.T) {
	onlyShm(t)
	for _, refusal := range []error{nil, errStranger} {
		b := blocking{let: make(chan struct{}), err: refusal}
		l := mustListen(t, &ListenConfig{Condition: b.decide}, "tcp", "127.0.0.1:0")
		client := mustDial(t, &Dialer{Options: sanconn.Options{AttemptTimeout: 2 * moving.DecideTimeout}}, l.Addr().String()).(*sanconn.Conn)
		server := mustAccept(t, l).(*sanconn.Conn)
		use := func() { send(t, client, server, "a use") }
		useUntil(t, client, use, "it is asked", func() bool { return b.calls.Load() > 0 })
		wantTried(t, client, ReasonTimeout)
		waitFor(t, "a proposal is answered", func() bool { // then nobody waits for the condition any more
			return strings.Contains(client.Debug(), "state   TCP")
		})
		close(b.let)
		if refusal == nil {
			wantMovedByUse(t, client, server, "shm")
			wantMoved(t, server, "shm")
		} else {
			wantStaysByUse(t, client, server, ReasonRefused)
			wantStays(t, server, ReasonRefused)
		}
		if n := b.calls.Load(); n != 1 {
			t.Errorf("%d calls", n)
		}
	}
}

// The condition is not called for a connection that its own end keeps on TCP.
func TestConditionIsNotAskedForNothing(t *testing.T) {
	onlyShm(t)
	var seen conditions
	l := mustListen(t, &ListenConfig{Condition: func(o MoveProposal) error { seen.note(o); return nil }}, "tcp", "127.0.0.1:0")
	client := mustDial(t, new(Dialer), l.Addr().String())
	server := mustAccept(t, l)
	if err := server.(*sanconn.Conn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	wantStaysByUse(t, client, server, ReasonStays)
	wantStays(t, server, ReasonStays)
	if proposals := seen.list(); len(proposals) > 0 {
		t.Errorf("%+v", proposals)
	}
}

// In whatever way its connection comes to move, a dialer waits for a condition longer than a proposal
// usually takes, and tries no other provider.
func TestConditionThatTakesItsTime(t *testing.T) {
	first, second := &fake{called: "first"}, &fake{called: "second"}
	useProviders(t, first, second)
	for name, d := range map[string]*Dialer{"Require": {Policy: Require}, "at once": atOnce(), "used": unhurried()} {
		t.Run(name, func(t *testing.T) {
			var seen conditions
			var asked atomic.Bool
			again := make(chan struct{})
			isOffered := sync.OnceFunc(func() { close(again) })
			first.fail = func(context.Context) error {
				if asked.Load() {
					isOffered()
				}
				return nil
			}
			l := mustListen(t, &ListenConfig{Condition: func(o MoveProposal) error {
				seen.note(o)
				asked.Store(true)
				select {
				case <-again: // while the condition has not decided
				case <-t.Context().Done():
				}
				return nil
			}}, "tcp", "127.0.0.1:0")
			servers := make(chan net.Conn, 1)
			go func() { servers <- mustAccept(t, l) }()
			client := mustDial(t, d, l.Addr().String())
			server := <-servers
			if name == "used" {
				newconn.HandleOf(client).CallUse(0)
				send(t, client, server, "a use")
			}
			wantMoved(t, client, "first")
			wantMoved(t, server, "first")
			if n := len(seen.list()); n != 1 {
				t.Errorf("%d calls", n)
			}
		})
	}
	if n := second.tried(); n > 0 {
		t.Errorf("the second provider was tried %d times", n)
	}
}
