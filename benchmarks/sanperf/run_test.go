package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// decode reads one JSON document and nothing else.
func decode(t *testing.T, text string, into any) {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(text))
	if err := d.Decode(into); err != nil {
		t.Fatalf("not JSON: %v\n%s", err, text)
	}
	if _, err := d.Token(); err != io.EOF {
		t.Fatalf("more than one JSON document:\n%s", text)
	}
}

// wantProvider returns the provider that connections to a target of a server process have to use.
func wantProvider(t target) string {
	if t.transport == "san" {
		return sanProvider()
	}
	return t.transport
}

func TestEachModeRunsOnTheProviderItNames(t *testing.T) {
	server := serverProcess(t)
	targets := append(server.ready[:3:3], target{"tcp", server.ready[0].address})
	for _, to := range targets {
		for _, test := range []struct {
			name, flags string
			out, in     bool
		}{
			{"send", "", true, false},
			{"send small", "-size 64", true, false},
			{"reverse", "-reverse -size 1M", false, true},
			{"both", "-both -size 4K", true, true},
			{"parallel", "-both -parallel 4", true, true},
			{"latency", "-latency", true, true},
			{"parallel latency", "-latency -parallel 3 -size 5", true, true},
		} {
			t.Run(to.transport+"/"+test.name, func(t *testing.T) {
				args := append([]string{"client", "-json", "-verify", "-time", "200ms", "-interval", "20ms", to.String()}, strings.Fields(test.flags)...)
				var r result
				decode(t, mustRun(t, args...), &resultOnly{&r})
				if want := wantProvider(to); r.Provider != want {
					t.Errorf("went by %q; want %q (%s)", r.Provider, want, r.Fallback)
				}
				out, in := r.SendRate > 0, r.RecvRate > 0
				if test.out && test.in { // one direction may not have had a turn while it was measured
					out, in = r.There.TotalReceived > 0, r.Here.TotalReceived > 0
				}
				if out != test.out || in != test.in {
					t.Errorf("%v bytes/s out, %v in: %+v, %+v", r.SendRate, r.RecvRate, r.Here, r.There)
				}
				if r.Here.TotalSent != r.There.TotalReceived || r.Here.TotalReceived != r.There.TotalSent {
					t.Errorf("bytes lost: %+v, %+v", r.Here, r.There)
				}
				if len(r.Intervals) < 1 || r.Messages <= 0 || r.Here.Seconds < 0.1 {
					t.Errorf("%d intervals, %v messages/s, %v s", len(r.Intervals), r.Messages, r.Here.Seconds)
				}
				if latency := strings.Contains(test.flags, "-latency"); latency != (r.RoundTrip != nil) {
					t.Errorf("round trips: %+v", r.RoundTrip)
				} else if p := r.RoundTrip; latency && (p.Count == 0 || p.P50 <= 0 || p.P99 < p.P50 || p.Max < p.P999) {
					t.Errorf("round trips: %+v", p)
				}
			})
		}
	}
}

// If both ends only wrote, and did not read, each would wait for the other for ever. The message is
// larger than all buffers between them.
func TestARoundTripMayBeLargerThanAllBuffers(t *testing.T) {
	for _, to := range serverProcess(t).ready[:3] {
		mustRun(t, "client", "-latency", "-size", "16M", "-verify", "-time", "1ms", to.String())
	}
}

// resultOnly reads a result back; a target is written only.
type resultOnly struct{ *result }

func (r *resultOnly) UnmarshalJSON(text []byte) error {
	type plain result
	var shadow struct {
		*plain
		Target string `json:"target"`
	}
	shadow.plain = (*plain)(r.result)
	return json.Unmarshal(text, &shadow)
}

func TestAClientPrintsALineForEachInterval(t *testing.T) {
	server := serverProcess(t)
	out := mustRun(t, "client", "-time", "100ms", "-interval", "30ms", server.ready[0].String())
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if !strings.Contains(lines[0], "by "+sanProvider()+": sending, 64 KiB messages") {
		t.Errorf("the first line does not say what runs on what:\n%s", out)
	}
	var end float64 // of the line before; the number of lines depends on the scheduler
	for _, line := range lines {
		var from, to float64
		if n, _ := fmt.Sscanf(line, "%f-%f s", &from, &to); n < 2 {
			continue
		}
		if from != end || to < from || !strings.Contains(line, "B/s") {
			t.Errorf("behind %.2f s: %q", end, line)
		}
		end = to
	}
	if end < 0.1 || !strings.Contains(out, "CPU seconds per GB") {
		t.Errorf("intervals up to %.2f s in:\n%s", end, out)
	}
}

func TestIntervalsAreReportedWhenTheyAreOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var got []string
		l := &load{spec: spec{Time: 0.1}, interval: 30 * time.Millisecond}
		l.report = func(i interval) { got = append(got, fmt.Sprintf("%.2f-%.2f", i.From, i.To)) }
		time.AfterFunc(time.Millisecond, func() { l.sent.published.Add(1) }) // without progress, measuring goes on
		l.measure(nil)
		if want := []string{"0.00-0.03", "0.03-0.06", "0.06-0.09", "0.09-0.10"}; !slices.Equal(got, want) {
			t.Errorf("%v, want %v", got, want)
		}
	})
}

func TestComparePutsAllTransportsSideBySide(t *testing.T) {
	var c comparison
	decode(t, mustRun(t, "-rounds", "2", "-time", "10ms", "-warmup", "2ms", "-json"), &c)
	if want := len(tableFigures(workloads)); len(c.Rows) != want {
		t.Errorf("%d rows; want %d", len(c.Rows), want)
	}
	want := map[string]string{"TCP": "tcp", "unix": "unix", "SAN": sanProvider()}
	for _, row := range c.Rows {
		if len(row.Cells) != len(want) {
			t.Errorf("%s: %d columns", row.Name, len(row.Cells))
		}
		for _, cell := range row.Cells {
			want := want[cell.Contender]
			if want == "shm" && row.Unit == "1/s" && !strings.HasPrefix(row.Name, "messages") {
				want = "tcp" // the connection is too short for a move
			}
			if len(cell.Providers) != 1 || cell.Providers[0] != want {
				t.Errorf("%s, %s: went by %v %v", row.Name, cell.Contender, cell.Providers, cell.Fallbacks)
			}
			if len(cell.Values) != 2 {
				t.Errorf("%s, %s: %d rounds", row.Name, cell.Contender, len(cell.Values))
			}
			if cell.Median <= 0 && row.Unit != "s/GB" { // so little CPU time may round to 0
				t.Errorf("%s, %s: %v", row.Name, cell.Contender, cell.Values)
			}
		}
	}
}

func TestCompareWithAServerElsewhere(t *testing.T) {
	server := serverProcess(t)
	out := mustRun(t, "compare", "-rounds", "1", "-time", "5ms", server.ready[0].address)
	if want := "tcp, " + sanProvider(); !strings.Contains(out, want) {
		t.Errorf("%q is not in the table:\n%s", want, out)
	}
}

func TestAServerProcessEndsWithItsInput(t *testing.T) {
	server := serverProcess(t)
	if err := server.stop(); err != nil { // then stop has to kill it
		t.Error(err)
	}
}

func TestAPortInUseIsSaid(t *testing.T) {
	server := serverProcess(t)
	code, _, stderr := sanperf(t, "server", "-l", server.ready[0].String())
	if code != exitFailed || !strings.Contains(stderr, "cannot listen on "+server.ready[0].String()) {
		t.Errorf("exit code %d: %s", code, stderr)
	}
}

func TestNobodyThereIsSaid(t *testing.T) {
	code, _, stderr := sanperf(t, "client", "tcp:127.0.0.1:1")
	if code != exitFailed || !strings.Contains(stderr, "refused") {
		t.Errorf("exit code %d: %s", code, stderr)
	}
}

// tcpListener is a plain listener on loopback that passes its connections to handle.
func tcpListener(t *testing.T, handle func(net.Conn)) target {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go handle(c)
		}
	}()
	return target{"tcp", l.Addr().String()}
}

// The server closes after the hello without reading the rest, which sometimes causes a reset.
func TestAServerOfAnotherVersionIsSaid(t *testing.T) {
	for _, linger := range []int{0, -1} {
		to := tcpListener(t, func(c net.Conn) {
			io.CopyN(io.Discard, c, int64(helloLen)+1)
			c.(*net.TCPConn).SetLinger(linger)
			c.Close()
		})
		code, _, stderr := sanperf(t, "client", to.String())
		if code != exitFailed || !strings.Contains(stderr, "of this version") {
			t.Errorf("linger %d: exit code %d: %s", linger, code, stderr)
		}
	}
}

func TestAServerThatIsNotSanperfIsSaid(t *testing.T) {
	for name, handle := range map[string]func(net.Conn){
		"hangs up":      func(c net.Conn) { io.CopyN(io.Discard, c, int64(helloLen)); c.Close() },
		"talks of HTTP": func(c net.Conn) { io.WriteString(c, "HTTP/1.1 400 Bad Request\r\n\r\n"); io.Copy(io.Discard, c) },
	} {
		t.Run(name, func(t *testing.T) {
			code, _, stderr := sanperf(t, "client", "-time", "1s", tcpListener(t, handle).String())
			if code != exitFailed || !strings.Contains(stderr, "server") && !strings.Contains(stderr, "reset") {
				t.Errorf("exit code %d: %s", code, stderr)
			}
		})
	}
}

// connect opens a raw connection to a server.
func connect(t *testing.T, to target) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", to.address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(setupTime))
	return c
}

func TestAServerOutlivesBadClients(t *testing.T) {
	server := serverProcess(t)
	for name, hello := range map[string]string{
		"garbage":           "GET / HTTP/1.1\r\nHost: example.com\r\n\r\n",
		"an unknown stream": magic + "0123456789abcdef",
		"no JSON":           magic + strings.Repeat("\x00", tokenLen) + "hello\n",
	} {
		c := connect(t, server.ready[0])
		io.WriteString(c, hello)
		if answer, err := io.ReadAll(c); len(answer) > 0 {
			t.Errorf("%s is answered with %q, %v", name, answer, err)
		} else if e := net.Error(nil); errors.As(err, &e) && e.Timeout() {
			t.Errorf("%s: the server keeps the connection", name)
		}
	}
	mustRun(t, "client", "-time", "10ms", server.ready[0].String())
}

func TestAServerRefusesWhatItWillNotRun(t *testing.T) {
	server := serverProcess(t)
	for name, s := range map[string]spec{
		"no mode":       {Size: 1, Read: 1 << 16, Streams: 1, Time: 1},
		"no size":       {Mode: modeSend, Read: 1 << 16, Streams: 1, Time: 1},
		"too large":     {Mode: modeSend, Size: maxSize + 1, Read: 1 << 16, Streams: 1, Time: 1},
		"no read size":  {Mode: modeSend, Size: 1, Streams: 1, Time: 1},
		"no streams":    {Mode: modeSend, Size: 1, Read: 1 << 16, Time: 1},
		"no time":       {Mode: modeSend, Size: 1, Read: 1 << 16, Streams: 1},
		"too long":      {Mode: modeSend, Size: 1, Read: 1 << 16, Streams: 1, Time: 1e12},
		"echo for ever": {Mode: modeEcho, Size: 1, Read: 1 << 16, Streams: 1, Time: 1},
	} {
		m := measurement{target: server.ready[0], spec: s}
		if _, err := m.run(t.Context()); err == nil || !strings.Contains(err.Error(), "the server refuses") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestAServerThatDiesEndsTheClient(t *testing.T) {
	for _, mode := range []mode{modeSend, modeReceive, modeBoth, modePing} {
		server := serverProcess(t)
		m := measurement{
			target:   server.ready[0],
			spec:     spec{Mode: mode, Size: 4096, Read: 1 << 16, Streams: 2, Time: 60},
			interval: time.Millisecond,
			report:   func(interval) { server.cmd.Process.Kill() },
		}
		start := time.Now()
		if r, err := m.run(t.Context()); err == nil {
			t.Errorf("%s: a result, %+v", mode, r)
		}
		if took := time.Since(start); took > grace {
			t.Errorf("%s: took %v", mode, took)
		}
	}
}

func TestACancelledClientEnds(t *testing.T) {
	server := serverProcess(t)
	ctx, cancel := context.WithCancel(t.Context())
	m := measurement{
		target:   server.ready[0],
		spec:     spec{Mode: modeBoth, Size: 1 << 20, Read: 1 << 16, Streams: 2, Time: 60},
		interval: time.Millisecond,
		report:   func(interval) { cancel() },
	}
	if _, err := m.run(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("%v; want %v", err, context.Canceled)
	}
}

// If a client is canceled before the server has answered, the error is that it was canceled.
func TestACancelledClientSaysSo(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	m := measurement{
		target: tcpListener(t, func(c net.Conn) {
			io.CopyN(io.Discard, c, int64(helloLen)+1)
			cancel()
			io.Copy(io.Discard, c)
		}),
		spec: spec{Mode: modeSend, Size: 1, Read: 1, Streams: 1, Time: 60},
	}
	if _, err := m.run(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("%v; want %v", err, context.Canceled)
	}
}

// A corruptor changes one byte that is read.
type corruptor struct {
	net.Conn
	at int
}

func (c *corruptor) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if c.at >= 0 && c.at < n {
		p[c.at] ^= 0x20
	}
	c.at -= n
	return n, err
}

func TestAWrongByteIsAFailure(t *testing.T) {
	accepted := make(chan net.Conn, 1)
	to := tcpListener(t, func(c net.Conn) { accepted <- c })
	c := connect(t, to)
	s := spec{Mode: modeSend, Size: 4096, Read: 1 << 16, Streams: 1, Time: 10, Verify: true}
	alone := func() error { return nil }
	sender := &load{spec: s, mode: modeSend, conns: []net.Conn{c}, measured: alone}
	receiver := &load{spec: s, mode: modeReceive, conns: []net.Conn{&corruptor{<-accepted, 123_456}}, measured: alone}
	sent := make(chan error, 1)
	go func() {
		_, err := sender.run(t.Context())
		sent <- err
	}()
	if _, err := receiver.run(t.Context()); err == nil || !strings.Contains(err.Error(), "wrong data: byte 123456 of the stream") {
		t.Errorf("%v", err)
	}
	if err := <-sent; err == nil {
		t.Error("the sender saw nothing of it")
	}
}

// A wrong byte in an echo is a failure. It may be in any round trip if each byte is checked.
func TestAWrongByteOfAReplyIsAFailure(t *testing.T) {
	accepted := make(chan net.Conn, 1)
	to := tcpListener(t, func(c net.Conn) { accepted <- c })
	c := connect(t, to)
	s := spec{Mode: modePing, Size: 100, Read: 1 << 16, Streams: 1, Time: 10, Verify: true}
	alone := func() error { return nil }
	pinger := &load{spec: s, mode: modePing, conns: []net.Conn{&corruptor{c, 510}}, measured: alone}
	echoer := &load{spec: s, mode: modeEcho, conns: []net.Conn{<-accepted}, measured: alone}
	echoed := make(chan error, 1)
	go func() {
		_, err := echoer.run(t.Context())
		echoed <- err
	}()
	if _, err := pinger.run(t.Context()); err == nil || !strings.Contains(err.Error(), "wrong data: byte 510 of the stream") {
		t.Errorf("%v", err)
	}
	<-echoed
}

func TestLostBytesAreAFailure(t *testing.T) {
	sent, got := side{Seconds: 1, TotalSent: 10}, side{Seconds: 1, TotalReceived: 9}
	for _, r := range []*result{{Here: sent, There: got}, {Here: got, There: sent}} {
		r.Spec = spec{Mode: modeBoth, Size: 1}
		if err := r.conclude(); err == nil || !strings.Contains(err.Error(), "bytes lost") {
			t.Errorf("%v", err)
		}
	}
}

func TestEndsThatDisagreeOnTheProviderAreAFailure(t *testing.T) {
	r := &result{Spec: spec{Mode: modeSend, Size: 1}, Here: side{Seconds: 1, Provider: "shm"}, There: side{Seconds: 1, Provider: "tcp"}}
	if err := r.conclude(); err == nil || !strings.Contains(err.Error(), "disagree") {
		t.Errorf("%v", err)
	}
}
