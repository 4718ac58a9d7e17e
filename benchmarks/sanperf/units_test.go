package main

import (
	"context"
	"errors"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestSizes(t *testing.T) {
	for text, want := range map[string]byteSize{
		"1": 1, "64": 64, "64B": 64, "4K": 4096, "4k": 4096, "4KiB": 4096, "1M": 1 << 20, "1MB": 1 << 20,
	} {
		var got byteSize
		if err := got.Set(text); err != nil || got != want {
			t.Errorf("%q is %d, %v; want %d", text, got, err, want)
		}
	}
	// The largest value exceeds a 32-bit int, as a limit of locked memory may on a 32-bit machine.
	for size, want := range map[byteSize]string{64: "64 B", 4096: "4 KiB", 1 << 20: "1 MiB", 1500: "1500 B", 1 << 30: "1 GiB", 8 << 30: "8 GiB"} {
		if got := size.String(); got != want {
			t.Errorf("%d is %q; want %q", size, got, want)
		}
	}
}

func TestTimes(t *testing.T) {
	for text, want := range map[string]time.Duration{"10": 10 * time.Second, "0.5": time.Second / 2, "200ms": 200 * time.Millisecond, "1m": time.Minute} {
		var got span
		if err := got.Set(text); err != nil || time.Duration(got) != want {
			t.Errorf("%q is %v, %v; want %v", text, got, err, want)
		}
	}
}

func TestAddresses(t *testing.T) {
	for text, want := range map[string]target{
		"host":               {"san", "host:5210"},
		"host:99":            {"san", "host:99"},
		":99":                {"san", ":99"},
		"tcp:host":           {"tcp", "host:5210"},
		"tcp:host:99":        {"tcp", "host:99"},
		"san:host:99":        {"san", "host:99"},
		"::1":                {"san", "[::1]:5210"},
		"[::1]":              {"san", "[::1]:5210"},
		"[::1]:99":           {"san", "[::1]:99"},
		"tcp:fe80::1%eth0":   {"tcp", "[fe80::1%eth0]:5210"},
		"unix:/run/s":        {"unix", "/run/s"},
		"unix:@abstract:one": {"unix", "@abstract:one"},
	} {
		got, err := parseTarget(text)
		if err != nil || got != want {
			t.Errorf("%q is %v, %v; want %v", text, got, err, want)
		}
		if again, err := parseTarget(got.String()); err != nil || again != got {
			t.Errorf("%v, written out, is read as %v, %v", got, again, err)
		}
	}
}

// Both ends name the providers in the same order, although connections arrive in any order.
func TestProvidersAreNamedInOneOrder(t *testing.T) {
	pipe, _ := net.Pipe()
	conns := []net.Conn{pipe, connect(t, tcpListener(t, func(c net.Conn) { c.Close() }))}
	one, _ := providersOf(conns)
	slices.Reverse(conns)
	if other, _ := providersOf(conns); one != other || !strings.Contains(one, "+") {
		t.Errorf("%q and %q", one, other)
	}
}

func TestThePatternIsSeenInAnyPieces(t *testing.T) {
	for _, size := range []int{1, 7, 8, 9, 64, 1000} {
		p := newPattern(size)
		var stream []byte
		for seq := uint64(0); len(stream) < 20_000; seq++ {
			m := p.message()
			p.stamp(m, seq)
			stream = append(stream, m...)
		}
		random := rand.New(rand.NewPCG(1, uint64(size)))
		for at := 0; at < len(stream); {
			n := min(1+random.IntN(3*size), len(stream)-at)
			if err := p.check(int64(at), stream[at:at+n]); err != nil {
				t.Fatalf("size %d: %v", size, err)
			}
			at += n
		}
		at := random.IntN(len(stream))
		stream[at] ^= 1
		if err := p.check(0, stream); err == nil {
			t.Errorf("size %d: byte %d was changed and nobody saw", size, at)
		}
	}
}

func TestAMessageOutOfPlaceIsSeen(t *testing.T) {
	p := newPattern(64)
	m := p.message()
	p.stamp(m, 3)
	if err := p.check(3*64, m); err != nil {
		t.Error(err)
	}
	if err := p.check(4*64, m); err == nil {
		t.Error("message 3 passed for message 4")
	}
}

func TestQuantilesOfAHistogramAreWithinOnePercent(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	h := new(histogram)
	var all []time.Duration
	for range 100_000 {
		d := time.Duration(math.Exp(20 * random.Float64())) // 1 ns to half a second
		all = append(all, d)
		h.add(d)
	}
	slices.Sort(all)
	var d distribution
	d.addAll(h)
	for _, q := range []float64{0, 0.01, 0.5, 0.9, 0.99, 0.999, 1} {
		want := all[max(int(q*float64(len(all))+0.5), 1)-1]
		if got := d.quantile(q); math.Abs(float64(got-want)) > 0.01*float64(want) {
			t.Errorf("quantile %v is %v; want %v", q, got, want)
		}
	}
}

func TestEveryDurationHasABucket(t *testing.T) {
	last := -1
	for _, d := range []time.Duration{-1, 0, 1, 63, 64, 127, 128, 129, 255, 256, time.Second, math.MaxInt64} {
		b := bucketOf(d)
		if b < last || b >= buckets {
			t.Errorf("%d is in bucket %d of %d, after %d", d, b, buckets, last)
		}
		last = b
	}
}

func TestADistributionCountsWhatCameSince(t *testing.T) {
	h := new(histogram)
	h.add(10)
	var before, after distribution
	before.addAll(h)
	h.add(50)
	after.addAll(h)
	d := after.since(&before)
	if d.total != 1 || d.quantile(0.5) != 50 {
		t.Errorf("%d values with median %v; want 1 of 50 ns", d.total, d.quantile(0.5))
	}
	if empty := before.since(&before); empty.quantile(0.5) != 0 {
		t.Errorf("nothing has median %v", empty.quantile(0.5))
	}
}

func TestAnIntervalWithoutRoundTripsHasNoPercentiles(t *testing.T) {
	got := figures(modePing, 0, 0, new(distribution).percentiles())
	if !strings.HasSuffix(got, "0 round trips") {
		t.Errorf("%q", got)
	}
}

func TestSummaries(t *testing.T) {
	for _, test := range []struct {
		values []float64
		want   summary
	}{
		{nil, summary{}},
		{[]float64{3}, summary{3, 0, 3, 3}},
		{[]float64{4, 1, 2, 3}, summary{2.5, 0.75, 1, 4}},
		{[]float64{5, 1, 4, 2, 3}, summary{3, 1, 1, 5}},
		{[]float64{1, 1, 1, 1, 100}, summary{1, 0, 1, 100}},
	} {
		if got := summarize(test.values); got != test.want {
			t.Errorf("%v: %+v; want %+v", test.values, got, test.want)
		}
	}
}

// madeUp is a result that has only the figures of the table.
func madeUp(provider string, rtt, rate, cpu float64) *result {
	return &result{Provider: provider, RoundTrip: &percentiles{P50: rtt, P99: 2 * rtt}, Messages: rate, SendRate: rate, CPUPerGB: cpu}
}

func TestRatiosAreFormedWithinRoundsAndAboveOneIsBetter(t *testing.T) {
	c := newComparison([]contender{{name: "TCP"}, {name: "SAN"}}, 3, time.Second, defaultRead)
	for round := range 3 {
		slow := float64(round + 1) // the machine is slower in each round; the ratio is the same
		for _, w := range workloads {
			c.add("TCP", w, madeUp("tcp", 8*slow, 2e9/slow, 0.9*slow))
			c.add("SAN", w, madeUp("shm", 2*slow, 8e9/slow, 0.3*slow))
		}
	}
	c.conclude()
	for _, row := range c.Rows {
		want := 4.0
		if row.Unit == "s/GB" {
			want = 3
		}
		base, got := row.Cells[0], row.Cells[1]
		if math.Abs(got.Ratio.Median-want) > 1e-9 || math.Abs(got.Ratio.Max-want) > 1e-9 || base.Ratio.Median != 1 {
			t.Errorf("%s: %+v; want %v in each round", row.Name, got.Ratio, want)
		}
		if diff := cmp.Diff([]string{"shm"}, got.Providers); diff != "" {
			t.Errorf("%s: %s", row.Name, diff)
		}
	}

	var out strings.Builder
	c.print(&out)
	for _, want := range []string{"SAN : TCP", "round trip 64 B, p50", "16.0 µs ±25%", "4.00×", "tcp, shm"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not in the table:\n%s", want, out.String())
		}
	}
}

func TestTheTableSaysWhenTheSANWasTCP(t *testing.T) {
	c := newComparison([]contender{{name: "TCP"}, {name: "SAN"}}, 2, time.Second, defaultRead)
	w := workloads[0]
	for _, provider := range []string{"shm", "tcp"} {
		c.add("TCP", w, madeUp("tcp", 8, 1, 1))
		r := madeUp(provider, 2, 1, 1)
		r.Target.transport = "san"
		if provider == "tcp" {
			r.Fallback = "the cable is out"
		}
		c.add("SAN", w, r)
	}
	c.conclude()
	var out strings.Builder
	c.print(&out)
	for _, want := range []string{"shm+tcp", "the cable is out"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not in the table:\n%s", want, out.String())
		}
	}
}

func TestColumnsAlign(t *testing.T) {
	var out strings.Builder
	printColumns(&out, [][]string{{"", "TCP", "by"}, {"µs", "1.00 µs", "x"}, {"long name", "9", "yy"}})
	want := "                TCP   by\n" +
		"µs          1.00 µs   x\n" +
		"long name         9   yy\n"
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Error(diff)
	}
}

func TestDigits(t *testing.T) {
	for x, want := range map[float64]string{1234: "1234", 123.4: "123", 12.34: "12.3", 1.234: "1.23", 0.1234: "0.123", 0.01234: "0.0123", 0: "0.0000"} {
		if got := digits(x); got != want {
			t.Errorf("%v is %q; want %q", x, got, want)
		}
	}
}

// A slow link has a rate, too.
func TestRates(t *testing.T) {
	for x, want := range map[float64]string{8.5e9: "8.50 GB/s", 1.18e8: "0.118 GB/s", 1.18e7: "11.8 MB/s", 1.2e5: "0.120 MB/s", 7000: "7.00 kB/s"} {
		if got := rate(x); got != want {
			t.Errorf("%v is %q; want %q", x, got, want)
		}
	}
}

func TestSpecBoundsMemory(t *testing.T) {
	s := spec{Mode: modeSend, Size: maxSize, Read: 1, Streams: 1, Time: 1}
	if err := s.check(); err != nil {
		t.Error(err)
	}
	s.Streams = maxMemory / maxSize
	if err := s.check(); err == nil {
		t.Error("a measurement of more than the bound is not refused")
	}
}

// A server refuses measurements that exceed its bounds or make no sense.
func TestSpecBounds(t *testing.T) {
	right := spec{Mode: modeSend, Size: 1, Read: 1, Streams: maxStreams, Time: 1}
	if err := right.check(); err != nil {
		t.Error(err)
	}
	for name, change := range map[string]func(*spec){
		"an unknown mode":    func(s *spec) { s.Mode = "steal" },
		"the server's mode":  func(s *spec) { s.Mode = modeEcho },
		"no size":            func(s *spec) { s.Size = 0 },
		"too large":          func(s *spec) { s.Size, s.Streams = maxSize+1, 1 },
		"no reads":           func(s *spec) { s.Read = 0 },
		"too large reads":    func(s *spec) { s.Read, s.Streams = maxSize+1, 1 },
		"no streams":         func(s *spec) { s.Streams = 0 },
		"too many streams":   func(s *spec) { s.Streams = maxStreams + 1 },
		"no time":            func(s *spec) { s.Time = 0 },
		"no time that is":    func(s *spec) { s.Time = math.NaN() },
		"a warm-up backward": func(s *spec) { s.Warmup = -1 },
		"too long":           func(s *spec) { s.Time = 2*maxTime.Seconds() + 1 },
		"too long together":  func(s *spec) { s.Warmup = 2 * maxTime.Seconds() },
	} {
		wrong := right
		change(&wrong)
		if wrong.check() == nil {
			t.Errorf("%s: it is not refused", name)
		}
	}
}

// The size of what a client sends before it is served is bounded.
func TestControlThatNeverEnds(t *testing.T) {
	c, client := net.Pipe()
	defer client.Close()
	served := make(chan error, 1)
	go func() {
		defer c.Close()
		served <- (&server{log: t.Logf}).control(t.Context(), c)
	}()
	said, part := 0, []byte(strings.Repeat(" ", 64<<10))
	for said < 4*maxControl {
		n, err := client.Write(part)
		if said += n; err != nil {
			break
		}
	}
	client.Close()
	if err := <-served; err == nil || said > 2*maxControl {
		t.Errorf("it took %d bytes: %v", said, err)
	}
}

// hurried records its read deadlines.
type hurried struct {
	net.Conn
	until []time.Time
}

func (c *hurried) SetReadDeadline(t time.Time) error {
	c.until = append(c.until, t)
	return c.Conn.SetReadDeadline(t)
}

// The server does not wait for ever for a client that connects and sends nothing.
func TestHelloHasItsTime(t *testing.T) {
	inner, client := net.Pipe()
	c := &hurried{Conn: inner}
	client.Close()
	if err := (&server{log: t.Logf}).handle(t.Context(), c); err != nil {
		t.Error(err)
	}
	if len(c.until) == 0 || c.until[0].IsZero() || time.Until(c.until[0]) > setupTime {
		t.Errorf("it may read until %v", c.until)
	}
}

// A measurement takes as many streams as it has requested while it waits for them, and closes those that
// it did not run.
func TestAStreamTooManyIsRefused(t *testing.T) {
	s := new(server)
	full, over := token{1}, token{2}
	c, peer := net.Pipe()
	defer peer.Close()
	join := func(which token, want bool) {
		t.Helper()
		joined := make(chan bool, 1)
		go func() { joined <- s.join(which, c) }()
		select {
		case got := <-joined:
			if got != want {
				t.Errorf("the stream was taken: %v, want %v", got, want)
			}
		case <-time.After(setupTime):
			t.Fatal("the server hangs")
		}
	}
	join(full, false) // no measurement has requested it yet
	s.expect(full, 1)
	join(full, true)
	join(full, false)
	g := s.expect(over, 2)
	join(over, true)
	s.forget(over, g)
	join(over, false)
	c.SetDeadline(time.Now())
	if _, err := c.Write([]byte{1}); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("the stream that was not run is open: %v", err)
	}
}

// outOfDescriptors is a listener whose first Accept fails.
type outOfDescriptors struct {
	net.Listener
	accepts chan int
	n       int
}

func (l *outOfDescriptors) Accept() (net.Conn, error) {
	l.n++
	l.accepts <- l.n
	if l.n == 1 {
		return nil, syscall.EMFILE
	}
	return l.Listener.Accept()
}

func TestServerSurvivesAFailedAccept(t *testing.T) {
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := &outOfDescriptors{Listener: inner, accepts: make(chan int, 9)}
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- (&server{log: t.Logf}).serve(ctx, l) }()
	for want := 1; want <= 2; want++ {
		select {
		case <-l.accepts:
		case err := <-served:
			t.Fatalf("serve ended: %v", err)
		}
	}
	cancel()
	if err := <-served; err != nil {
		t.Error(err)
	}
}
