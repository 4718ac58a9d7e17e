package sanconn_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/connpair"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
	"golang.org/x/net/nettest"
)

const patience = 30 * time.Second

// onTCP takes the place of limits for a connection that stays on TCP, and moving for one that moves,
// over a ring, as soon as it is used.
var (
	onTCP  = session.Limits{Provider: "tcp"}
	moving = session.Limits{Provider: "moving"}
)

// carriers are those of the connections in these tests.
var carriers = []struct {
	name   string
	limits session.Limits
}{
	{name: "TCP", limits: onTCP},
	{name: "moving", limits: moving},
	{name: "ring"},
	{name: "window", limits: session.Limits{Window: 32}},
	{name: "window, RDMA read", limits: session.Limits{Window: 32, CanRead: true, CanWrite: true, MaxExpose: 16 << 20, Threshold: 8 << 10}},
	{name: "window, RDMA write", limits: session.Limits{Window: 32, CanWrite: true, MaxExpose: 16 << 20, Threshold: 8 << 10}},
	{name: "window, send buffer", limits: session.Limits{Window: 32, CanWrite: true, MaxExpose: 16 << 20, Inbox: 8 << 10}},
}

// pipe makes both ends of a connection that has moved to a session with these limits. closed is called
// when the first end is closed.
func pipe(t testing.TB, limits session.Limits, closed func()) (a, b *sanconn.Conn) {
	t.Helper()
	config := newconn.Config{Life: ending{closed, false}}
	switch limits.Provider {
	case onTCP.Provider:
	case moving.Provider:
		var moves sync.WaitGroup
		t.Cleanup(moves.Wait)
		config.Threshold = 1
		config.Life = using{ending{closed, false}, func() {
			moves.Go(func() { // takes the place of package san's movers
				ea, eb := twin.Pair(twin.Config{})
				movePair(context.Background(), a, b, ea, eb, sessions{}) // fails if an end is closed before
			})
		}}
	default:
		return pipeOn(t, limits, closed)
	}
	a, b, err := newPair(config, newconn.Config{})
	if err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, a, b)
	return a, b
}

// pipeOn is pipe for a connection that has moved.
func pipeOn(t testing.TB, limits session.Limits, closed func()) (a, b *sanconn.Conn) {
	t.Helper()
	ea, eb := twin.Pair(twin.Config{Limits: limits})
	return pipeOver(t, ea, eb, closed)
}

// pipeOver is pipe for a connection that has moved to a session over these endpoints.
func pipeOver(t testing.TB, ea, eb *twin.Endpoint, closed func()) (a, b *sanconn.Conn) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	a, b, err := movedPair(ctx, ea, eb, sessions{}, newconn.Config{Life: ending{closed, false}})
	if err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, a, b)
	return a, b
}

func closeAtEnd(t testing.TB, conns ...*sanconn.Conn) {
	t.Cleanup(func() {
		for _, c := range conns {
			c.Close()
		}
	})
}

func TestConformance(t *testing.T) {
	for _, e := range carriers {
		t.Run(e.name, func(t *testing.T) {
			nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
				a, b := pipe(t, e.limits, nil)
				return a, b, func() {
					a.Close()
					b.Close()
				}, nil
			})
		})
	}
}

func TestOptionalInterfacesOfTCP(t *testing.T) {
	a, _ := pipe(t, session.Limits{}, nil)
	var c net.Conn = a
	for name, ok := range map[string]bool{
		"CloseRead":  has[interface{ CloseRead() error }](c),
		"CloseWrite": has[interface{ CloseWrite() error }](c),
		"ReadFrom":   has[io.ReaderFrom](c),
		"WriteTo":    has[io.WriterTo](c),
		"linger":     has[interface{ SetLinger(int) error }](c),
		"nodelay":    has[interface{ SetNoDelay(bool) error }](c),
		"keepalive": has[interface {
			SetKeepAlive(bool) error
			SetKeepAlivePeriod(time.Duration) error
			SetKeepAliveConfig(net.KeepAliveConfig) error
		}](c),
		"buffers": has[interface {
			SetReadBuffer(int) error
			SetWriteBuffer(int) error
		}](c),
		"SyscallConn": has[syscall.Conn](c),
		"File":        has[interface{ File() (*os.File, error) }](c),
	} {
		if !ok {
			t.Errorf("%s is missing", name)
		}
	}
}

func has[I any](c net.Conn) bool { _, ok := c.(I); return ok }

// No setting returns an error.
func TestSettings(t *testing.T) {
	a, b := pipe(t, session.Limits{Window: 32}, nil)
	for name, err := range map[string]error{
		"nodelay":         a.SetNoDelay(true),
		"delay":           a.SetNoDelay(false),
		"linger":          a.SetLinger(3),
		"no linger":       a.SetLinger(-1),
		"read buffer":     a.SetReadBuffer(1),
		"write buffer":    a.SetWriteBuffer(1 << 30),
		"keepalive":       a.SetKeepAlive(true),
		"period":          a.SetKeepAlivePeriod(time.Second),
		"default period":  a.SetKeepAlivePeriod(0),
		"negative period": a.SetKeepAlivePeriod(-1),
		"config":          a.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: time.Minute, Interval: 1, Count: 1}),
		"no keepalive":    a.SetKeepAlive(false),
	} {
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := a.Write([]byte("still works")); err != nil {
		t.Error(err)
	}
	if n, err := b.Read(make([]byte, 100)); n == 0 || err != nil {
		t.Error(n, err)
	}
}

// A silent peer gets Pings at the interval of SetKeepAliveConfig: with the default of 15 s the test
// would take a minute.
func TestKeepAliveConfig(t *testing.T) {
	ea, eb := twin.Pair(twin.Config{Limits: session.Limits{Window: 32}})
	a, _ := pipeOver(t, ea, eb, nil)
	ea.Cut()
	if err := a.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: 10 * time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	a.SetDeadline(time.Now().Add(patience))
	if _, err := a.Read(make([]byte, 1)); !errors.Is(err, syscall.ETIMEDOUT) {
		t.Errorf("Read: %v, want %v", err, syscall.ETIMEDOUT)
	}
}

// Only SetLinger(0) makes Close a reset.
func TestLinger(t *testing.T) {
	for sec, want := range map[int]error{-1: nil, 0: syscall.ECONNRESET, 1: nil} {
		a, b := pipe(t, session.Limits{}, nil)
		if err := a.SetLinger(sec); err != nil {
			t.Fatal(err)
		}
		a.Write([]byte("sent"))
		a.Close()
		b.SetDeadline(time.Now().Add(patience))
		if got, err := io.ReadAll(b); !errors.Is(err, want) || want == nil && string(got) != "sent" {
			t.Errorf("SetLinger(%d): read %q, %v, want %v", sec, got, err, want)
		}
	}
}

// shortWriter writes only half, and returns no error.
type shortWriter struct{}

func (shortWriter) Write(p []byte) (int, error) { return len(p) / 2, nil }

func TestCopyToAWriterThatIsShort(t *testing.T) {
	a, b := pipe(t, session.Limits{}, nil)
	a.Write([]byte("four"))
	a.Close()
	if n, err := io.Copy(shortWriter{}, b); n != 2 || !errors.Is(err, io.ErrShortWrite) {
		t.Errorf("copied %d, %v, want 2, %v", n, err, io.ErrShortWrite)
	}
}

func TestWriteBuffersConsumesWhatItWrote(t *testing.T) {
	for _, e := range carriers {
		t.Run(e.name, func(t *testing.T) {
			a, b := pipe(t, e.limits, nil)
			parts := [][]byte{[]byte("HTTP/1.1 200 OK\r\n"), nil, []byte("\r\n"), bytes.Repeat([]byte("body"), 50_000), {}, []byte("end")}
			want := bytes.Join(parts, nil)
			v := net.Buffers(parts)
			var wg sync.WaitGroup
			wg.Go(func() {
				if n, err := a.WriteBuffers(&v); n != int64(len(want)) || err != nil {
					t.Errorf("wrote %d of %d: %v", n, len(want), err)
				}
				a.Close()
			})
			got, err := io.ReadAll(b)
			wg.Wait()
			if err != nil || !bytes.Equal(got, want) {
				t.Errorf("%d of %d bytes arrived: %v", len(got), len(want), err)
			}
			if len(v) != 0 {
				t.Errorf("%d slices are left", len(v))
			}
		})
	}
}

// WriteBuffers of slices without bytes returns at once.
func TestWriteBuffersOfNothing(t *testing.T) {
	for _, e := range carriers {
		t.Run(e.name, func(t *testing.T) {
			a, _ := pipe(t, e.limits, nil)
			a.SetWriteDeadline(time.Now().Add(patience))
			v := net.Buffers{nil, {}}
			if n, err := a.WriteBuffers(&v); n != 0 || err != nil || len(v) != 0 {
				t.Errorf("%d, %v; %d slices are left", n, err, len(v))
			}
		})
	}
}

func TestWriteBuffersLeavesTheRest(t *testing.T) {
	a, b := pipe(t, session.Limits{Window: 32}, nil)
	whole := make([]byte, 64<<20)
	for i := range whole {
		whole[i] = byte(i / 1000)
	}
	v := net.Buffers{whole[:100], whole[100 : 32<<20], whole[32<<20:]}
	a.SetWriteDeadline(time.Now().Add(20 * time.Millisecond))
	n, err := a.WriteBuffers(&v)
	if !errors.Is(err, os.ErrDeadlineExceeded) || n >= int64(len(whole)) {
		t.Fatalf("wrote %d: %v", n, err)
	}
	if rest := bytes.Join(v, nil); !bytes.Equal(rest, whole[n:]) {
		t.Errorf("wrote %d of %d bytes and left %d", n, len(whole), len(rest))
	}
	got := make([]byte, n)
	if _, err := io.ReadFull(b, got); err != nil || !bytes.Equal(got, whole[:n]) {
		t.Errorf("%v", err)
	}
}

func TestUrgentDataComesBesideTheStream(t *testing.T) {
	a, b := pipe(t, session.Limits{}, nil)
	if _, err := a.Write([]byte("stream")); err != nil {
		t.Fatal(err)
	}
	if n, err := a.WriteUrgent([]byte("!")); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	select {
	case <-b.Urgent():
	case <-time.After(patience):
		t.Fatal("no signal")
	}
	p := make([]byte, sanconn.MaxUrgent)
	if n, err := b.ReadUrgent(p); string(p[:n]) != "!" || err != nil {
		t.Errorf("read %q, %v", p[:n], err)
	}
	if _, err := b.ReadUrgent(p); err != sanconn.ErrNoUrgent {
		t.Errorf("a second time: %v", err)
	}
	if n, err := b.Read(p); string(p[:n]) != "stream" || err != nil {
		t.Errorf("the stream is %q, %v", p[:n], err)
	}
	b.Close()
	if _, err := b.ReadUrgent(p); !errors.Is(err, net.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

func TestOnCloseIsCalledOnce(t *testing.T) {
	calls := 0
	a, _ := pipe(t, session.Limits{}, func() { calls++ })
	a.Close()
	a.Close()
	if calls != 1 {
		t.Errorf("called %d times", calls)
	}
}

// A closed connection returns the same errors as net, even from calls that would do nothing.
func TestCallsOfAClosedConn(t *testing.T) {
	a, _ := pipe(t, session.Limits{}, nil)
	a.SetWriteDeadline(time.Now().Add(-time.Second))
	if _, err := a.Write(nil); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Write of nothing behind its deadline: %v", err)
	}
	late, _ := pipe(t, session.Limits{}, nil)
	a.SetWriteDeadline(time.Time{})
	onTCP, _, _ := onTCPPair(t, newconn.Config{})
	lateOnTCP, _, _ := onTCPPair(t, newconn.Config{})
	late.SetDeadline(time.Unix(1, 0)) // has no effect after Close
	lateOnTCP.SetDeadline(time.Unix(1, 0))
	for name, c := range map[string]*sanconn.Conn{"session": a, "TCP": onTCP, "session, late": late, "TCP, late": lateOnTCP} {
		t.Run(name, func(t *testing.T) {
			c.Close()
			wantClosed(t, c)
		})
	}
}

func wantClosed(t *testing.T, a *sanconn.Conn) {
	t.Helper()
	for _, tt := range []struct {
		what string
		call func() error
		op   string
		at   net.Addr
	}{
		{"Read", func() error { _, err := a.Read(make([]byte, 1)); return err }, "read", a.RemoteAddr()},
		{"Read of nothing", func() error { _, err := a.Read(nil); return err }, "read", a.RemoteAddr()},
		{"Write", func() error { _, err := a.Write(make([]byte, 1)); return err }, "write", a.RemoteAddr()},
		{"Write of nothing", func() error { _, err := a.Write(nil); return err }, "write", a.RemoteAddr()},
		{"WriteBuffers", func() error { _, err := a.WriteBuffers(&net.Buffers{{1}, {2}}); return err }, "writev", a.RemoteAddr()},
		{"Reserve", func() error { _, err := a.Reserve(1); return err }, "write", a.RemoteAddr()},
		{"Peek", func() error { _, err := a.Peek(); return err }, "read", a.RemoteAddr()},
		{"WriteUrgent", func() error { _, err := a.WriteUrgent(make([]byte, 1)); return err }, "write", a.RemoteAddr()},
		{"ReadUrgent", func() error { _, err := a.ReadUrgent(make([]byte, 1)); return err }, "read", a.RemoteAddr()},
		{"Close", a.Close, "close", a.RemoteAddr()},
		{"CloseRead", a.CloseRead, "close", a.RemoteAddr()},
		{"CloseWrite", a.CloseWrite, "close", a.RemoteAddr()},
		{"SetDeadline", func() error { return a.SetDeadline(time.Time{}) }, "set", a.LocalAddr()},
		{"SetReadDeadline", func() error { return a.SetReadDeadline(time.Time{}) }, "set", a.LocalAddr()},
		{"SetWriteDeadline", func() error { return a.SetWriteDeadline(time.Time{}) }, "set", a.LocalAddr()},
	} {
		err := tt.call()
		var op *net.OpError
		if !errors.Is(err, net.ErrClosed) || !errors.As(err, &op) || op.Op != tt.op || op.Addr != tt.at {
			t.Errorf("%s: %v", tt.what, err)
		}
	}
}

// A closed connection refuses settings, even while its TCP stays open until the session has ended.
func TestSettingsBehindClose(t *testing.T) {
	ea, eb := twin.Pair(twin.Config{Limits: session.Limits{Window: 32}})
	a, _ := pipeOver(t, ea, eb, nil)
	ea.Cut()
	a.Write([]byte("never arrives"))
	a.Close()
	for what, err := range map[string]error{
		"SetNoDelay": a.SetNoDelay(true), "SetLinger": a.SetLinger(1), "SetReadBuffer": a.SetReadBuffer(1 << 16),
		"SetWriteBuffer": a.SetWriteBuffer(1 << 16), "SetKeepAlive": a.SetKeepAlive(true),
		"SetKeepAlivePeriod": a.SetKeepAlivePeriod(time.Minute), "SetKeepAliveConfig": a.SetKeepAliveConfig(net.KeepAliveConfig{}),
	} {
		var op *net.OpError
		if !errors.Is(err, net.ErrClosed) || !errors.As(err, &op) || op.Op != "set" {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// A connection that was closed and then forgotten is not closed again.
func TestClosedConnIsForgotten(t *testing.T) {
	var calls [2]atomic.Int32
	for i := range calls { // the second is not closed by the program: once its end was found, the first would have been found too
		a, b := forgettable(t, func() { calls[i].Add(1) })
		defer b.Close()
		if i == 0 {
			a.Close()
		}
	}
	for range 3 {
		testenv.Eventually(t, patience, func() error {
			runtime.GC()
			if calls[1].Load() == 0 {
				return errors.New("nothing was found")
			}
			return nil
		})
		runtime.GC()
	}
	if n := calls[0].Load(); n != 1 {
		t.Errorf("called %d times", n)
	}
}

// If the program forgets a connection on TCP, at either end, Closed is called once as well: before the
// connection has moved, after a refused move, and after the way back.
func TestConnForgottenOnTCPIsClosed(t *testing.T) {
	for name, use := range map[string]func(t *testing.T, a, b *sanconn.Conn) error{
		"unmoved": func(t *testing.T, a, b *sanconn.Conn) error { return nil },
		"refused": func(t *testing.T, a, b *sanconn.Conn) error {
			if err := b.CloseWrite(); err != nil {
				return err
			}
			ea, eb := twin.Pair(twin.Config{Limits: session.Limits{Window: 32}})
			if err := movePair(t.Context(), a, b, ea, eb, sessions{}); !errors.Is(err, connpair.ErrRefused) {
				return fmt.Errorf("it moves: %v", err)
			}
			return nil
		},
		"back": func(t *testing.T, a, b *sanconn.Conn) error {
			ea, eb := twin.Pair(twin.Config{Limits: session.Limits{Window: 32}})
			if err := movePair(t.Context(), a, b, ea, eb, sessions{}); err != nil {
				return err
			}
			for _, c := range []*sanconn.Conn{a, b} {
				if err := newconn.HandleOf(c).Moved(t.Context()); err != nil {
					return err
				}
			}
			return sanconn.LeaveSAN(a)
		},
	} {
		t.Run(name, func(t *testing.T) {
			var closed [2]atomic.Int32 // the dialer's, the acceptor's
			var forgotten atomic.Int32
			func() {
				config := func(i int) newconn.Config { return newconn.Config{Life: ending{func() { closed[i].Add(1) }, true}} }
				a, b, err := newPair(config(0), config(1))
				if err == nil {
					err = use(t, a, b)
				}
				if err != nil {
					t.Fatal(err)
				}
				for _, c := range []*sanconn.Conn{a, b} {
					runtime.AddCleanup(c, func(n *atomic.Int32) { n.Add(1) }, &forgotten)
				}
			}()
			testenv.Eventually(t, patience, func() error {
				runtime.GC()
				if a, b := closed[0].Load(), closed[1].Load(); a == 0 || b == 0 || forgotten.Load() < 2 {
					return fmt.Errorf("closed %d and %d times; %d are forgotten", a, b, forgotten.Load())
				}
				return nil
			})
			runtime.GC()
			if a, b := closed[0].Load(), closed[1].Load(); a != 1 || b != 1 {
				t.Errorf("closed %d and %d times", a, b)
			}
		})
	}
}

// forgettable is pipeOn without the cleanup, which would keep both ends reachable.
func forgettable(t *testing.T, closed func()) (a, b *sanconn.Conn) {
	t.Helper()
	ea, eb := twin.Pair(twin.Config{})
	a, b, err := movedPair(t.Context(), ea, eb, sessions{}, newconn.Config{Life: ending{closed, false}})
	if err != nil {
		t.Fatal(err)
	}
	return a, b
}

// A connection that the program has forgotten is closed, as in net, at either end, even if it has a
// deadline.
func TestForgottenConnIsClosed(t *testing.T) {
	for _, acceptor := range []bool{false, true} {
		for _, left := range []time.Duration{time.Millisecond, time.Hour} {
			var kept *sanconn.Conn
			func() {
				forgotten, other := forgettable(t, nil)
				if acceptor {
					forgotten, other = other, forgotten
				}
				kept = other
				forgotten.SetDeadline(time.Now().Add(time.Millisecond))
				forgotten.Read(make([]byte, 1))
				forgotten.SetDeadline(time.Now().Add(left))
			}()
			defer kept.Close()
			testenv.Eventually(t, patience, func() error {
				runtime.GC()
				kept.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
				if _, err := kept.Read(make([]byte, 1)); err != io.EOF {
					return fmt.Errorf("the peer reads %v; a deadline in %v", err, left)
				}
				return nil
			})
		}
	}
}

func TestSetDeadlineDoesNotAllocate(t *testing.T) {
	a, _ := pipe(t, session.Limits{}, nil)
	a.SetDeadline(time.Now().Add(time.Hour))
	if n := testing.AllocsPerRun(1000, func() { a.SetDeadline(time.Now().Add(time.Hour)) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
	a.SetDeadline(time.Time{})
}

func BenchmarkSetReadDeadline(b *testing.B) {
	c, _ := pipe(b, session.Limits{}, nil)
	b.ReportAllocs()
	for b.Loop() {
		c.SetReadDeadline(time.Now().Add(time.Hour))
	}
}
