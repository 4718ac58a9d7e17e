package session_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/session"
)

var le = binary.LittleEndian

// Kinds of endpoint on which the directed tests run.
var (
	ring   = twin.Config{Limits: session.Limits{MaxMessage: 4096}}
	byRead = twin.Config{Limits: session.Limits{
		Window: 32, MaxMessage: 4096, Threshold: 16 << 10, CanRead: true, MaxExpose: math.MaxInt,
	}}
	byBuffer = twin.Config{Limits: session.Limits{
		Window: 32, MaxMessage: 4096, Threshold: 16 << 10, Inbox: 8 << 10, CanWrite: true, MaxExpose: math.MaxInt,
	}}
	buffered = twin.Config{Limits: session.Limits{
		Window: 32, MaxMessage: 4096, Threshold: 64 << 10, Inbox: 8 << 10, CanRead: true, CanWrite: true, MaxExpose: math.MaxInt,
	}}
	messages = twin.Config{Limits: session.Limits{Window: 32, MaxMessage: 4096}}
)

// forms are the ways in which a large Write can go.
var forms = map[string]twin.Config{
	"by read": byRead, "buffered": buffered, "send buffer alone": byBuffer, "messages": messages, "ring": ring,
}

// inPieces makes large transfers go in RDMA operations of 10,000 bytes each.
func inPieces(cfg twin.Config) twin.Config {
	if !cfg.Limits.Ring() {
		cfg.Limits.MaxRDMA = 10_000
	}
	return cfg
}

// latency is that of the directed tests, one way.
const latency = 10 * time.Microsecond

// each runs a directed test once for each form, in virtual time.
func each(t *testing.T, f func(*testing.T, twin.Config)) {
	for name, cfg := range forms {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T) { f(t, cfg) })
		})
	}
}

// inBubble runs a directed test in virtual time.
func inBubble(t *testing.T, f func(*testing.T)) {
	t.Helper()
	bubble(t, fmt.Sprintf("go test ./session -run '^%s$'", t.Name()), f)
}

// bubble runs f in a bubble of its own. A failure's message names the command that repeats it.
func bubble(t *testing.T, replay string, f func(*testing.T)) {
	t.Helper()
	for !session.IdlePollerGone() {
		runtime.Gosched()
	}
	stuck := time.AfterFunc(realLimit, func() {
		fmt.Fprintf(os.Stderr, "no virtual time passes: %s\n%s\n", replay, stacks())
		os.Exit(2)
	})
	defer stuck.Stop()
	over := false
	defer func() {
		if !over || t.Failed() {
			fmt.Fprintf(os.Stderr, "replay: %s\n", replay)
		}
	}()
	synctest.Test(t, func(t *testing.T) {
		f(t)
		for !session.IdlePollerGone() {
			nap(time.Millisecond)
		}
	})
	over = true
}

func stacks() []byte {
	b := make([]byte, 1<<20)
	return b[:runtime.Stack(b, true)]
}

// nap lets a bubble's time pass, for goroutines other than the test's own. Nothing here sleeps in real
// time.
func nap(d time.Duration) { time.Sleep(d) }

// pass lets a bubble's time pass, and waits until everything that is due then has been done: no test
// depends on the speed of this machine. It panics outside of a bubble.
func pass(d time.Duration) {
	nap(d)
	synctest.Wait()
}

// pair makes two sessions that have negotiated. At the end of the test they are aborted, and must not
// have broken a rule of the contract.
func pair(t *testing.T, cfg twin.Config, scfg session.Config) (a, b *session.Session, ea, eb *twin.Endpoint) {
	t.Helper()
	return pairOn(t, cfg, scfg, func(e *twin.Endpoint) session.Endpoint { return e })
}

// pairOn is pair with b's endpoint wrapped by around.
func pairOn(t *testing.T, cfg twin.Config, scfg session.Config, around func(*twin.Endpoint) session.Endpoint) (a, b *session.Session, ea, eb *twin.Endpoint) {
	t.Helper()
	ea, eb = twins(t, cfg)
	scfg = withoutKeepAlive(scfg)
	a, b = session.New(ea, scfg), session.New(around(eb), scfg)
	t.Cleanup(func() {
		for _, s := range []*session.Session{a, b} {
			s.Abort()
			<-s.Closed()
		}
		for _, e := range []*twin.Endpoint{ea, eb} {
			if left := e.Left(); left.Allocated != 0 || !e.Retired() {
				t.Errorf("left behind: %+v, retired: %v", left, e.Retired())
			}
		}
		idle()
	})
	negotiate(t, a)
	negotiate(t, b)
	return a, b, ea, eb
}

// withoutKeepAlive is a config without keepalive, unless a test sets it. Keepalive polls now and then,
// and so would hide that nothing else does.
func withoutKeepAlive(scfg session.Config) session.Config {
	if scfg.KeepAlive == 0 {
		scfg.KeepAlive = -1
	}
	return scfg
}

// twins makes two endpoints. A violation of the contract fails the test.
func twins(t *testing.T, cfg twin.Config) (a, b *twin.Endpoint) {
	cfg.Violated = func(v twin.Violation) { t.Error(v) }
	cfg.MinLatency, cfg.MaxLatency = latency, latency
	return twin.Pair(cfg)
}

// idle waits until the idle poller has ended: time stands still in a bubble whose test function has
// returned.
func idle() {
	for !session.IdlePollerGone() {
		nap(time.Millisecond)
	}
}

func negotiate(t *testing.T, s *session.Session) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := s.Negotiate(ctx); err != nil {
		t.Fatalf("Negotiate: %v", err)
	}
}

// result is what a call that waits returns.
type result struct {
	n   int
	err error
}

func goRead(s *session.Session, p []byte) <-chan result {
	c := make(chan result, 1)
	go func() { n, err := s.Read(p); c <- result{n, err} }()
	return c
}

func goWrite(s *session.Session, p []byte) <-chan result {
	c := make(chan result, 1)
	go func() { n, err := s.Write(p); c <- result{n, err} }()
	return c
}

// within waits for a result, longer than any of the session's timeouts.
func within(t *testing.T, c <-chan result) result {
	t.Helper()
	select {
	case r := <-c:
		return r
	case <-time.After(5 * time.Minute):
		t.Fatalf("hangs\n%s", stacks())
		panic("unreachable")
	}
}

// pattern returns n bytes that depend on their position.
func pattern(n int) []byte {
	b := make([]byte, n)
	stream(b, 0, 0, 0)
	return b
}

// stream fills b with the bytes at a position of the stream that end id writes.
func stream(b []byte, seed uint64, id int, pos int64) {
	for i := range b {
		x := (uint64(pos) + uint64(i) + seed<<24 + uint64(id)<<60) * 0x9E3779B97F4A7C15
		x ^= x >> 29
		b[i] = byte(x * 0xBF58476D1CE4E5B9 >> 56)
	}
}

func fill(b []byte, v byte) {
	for i := range b {
		b[i] = v
	}
}

// changed returns the index of the first byte that is not v, or -1.
func changed(b []byte, v byte) int {
	for i := range b {
		if b[i] != v {
			return i
		}
	}
	return -1
}

// readFull reads n bytes.
func readFull(t *testing.T, s *session.Session, n int) []byte {
	t.Helper()
	b := make([]byte, n)
	for got := 0; got < n; {
		k, err := s.Read(b[got:])
		if err != nil {
			t.Fatalf("Read after %d bytes of %d: %v", got, n, err)
		}
		got += k
	}
	return b
}

// writeAll writes data in Writes of size bytes, none of which may wait.
func writeAll(t *testing.T, s *session.Session, data []byte, size int) {
	t.Helper()
	for len(data) > 0 {
		n := min(size, len(data))
		if r := within(t, goWrite(s, bytes.Clone(data[:n]))); r.n != n || r.err != nil {
			t.Fatalf("Write: %+v", r)
		}
		data = data[n:]
	}
}

type readerOf2 struct{ s *session.Session }

func (r readerOf2) Read(p []byte) (int, error) { return r.s.Read(p) }

func readerOf(s *session.Session) io.Reader { return readerOf2{s} }

func wantErr(t *testing.T, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: %v, want %v", what, err, want)
	}
}
