package sanproxy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sanconn/san/internal/testenv"
)

// With MaxConns clients connected, a further one is reset; after one has left there is room again.
func TestMaxConns(t *testing.T) {
	c := routes()[0].chain(t, func(first, _ *Proxy) { first.MaxConns = 2 })
	a, _ := c.pair(t)
	c.pair(t)
	c.wantTurnedAway(t)
	if s := c.first.Stats(); s.Refused != 1 || s.Accepted != 3 || s.Open != 2 {
		t.Errorf("%+v", s)
	}
	a.(*net.TCPConn).SetLinger(0)
	a.Close()
	wantStats(t, c.first, func(s Stats) bool { return s.Open == 1 })
	c.pair(t)
}

// A Dial that does not return in time ends its client's connection, and affects no other.
func TestDialTimeout(t *testing.T) {
	p := &Proxy{DialTimeout: 10 * time.Millisecond, Dial: func(ctx context.Context, _ net.Conn) (net.Conn, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}}
	r := route{outside: "tcp"}
	l := r.listen(t)
	serve(t, p, l)
	(&chain{route: r, clients: l.Addr().String()}).wantTurnedAway(t)
	wantStats(t, p, func(s Stats) bool { return s.Failed == 1 && s.Open == 0 })
}

// valueListener is a listener of a type that is not comparable, and so cannot be the key of a map.
type valueListener struct {
	net.Listener
	_ []string
}

// A listener may be of any type, also one that is not comparable.
func TestServeAListenerThatIsAValue(t *testing.T) {
	p := &Proxy{Dial: func(context.Context, net.Conn) (net.Conn, error) { return nil, net.ErrClosed }}
	l := route{outside: "tcp"}.listen(t)
	done := serve(t, p, valueListener{Listener: l})
	testenv.Eventually(t, time.Minute, func() error {
		p.Stats() // may be called before Serve
		p.mu.Lock()
		defer p.mu.Unlock()
		if len(p.listeners) == 0 {
			return errors.New("it does not serve")
		}
		return nil
	})
	p.Close()
	<-done
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("it is not closed: %v", err)
	}
}

// lines is a log that may be written concurrently.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// When a server goes down, that is logged once; when it is back, that is logged once, too.
func TestServerComesBack(t *testing.T) {
	var report lines
	r := routes()[0]
	var mu sync.Mutex
	down := errors.New("out for lunch")
	c := r.chain(t, func(first, second *Proxy) {
		second.ErrorLog = log.New(&report, "", 0)
		dial := second.Dial
		second.Dial = func(ctx context.Context, client net.Conn) (net.Conn, error) {
			mu.Lock()
			err := down
			mu.Unlock()
			if err != nil {
				return nil, err
			}
			return dial(ctx, client)
		}
	})
	for range 3 {
		c.wantTurnedAway(t)
	}
	mu.Lock()
	down = nil
	mu.Unlock()
	c.pair(t)
	want := "cannot connect, clients are reset: out for lunch\nconnects again; clients that were reset: 3\n"
	testenv.Eventually(t, testTimeout, func() error { // the last line is written when the connection is made
		if got := report.String(); got != want {
			return fmt.Errorf("log:\n%swant:\n%s", got, want)
		}
		return nil
	})
}

// Shutdown waits for connections that end in time, and resets the others.
func TestShutdown(t *testing.T) {
	eachRoute(t, func(t *testing.T, r route) {
		c := r.chain(t)
		client, server := c.pair(t)
		ended := make(chan error, 1)
		go func() { ended <- c.first.Shutdown(context.Background()) }()
		<-c.refusing
		if conn, err := net.Dial(c.outside, c.clients); err == nil {
			conn.Close()
			t.Error("it still accepts")
		}
		mustWrite(t, client, "last words")
		client.CloseWrite()
		wantAll(t, server, "last words")
		select {
		case err := <-ended:
			t.Fatalf("Shutdown has not waited: %v", err)
		default:
		}
		server.CloseWrite()
		wantAll(t, client, "")
		if err := <-ended; err != nil {
			t.Errorf("Shutdown: %v", err)
		}
		if s := c.first.Stats(); s != (Stats{Accepted: s.Accepted, Refused: s.Refused, Finished: 1, BytesUp: 10}) {
			t.Errorf("%+v", s)
		}
	})
}

// If no connection is left, Shutdown returns nil, even if ctx has ended as well.
func TestShutdownWithoutConnections(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	for range 100 { // select chooses at random among ready channels
		if err := new(Proxy).Shutdown(ctx); err != nil {
			t.Fatal(err)
		}
	}
}

func TestShutdownUnderLoad(t *testing.T) {
	eachRoute(t, func(t *testing.T, r route) {
		if r.outside == "unix" {
			return // a unix socket has no reset
		}
		c := r.chain(t)
		const conns = 3
		var ends sync.WaitGroup
		for range conns {
			client, server := c.pair(t)
			ends.Go(func() { wantReset(t, client, flood(client)) })
			ends.Go(func() { wantReset(t, server, flood(server)) })
		}
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
		defer cancel()
		if err := c.second.Shutdown(ctx); err != context.DeadlineExceeded {
			t.Errorf("Shutdown: %v", err)
		}
		ends.Wait()
		ended := func(s Stats) bool { return s.Reset+s.Failed == conns && s.Open == 0 } // some Dials may have been about to return
		if s := c.second.Stats(); !ended(s) {
			t.Errorf("%+v", s)
		}
		wantStats(t, c.first, ended)
	})
}

// Close resets a client whose Dial has not returned, and ends ctx of that Dial.
func TestCloseDuringDial(t *testing.T) {
	dialing := make(chan struct{})
	p := &Proxy{Dial: func(ctx context.Context, _ net.Conn) (net.Conn, error) {
		close(dialing)
		<-ctx.Done()
		return nil, ctx.Err()
	}}
	l := route{outside: "tcp"}.listen(t)
	serve(t, p, l)
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	<-dialing
	p.Close()
	wantReset(t, prepared(t, c))
}

// If somebody else closes a listener, Serve returns the error. A listener that is passed to Serve after
// Close is closed.
func TestServeEnds(t *testing.T) {
	var p Proxy
	l := route{outside: "tcp"}.listen(t)
	done := make(chan error, 1)
	go func() { done <- p.Serve(l) }()
	l.Close()
	if err := <-done; !errors.Is(err, net.ErrClosed) {
		t.Errorf("Serve: %v", err)
	}
	p.Close()
	l = route{outside: "tcp"}.listen(t)
	if err := p.Serve(l); err != nil {
		t.Errorf("Serve after Close: %v", err)
	}
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("its listener: %v", err)
	}
}

// An Accept that fails is repeated; the failure is logged once, until Accept works again.
func TestAcceptFails(t *testing.T) {
	var report lines
	r := route{outside: "tcp"}
	p := &Proxy{ErrorLog: log.New(&report, "", 0), Dial: func(context.Context, net.Conn) (net.Conn, error) {
		return nil, errors.New("no server")
	}}
	l := &failingListener{Listener: r.listen(t)}
	serve(t, p, l)
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	wantReset(t, prepared(t, c))
	if got := report.String(); !strings.HasPrefix(got, "accept: too many open files") || strings.Count(got, "accept") != 1 {
		t.Errorf("log: %s", got)
	}
}

type failingListener struct {
	net.Listener
	failed int
}

func (l *failingListener) Accept() (net.Conn, error) {
	if l.failed < 2 {
		l.failed++
		return nil, errors.New("too many open files")
	}
	return l.Listener.Accept()
}
