package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/sanconn/san"
)

// A result is one measurement as both sides saw it.
type result struct {
	Target    target       `json:"target"`
	Provider  string       `json:"provider"`           // what carried the bytes: "shm", "verbs", "tcp", "unix"
	Fallback  string       `json:"fallback,omitempty"` // why "tcp", where a SAN could have been
	Spec      spec         `json:"spec"`
	SendRate  float64      `json:"send_bytes_per_s"`    // sent by this side, as received by the other one
	RecvRate  float64      `json:"receive_bytes_per_s"` // received by this side
	Messages  float64      `json:"messages_per_s"`      // both ways; round trips in mode "ping"
	CPUPerGB  float64      `json:"cpu_s_per_gb"`        // of both processes, per 1e9 bytes moved
	RoundTrip *percentiles `json:"round_trip,omitempty"`
	Intervals []interval   `json:"intervals,omitempty"`
	Ways      ways         `json:"ways"` // of the bytes that both sides sent
	Here      side         `json:"client"`
	There     side         `json:"server"`
}

// An interval is a part of the measured time, as this side saw it.
type interval struct {
	From      float64      `json:"from_s"`
	To        float64      `json:"to_s"`
	SendRate  float64      `json:"send_bytes_per_s"`
	RecvRate  float64      `json:"receive_bytes_per_s"`
	RoundTrip *percentiles `json:"round_trip,omitempty"`
}

func newInterval(start time.Time, from, to moment) interval {
	took := to.at.Sub(from.at).Seconds()
	i := interval{
		From:     from.at.Sub(start).Seconds(),
		To:       to.at.Sub(start).Seconds(),
		SendRate: float64(to.sent-from.sent) / took,
		RecvRate: float64(to.got-from.got) / took,
	}
	if to.rtt != nil {
		i.RoundTrip = to.rtt.since(from.rtt).percentiles()
	}
	return i
}

// runClient is the command "client".
func runClient(ctx context.Context, std stdio, args []string) error {
	m, asJSON, err := parseClient(std, args)
	if err != nil {
		return err
	}
	if !asJSON {
		m.begin = func(provider, fallback string) { printStart(std.out, m.target, m.spec, provider, fallback) }
		m.report = func(i interval) { printInterval(std.out, m.spec.Mode, i) }
	}
	r, err := m.run(ctx)
	if err != nil {
		return err
	}
	if asJSON {
		return printJSON(std.out, r)
	}
	printResult(std.out, r)
	return nil
}

// parseClient reads the command line of "client".
func parseClient(std stdio, args []string) (m measurement, asJSON bool, err error) {
	fs := newFlagSet(std, "client")
	size, read := byteSize(64<<10), defaultRead
	length, every := span(10*time.Second), span(time.Second)
	fs.Var(&size, "size", "`bytes` per message, that is, per Write: 64, 4K, 1M (with -latency the default is 64)")
	fs.Var(&read, "read", "`bytes` that each Read has room for")
	fs.Var(&length, "time", "`time` to measure: 10, 10s, 500ms")
	fs.Var(&every, "interval", "`time` between lines of figures")
	what := spec{Warmup: 0.1}
	fs.IntVar(&what.Streams, "parallel", 1, "`connections` at once")
	reverse := fs.Bool("reverse", false, "the server sends")
	both := fs.Bool("both", false, "both send at once, on each connection")
	latency := fs.Bool("latency", false, "round trips, one message at a time on each connection")
	fs.BoolVar(&what.Verify, "verify", false, "check each byte that arrives, not a sample")
	require := fs.Bool("require", false, "fail where a connection to a san: address does not move to a SAN")
	fs.BoolVar(&asJSON, "json", false, "print one JSON document at the end, and nothing else")
	rest, err := parseArgs(fs, args, 1)
	if err != nil {
		return m, false, err
	}
	if len(rest) == 0 {
		return m, false, usagef("client: the server's address is missing")
	}
	to, err := parseTarget(rest[0])
	if err != nil {
		return m, false, usagef("client: %w", err)
	}
	if what.Mode, err = chooseMode(*reverse, *both, *latency); err != nil {
		return m, false, err
	}
	sizeGiven := false
	fs.Visit(func(f *flag.Flag) { sizeGiven = sizeGiven || f.Name == "size" })
	if what.Mode == modePing && !sizeGiven {
		size = 64
	}
	what.Size, what.Read, what.Time = int(size), int(read), time.Duration(length).Seconds()
	if err := what.check(); err != nil {
		return m, false, usagef("client: %w", err)
	}
	return measurement{target: to, policy: policyOf(*require), spec: what, interval: time.Duration(every)}, asJSON, nil
}

// chooseMode returns the mode that the flags choose. At most one of them may be set.
func chooseMode(reverse, both, latency bool) (mode, error) {
	chosen, n := modeSend, 0
	for m, on := range map[mode]bool{modeReceive: reverse, modeBoth: both, modePing: latency} {
		if on {
			chosen = m
			n++
		}
	}
	if n > 1 {
		return chosen, usagef("client: -reverse, -both and -latency exclude each other")
	}
	return chosen, nil
}

// A measurement is what a client measures with one server.
type measurement struct {
	target   target
	policy   san.Policy
	spec     spec
	interval time.Duration                   // 0: no intervals
	begin    func(provider, fallback string) // may be nil
	report   func(interval)                  // may be nil
}

// run makes the measurement. Its time is bounded: by setupTime for each step of the set-up,
// then by the spec's times and grace.
func (m measurement) run(ctx context.Context) (*result, error) {
	if m.spec.Mode.short() {
		return m.runShort(ctx)
	}
	r, err := m.measure(ctx)
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx) // not the error that the end of ctx has caused elsewhere
		}
		return nil, fmt.Errorf("%v: %w", m.target, err)
	}
	return r, nil
}

func (m measurement) measure(ctx context.Context) (*result, error) {
	setup, cancel := context.WithTimeoutCause(ctx, setupTime, fmt.Errorf("no answer within %v", setupTime))
	defer cancel()
	control, err := m.open(setup, token{})
	if err != nil {
		return nil, err
	}
	defer control.Close()
	defer context.AfterFunc(ctx, func() { control.Close() })()
	in, out := json.NewDecoder(io.LimitReader(control, maxControl)), json.NewEncoder(control)
	control.SetDeadline(time.Now().Add(setupTime))

	r := &result{Target: m.target, Spec: m.spec}
	l := &load{spec: m.spec, mode: m.spec.Mode, interval: m.interval}
	l.report = func(i interval) {
		r.Intervals = append(r.Intervals, i)
		if m.report != nil {
			m.report(i)
		}
	}
	if err := m.connect(setup, l, in, out); err != nil {
		l.close()
		return nil, err
	}
	if m.begin != nil {
		m.begin(providersOf(l.conns))
	}

	l.measured = func() error {
		control.SetDeadline(time.Now().Add(grace))
		return exchangeMeasured(in, out)
	}
	here, err := l.run(ctx)
	var there side
	answer := in.Decode(&there)
	switch {
	case there.Error != "": // the server knows the cause; this side has seen only the end
		return nil, errors.Join(fmt.Errorf("at the server: %s", there.Error), err)
	case err != nil:
		return nil, err
	case answer != nil:
		return nil, unexpected(answer)
	}
	r.Here, r.There = *here, there
	return r, r.conclude()
}

// connect agrees on the measurement with the server, and opens its connections.
func (m measurement) connect(ctx context.Context, l *load, in *json.Decoder, out *json.Encoder) error {
	if err := out.Encode(m.spec); err != nil {
		return err
	}
	var offered offer
	if err := in.Decode(&offered); err != nil {
		return unexpected(err)
	}
	if offered.Error != "" {
		return fmt.Errorf("the server refuses: %s", offered.Error)
	}
	for range m.spec.Streams {
		c, err := m.open(ctx, offered.Token)
		if err != nil {
			return fmt.Errorf("stream %d: %w", len(l.conns), err)
		}
		l.conns = append(l.conns, c)
	}
	var start started
	err := in.Decode(&start)
	if start.Error != "" {
		return fmt.Errorf("the server could not start: %s", start.Error)
	}
	if err != nil {
		return unexpected(err)
	}
	return nil
}

// open dials the server, and sends the token that tells what the connection is for.
func (m measurement) open(ctx context.Context, t token) (net.Conn, error) {
	c, err := m.target.dial(ctx, m.policy)
	if err != nil {
		return nil, err
	}
	if err := writeHello(c, t); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// unexpected adds an explanation to errors that a client gets if the server is not sanperf.
func unexpected(err error) error {
	broken := (*net.OpError)(nil) // the server resets the connection if it has left bytes unread
	if err == io.EOF || err == io.ErrUnexpectedEOF || errors.As(err, &broken) && !broken.Timeout() {
		return fmt.Errorf("the server closed the connection; is it sanperf, of this version? (%w)", err)
	}
	if errors.As(err, new(*json.SyntaxError)) || errors.As(err, new(*json.UnmarshalTypeError)) {
		return fmt.Errorf("the server's answer is none of sanperf's: %w", err)
	}
	return fmt.Errorf("the server's answer: %w", err)
}

// conclude checks that both sides agree, and computes the joint figures.
func (r *result) conclude() error {
	here, there := &r.Here, &r.There
	if here.TotalSent != there.TotalReceived || here.TotalReceived != there.TotalSent {
		return fmt.Errorf("bytes lost: sent %d and %d came, sent back %d and %d came",
			here.TotalSent, there.TotalReceived, there.TotalSent, here.TotalReceived)
	}
	if here.Provider != there.Provider {
		return fmt.Errorf("the two ends disagree on the provider: %q here, %q there", here.Provider, there.Provider)
	}
	r.Provider, r.Fallback = here.Provider, here.Fallback
	r.Ways = here.Ways
	r.Ways.add(there.Ways)
	r.SendRate = float64(there.Received) / there.Seconds
	r.RecvRate = float64(here.Received) / here.Seconds
	r.Messages = (r.SendRate + r.RecvRate) / float64(r.Spec.Size)
	if r.Spec.Mode == modePing {
		r.RoundTrip = here.rtt.percentiles()
		r.Messages = float64(r.RoundTrip.Count) / here.Seconds
	}
	for _, s := range []*side{here, there} {
		if moved := s.Sent + s.Received; moved > 0 {
			r.CPUPerGB += s.CPU / float64(moved) * 1e9
		}
	}
	return nil
}
