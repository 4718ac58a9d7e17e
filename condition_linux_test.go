package san

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/sanconn"
)

// conditions are the offers that a listener's condition was called for.
type conditions struct {
	mu     sync.Mutex // guards what follows
	offers []MoveOffer
}

func (c *conditions) note(o MoveOffer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.offers = append(c.offers, o)
}

func (c *conditions) list() []MoveOffer {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]MoveOffer(nil), c.offers...)
}

var errStranger = errors.New("only who is known")

// A condition sees who offers. What it lets pass moves, and what it refuses stays on TCP for
// good, with the reason at both ends.
func TestConditionSeesWhoOffersAndDecides(t *testing.T) {
	onlyShm(t)
	for _, refusal := range []error{nil, errStranger} {
		var seen conditions
		l := mustListen(t, &ListenConfig{Condition: func(o MoveOffer) error { seen.note(o); return refusal }}, "tcp", "127.0.0.1:0")
		client := mustDial(t, &Dialer{Options: sanconn.Options{MoveAtOnce: true}}, l.Addr().String())
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
		offers := seen.list()
		if len(offers) != 1 {
			t.Fatalf("%d calls", len(offers))
		}
		o := offers[0]
		if o.Provider != "shm" || o.UID != int64(os.Geteuid()) ||
			o.LocalAddr.String() != server.LocalAddr().String() || o.RemoteAddr.String() != client.LocalAddr().String() {
			t.Errorf("%+v of a connection %v to %v", o, client.LocalAddr(), server.LocalAddr())
		}
	}
}

// Where the dialer may not stay on TCP it finds that it was refused, at once.
func TestRefusedDialWithRequire(t *testing.T) {
	onlyShm(t)
	l := mustListen(t, &ListenConfig{Condition: func(MoveOffer) error { return errStranger }}, "tcp", "127.0.0.1:0")
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

// What was refused is not offered again, however much the connection is used, nor are other
// providers' failures the reason. A refusal that is not the other end's does not count.
func TestRefusedConnectionIsNotOfferedAgain(t *testing.T) {
	for name, tt := range map[string]struct {
		impostor error
		why      Reason
		again    bool
	}{
		"refused":        {nil, ReasonRefused, false},
		"by an impostor": {&Unavailable{Reason: ReasonOwner, Err: errImpostor}, ReasonOwner, true},
	} {
		t.Run(name, func(t *testing.T) {
			broken, f := &fake{called: "broken"}, &fake{impostor: tt.impostor}
			broken.fail = func(context.Context) error { return &Unavailable{Reason: ReasonNotServed} }
			if useProviders(t, broken, f); tt.again {
				useProviders(t, f) // whose error is to be the reason
			}
			l := mustListen(t, &ListenConfig{Condition: func(MoveOffer) error { return errStranger }}, "tcp", "127.0.0.1:0")
			dial := func() (client, server net.Conn) {
				client = mustDial(t, new(Dialer), l.Addr().String())
				server = mustAccept(t, l)
				sendZeros(t, client, server, firstUse)
				wantStays(t, client, tt.why)
				return client, server
			}
			client, server := dial()
			tries := f.tried()
			sendZeros(t, client, server, 2*moreUse*firstUse)
			if tt.again {
				waitFor(t, "it is offered again", func() bool { return f.tried() > tries })
				return
			}
			dial() // by then the first would have been offered, too
			if n := f.tried(); n != tries+1 {
				t.Errorf("%d offers of two connections", n)
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

// A condition that blocks holds up its own connection's move, which fails, and no other's.
func TestConditionThatBlocks(t *testing.T) {
	onlyShm(t)
	release, entered := make(chan struct{}), make(chan struct{}, 1)
	t.Cleanup(func() { close(release) })
	var called atomic.Bool
	l := mustListen(t, &ListenConfig{Condition: func(MoveOffer) error {
		if !called.Swap(true) {
			entered <- struct{}{}
			<-release
		}
		return nil
	}}, "tcp", "127.0.0.1:0")
	stuck := mustDial(t, &Dialer{Options: sanconn.Options{MoveAtOnce: true, AttemptTimeout: 50 * time.Millisecond}}, l.Addr().String())
	server := mustAccept(t, l)
	<-entered
	send(t, stuck, server, "question")
	send(t, server, stuck, "answer")
	wantStays(t, stuck, ReasonTimeout)
	other := mustDial(t, &Dialer{Options: sanconn.Options{MoveAtOnce: true}}, l.Addr().String())
	mustAccept(t, l)
	wantMoved(t, other, "shm")
}
