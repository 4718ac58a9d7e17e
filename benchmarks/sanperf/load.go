package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime/metrics"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sanconn/san/benchmarks/internal/cputime"
)

const (
	// A stream adds its count to the shared counter only after this many messages or
	// bytes, whichever is less, so that counting does not slow down small messages.
	publishMessages = 256
	publishBytes    = 64 << 10

	// The bytes of one read in checkEvery are compared. It is odd, so as not to keep in
	// step with a ring's size.
	checkEvery = 61

	// grace is how long a measurement may take beyond its own time, for bytes under way
	// to arrive, before it fails.
	grace = 20 * time.Second
)

// A load is one side of a measurement: the traffic on its connections.
type load struct {
	spec     spec
	mode     mode // of this side
	conns    []net.Conn
	interval time.Duration // time between calls of report; 0: it is not called
	report   func(interval)
	// measured reports the end of measuring to the other side, and waits for the same
	// from there, so that the streams run while either side measures.
	measured func() error

	pattern pattern
	stop    atomic.Bool // ends the senders
	sent    counters
	got     counters
	rtt     []histogram // one per connection, in modePing
}

// counters are bytes in one direction.
type counters struct {
	published atomic.Int64 // so far, without what streams have not yet published
	total     atomic.Int64 // of the streams that have ended
}

// A side is what one process saw of a measurement. Bytes, CPU time and allocations are those
// within the measured seconds; the totals include the time before and after.
type side struct {
	Provider      string  `json:"provider"`
	Fallback      string  `json:"fallback,omitempty"` // why TCP, where a SAN could have been
	Seconds       float64 `json:"seconds"`
	Sent          int64   `json:"sent_bytes"`
	Received      int64   `json:"received_bytes"`
	CPU           float64 `json:"cpu_s"` // user and system, of the whole process
	TotalSent     int64   `json:"total_sent_bytes"`
	TotalReceived int64   `json:"total_received_bytes"`
	Allocs        uint64  `json:"allocs"`          // of Go heap objects
	Ways          ways    `json:"ways"`            // of all bytes that this side sent, including the warm-up
	Error         string  `json:"error,omitempty"` // why there is no result

	rtt *distribution
}

// A moment is a reading of all counters at once.
type moment struct {
	at        time.Time
	sent, got int64
	cpu       time.Duration
	rtt       *distribution
}

func (l *load) now() moment {
	m := moment{at: time.Now(), sent: l.sent.published.Load(), got: l.got.published.Load(), cpu: cputime.OfProcess()}
	if l.rtt != nil {
		m.rtt = new(distribution)
		for i := range l.rtt {
			m.rtt.addAll(&l.rtt[i])
		}
	}
	return m
}

// run starts a stream on each connection and measures. It returns when all bytes have
// arrived, something has gone wrong, or ctx or the time is over. It closes the connections.
func (l *load) run(ctx context.Context) (*side, error) {
	l.pattern = newPattern(l.spec.Size)
	before := waysSoFar(l.conns)
	if l.mode == modePing {
		l.rtt = make([]histogram, len(l.conns))
	}
	limit := seconds(l.spec.Warmup+l.spec.Time) + grace
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("not finished after %v", limit))
	defer cancel()
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)

	// Deadlines on the connections would do as well, but their cost would be measured, too.
	defer l.close()
	defer context.AfterFunc(ctx, l.close)()

	var streams sync.WaitGroup
	start := func(f func(int, net.Conn) error, i int) {
		streams.Go(func() {
			if err := f(i, l.conns[i]); err != nil {
				fail(fmt.Errorf("stream %d: %w", i, err)) // the first error is the one that is returned
			}
		})
	}
	for i := range l.conns {
		switch l.mode {
		case modeSend:
			start(l.send, i)
		case modeReceive:
			start(l.receive, i)
		case modeBoth:
			start(l.send, i)
			start(l.receive, i)
		case modePing:
			start(l.ping, i)
		case modeEcho:
			start(l.echo, i)
		}
	}
	ended := make(chan struct{})
	go func() {
		streams.Wait()
		close(ended)
	}()
	provider, fallback := providersOf(l.conns)
	s := l.measure(ended)
	if now, _ := providersOf(l.conns); now != provider {
		provider += " then " + now
	}
	s.Provider, s.Fallback = provider, fallback
	if err := l.measured(); err != nil {
		fail(err)
	}
	l.stop.Store(true)
	<-ended
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if s.Seconds == 0 {
		return nil, errors.New("the streams ended before the measured time began")
	}
	s.TotalSent, s.TotalReceived = l.sent.total.Load(), l.got.total.Load()
	s.Ways = waysSoFar(l.conns).since(before)
	return s, nil
}

func (l *load) close() {
	for _, c := range l.conns {
		c.Close()
	}
}

// measure reads the counters when the measured time starts and ends, and reports intervals in between.
// It measures for longer if nothing has moved so far, and stops early if the streams end.
func (l *load) measure(ended <-chan struct{}) *side {
	sleep := func(d time.Duration) (running bool) {
		t := time.NewTimer(d)
		defer t.Stop()
		select {
		case <-t.C:
			return true
		case <-ended:
			return false
		}
	}
	running := sleep(seconds(l.spec.Warmup))
	allocs := heapAllocs()
	first := l.now()
	last := first
	end := first.at.Add(seconds(l.spec.Time))
	for running && (last.at.Before(end) || last.sent+last.got == first.sent+first.got) {
		d := end.Sub(last.at)
		if d <= 0 {
			d = seconds(l.spec.Time)
		}
		if l.interval > 0 {
			d = min(d, l.interval)
		}
		running = sleep(d)
		next := l.now()
		if l.interval > 0 && running {
			l.report(newInterval(first.at, last, next))
		}
		last = next
	}
	s := &side{
		Seconds:  last.at.Sub(first.at).Seconds(),
		Sent:     last.sent - first.sent,
		Received: last.got - first.got,
		CPU:      (last.cpu - first.cpu).Seconds(),
		Allocs:   heapAllocs() - allocs,
	}
	if last.rtt != nil {
		s.rtt = last.rtt.since(first.rtt)
	}
	return s
}

// heapAllocs returns how many heap objects this process has ever allocated.
func heapAllocs() uint64 {
	sample := []metrics.Sample{{Name: "/gc/heap/allocs:objects"}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}

// A tally is one stream's own count, added to the shared one in steps.
type tally struct {
	to           *counters
	step         int64 // the shared count is updated when this one is ahead by so much
	total, ahead int64
}

func (t *tally) add(n int) {
	t.total += int64(n)
	if t.ahead += int64(n); t.ahead >= t.step {
		t.to.published.Add(t.ahead)
		t.ahead = 0
	}
}

func (t *tally) done() {
	t.to.published.Add(t.ahead)
	t.to.total.Add(t.total)
}

func (l *load) step() int64 {
	return min(publishBytes, publishMessages*int64(l.spec.Size))
}

func (l *load) send(_ int, c net.Conn) error {
	count := tally{to: &l.sent, step: l.step()}
	defer count.done()
	buf := l.pattern.message()
	for seq := uint64(0); !l.stop.Load(); seq++ {
		l.pattern.stamp(buf, seq)
		n, err := c.Write(buf)
		count.add(n)
		if err != nil {
			return err
		}
	}
	if err := closeWrite(c); err != nil || l.mode == modeBoth {
		return err
	}
	return expectEOF(c)
}

// expectEOF waits for the receiver, which sends nothing and closes once it has
// read everything.
func expectEOF(c net.Conn) error {
	var b [1]byte
	switch n, err := c.Read(b[:]); {
	case n > 0:
		return errors.New("the receiving side sent something")
	case err == io.EOF:
		return nil
	default:
		return err
	}
}

func (l *load) receive(_ int, c net.Conn) error {
	count := tally{to: &l.got, step: l.step()}
	defer count.done()
	buf := make([]byte, l.spec.Read)
	every := checkEvery
	if l.spec.Verify {
		every = 1
	}
	for reads := 0; ; reads++ {
		n, err := c.Read(buf)
		if reads%every == 0 {
			if err := l.pattern.check(count.total, buf[:n]); err != nil {
				return err
			}
		}
		count.add(n)
		switch err {
		case nil:
		case io.EOF:
			if l.mode == modeReceive {
				return closeWrite(c)
			}
			return nil
		default:
			return err
		}
	}
}

func (l *load) ping(i int, c net.Conn) error {
	sent, got := tally{to: &l.sent}, tally{to: &l.got}
	defer sent.done()
	defer got.done()
	message, reply := l.pattern.message(), make([]byte, l.spec.Size)
	began, last := time.Now(), time.Duration(0) // time.Since reads one clock, time.Now two
	for seq := uint64(0); !l.stop.Load(); seq++ {
		l.pattern.stamp(message, seq)
		if _, err := c.Write(message); err != nil {
			return err
		}
		if _, err := io.ReadFull(c, reply); err != nil {
			return err
		}
		now := time.Since(began)
		l.rtt[i].add(now - last)
		if seq%checkEvery == 0 || l.spec.Verify {
			if err := l.pattern.check(got.total, reply); err != nil {
				return err
			}
			now = time.Since(began) // checking must not count in the next round trip
		}
		last = now
		sent.add(len(message))
		got.add(len(reply))
	}
	if err := closeWrite(c); err != nil {
		return err
	}
	return expectEOF(c)
}

// echo returns each message only when it is complete: ping does not read while it writes, so
// a part returned early could block the rest of a large message.
func (l *load) echo(_ int, c net.Conn) error {
	sent, got := tally{to: &l.sent}, tally{to: &l.got}
	defer sent.done()
	defer got.done()
	buf := make([]byte, max(l.spec.Read, l.spec.Size))
	for {
		n, err := io.ReadAtLeast(c, buf, l.spec.Size)
		got.add(n)
		if n > 0 {
			if _, err := c.Write(buf[:n]); err != nil {
				return err
			}
			sent.add(n)
		}
		switch err {
		case nil:
		case io.EOF:
			return closeWrite(c)
		default:
			return err
		}
	}
}

// closeWrite ends one direction of a stream, as net.TCPConn, net.UnixConn and sanconn.Conn
// can.
func closeWrite(c net.Conn) error {
	half, ok := c.(interface{ CloseWrite() error })
	if !ok {
		return fmt.Errorf("%T cannot close one direction", c)
	}
	return half.CloseWrite()
}
