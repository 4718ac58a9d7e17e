package main

import (
	"bufio"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/sanconn/san"
	"github.com/sanconn/san/test/hwsim"
)

// What is measured by default. Many short rounds bring the compared measurements close
// together in time, and a few slow rounds do not change the median. In all it takes about
// a minute.
const (
	defaultRounds     = 11
	defaultRoundTime  = 100 * time.Millisecond
	defaultRoundStart = 40 * time.Millisecond // warm-up, in which rings and caches grow
)

// A contender is one column: a way to the server.
type contender struct {
	name   string // "TCP", "unix", "SAN"
	target target
	web    *target // for HTTP; nil: HTTP and short connections are not measured
	policy san.Policy
}

// A workload is one measurement that each contender makes in each round.
type workload struct {
	mode  mode
	size  int
	conns int // at a time
}

var workloads = []workload{
	{modePing, 64, 1},
	{modeSend, 64, 1},
	{modeSend, 4 << 10, 1},
	{modeSend, 64 << 10, 1},
	{modeSend, 1 << 20, 1},
	{modeSend, 16 << 20, 1}, // over RDMA these go from the program's own memory on any host
	{modeConnect, 0, 1},
	{modeConnect, 0, 8},
	{modeExchange, shortSize, 1},
	{modeExchange, shortSize, 8},
	{modeHTTP, shortSize, 1},
	{modeHTTP, shortSize, 8},
}

// workloadsOf returns the workloads that the contenders can run.
func workloadsOf(contenders []contender) (all []workload) {
	for _, w := range workloads {
		if contenders[0].web != nil || !w.mode.short() {
			all = append(all, w)
		}
	}
	return all
}

var shortNames = map[mode]string{
	modeConnect:  "connect and close",
	modeExchange: "connect, 100 B there and back",
	modeHTTP:     "HTTP, a connection each",
}

// A figure is one row: a value of a workload's result.
type figure struct {
	name   string
	of     workload
	unit   string
	lower  bool // lower is better
	value  func(*result) float64
	format func(float64) string
}

// tableFigures returns the table's figures in their order.
func tableFigures(workloads []workload) []figure {
	var all []figure
	for _, w := range workloads {
		size := byteSize(w.size).String()
		switch {
		case w.mode.short():
			all = append(all,
				figure{fmt.Sprintf("%s, %d at a time", shortNames[w.mode], w.conns), w, "1/s", false, func(r *result) float64 { return r.Messages },
					func(x float64) string { return count(x) + "/s" }})
		case w.mode == modePing:
			all = append(all,
				figure{"round trip " + size + ", p50", w, "us", true, func(r *result) float64 { return r.RoundTrip.P50 }, micros},
				figure{"round trip " + size + ", p99", w, "us", true, func(r *result) float64 { return r.RoundTrip.P99 }, micros})
		case w.size <= smallMessage:
			all = append(all,
				figure{"messages of " + size, w, "1/s", false, func(r *result) float64 { return r.Messages },
					func(x float64) string { return count(x) + "/s" }})
		default:
			all = append(all,
				figure{"stream of " + size + " writes", w, "B/s", false, func(r *result) float64 { return r.SendRate }, rate})
		}
	}
	for _, w := range workloads {
		if w.mode == modeSend && w.size > smallMessage {
			all = append(all,
				figure{"CPU per GB, " + byteSize(w.size).String() + " writes", w, "s/GB", true, func(r *result) float64 { return r.CPUPerGB },
					func(x float64) string { return digits(x) + " s" }})
		}
	}
	return all
}

// smallMessage is the size up to which messages per second mean more than bytes.
const smallMessage = 512

// runCompare is the command "compare", the main job.
func runCompare(ctx context.Context, std stdio, args []string) error {
	fs := newFlagSet(std, "compare")
	length, warmup := span(defaultRoundTime), span(defaultRoundStart)
	fs.Var(&length, "time", "`time` of one measurement; there are rounds × workloads × transports of them")
	fs.Var(&warmup, "warmup", "`time` that each measurement runs before it counts")
	read := defaultRead
	fs.Var(&read, "read", "`bytes` that each Read has room for")
	rounds := fs.Int("rounds", defaultRounds, "`number` of rounds; each measures everything once, so that neighbours in time are compared")
	require := fs.Bool("require", false, "fail where a connection of the SAN column does not move")
	asJSON := fs.Bool("json", false, "print one JSON document, every round's values included")
	profile := fs.String("simulate", "", "`family` of a simulated RDMA device to run the SAN column on: "+strings.Join(hwsim.Profiles(), ", "))
	rest, err := parseArgs(fs, args, 1)
	if err != nil {
		return err
	}
	if *rounds < 1 || *rounds > 1000 {
		return usagef("compare: %d rounds are outside 1 to 1000", *rounds)
	}
	simulated := hwsim.Settings()
	if *profile != "" && simulated == "" {
		if len(rest) > 0 {
			return usagef("compare: -simulate has its own server, as the device is in this host's memory")
		}
		return simulate(ctx, std, *profile, args)
	}

	var contenders []contender
	if len(rest) == 1 {
		t, err := parseTarget(rest[0])
		if err == nil && t.transport == "unix" {
			err = errors.New("a unix socket has no TCP or SAN to be compared with")
		}
		if err != nil {
			return usagef("compare: %w", err)
		}
		contenders = []contender{
			{name: "TCP", target: target{"tcp", t.address}},
			{name: "SAN", target: target{"san", t.address}, policy: policyOf(*require)},
		}
	} else {
		child, err := startServer(ctx, std)
		if err != nil {
			return err
		}
		defer child.stop()
		contenders = child.contenders(policyOf(*require))
	}

	c := newComparison(contenders, *rounds, time.Duration(length), read)
	c.Simulated = simulated
	if err := c.measure(ctx, std, contenders, time.Duration(warmup)); err != nil {
		return err
	}
	if *asJSON {
		return printJSON(std.out, c)
	}
	c.print(std.out)
	return nil
}

// measure runs all rounds.
func (c *comparison) measure(ctx context.Context, std stdio, contenders []contender, warmup time.Duration) error {
	for round := range c.Rounds {
		if terminal(std.err) {
			fmt.Fprintf(std.err, "\rround %d of %d ", round+1, c.Rounds)
		}
		if err := c.round(ctx, round, contenders, warmup); err != nil {
			return err
		}
	}
	if terminal(std.err) {
		fmt.Fprint(std.err, "\r                    \r")
	}
	c.conclude()
	return nil
}

// terminal reports whether w may be a terminal.
func terminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// round makes every measurement once. The contenders of a workload run right after each
// other, and each round starts with another one.
func (c *comparison) round(ctx context.Context, round int, contenders []contender, warmup time.Duration) error {
	for _, w := range workloadsOf(contenders) {
		for i := range contenders {
			who := contenders[(i+round)%len(contenders)]
			m := measurement{target: who.target, policy: who.policy, spec: spec{
				Mode: w.mode, Size: w.size, Read: c.Read, Streams: w.conns, Warmup: warmup.Seconds(), Time: c.Seconds,
			}}
			if w.mode == modeHTTP {
				m.target = *who.web
			}
			r, err := m.run(ctx)
			if err != nil {
				return err
			}
			c.add(who.name, w, r)
			c.addWays(w, r.Ways)
		}
	}
	return nil
}

// A child is the server process that the main job starts.
type child struct {
	cmd   *exec.Cmd
	stdin io.Closer
	dir   string   // of the unix sockets, if they are files
	ready []target // for san, unix and tcp, and the same again for HTTP
}

// startServer starts this program again, as a server on loopback, and waits until it
// listens.
func startServer(ctx context.Context, std stdio) (*child, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c := new(child)
	socket := "@sanperf-" + rand.Text() // an abstract name: no file that needs a directory or stays behind
	if runtime.GOOS != "linux" {
		if c.dir, err = os.MkdirTemp("", "sanperf"); err != nil {
			return nil, err
		}
		socket = filepath.Join(c.dir, "s")
	}
	args := []string{"server", "-quiet", "-stdin"}
	for flag, suffix := range map[string]string{"-l": "", "-http": "h"} {
		for _, t := range []target{{"san", loopback}, {"unix", socket + suffix}, {"tcp", loopback}} {
			args = append(args, flag, t.String())
		}
	}
	const listens = 6
	c.cmd = exec.Command(self, args...)
	c.cmd.Stderr = std.err
	out, err := c.cmd.StdoutPipe()
	if err == nil {
		c.stdin, err = c.cmd.StdinPipe()
	}
	if err == nil {
		err = c.cmd.Start()
	}
	if err != nil {
		os.RemoveAll(c.dir)
		return nil, fmt.Errorf("cannot start the server process: %w", err)
	}

	slow := time.AfterFunc(setupTime, func() { c.cmd.Process.Kill() })
	defer slow.Stop()
	defer context.AfterFunc(ctx, func() { c.cmd.Process.Kill() })()
	for lines := bufio.NewScanner(out); len(c.ready) < listens && lines.Scan(); {
		if t, ok := listening(lines.Text()); ok {
			c.ready = append(c.ready, t)
		}
	}
	if len(c.ready) < listens {
		return nil, fmt.Errorf("the server process did not start: %w", c.stop())
	}
	return c, nil
}

// loopback is where the server process listens.
const loopback = "127.0.0.1:0"

// contenders returns the ways to the child's listeners. TCP and unix are package net's at both ends.
func (c *child) contenders(policy san.Policy) []contender {
	const san, unix, tcp, web = 0, 1, 2, 3
	return []contender{
		{name: "TCP", target: c.ready[tcp], web: &c.ready[web+tcp]},
		{name: "unix", target: c.ready[unix], web: &c.ready[web+unix]},
		{name: "SAN", target: c.ready[san], web: &c.ready[web+san], policy: policy},
	}
}

// stop ends the child by closing its standard input, or else by force.
func (c *child) stop() error {
	c.stdin.Close()
	stuck := time.AfterFunc(setupTime, func() { c.cmd.Process.Kill() })
	defer stuck.Stop()
	err := c.cmd.Wait()
	os.RemoveAll(c.dir)
	return err
}

// newComparison prepares an empty table.
func newComparison(contenders []contender, rounds int, length time.Duration, read byteSize) *comparison {
	c := &comparison{
		OS: runtime.GOOS, Arch: runtime.GOARCH, Go: runtime.Version(), CPUs: runtime.NumCPU(),
		Rounds: rounds, Seconds: length.Seconds(), Read: int(read),
	}
	for _, f := range tableFigures(workloadsOf(contenders)) {
		row := &tableRow{figure: f, Name: f.name, Unit: f.unit, Better: "higher"}
		if f.lower {
			row.Better = "lower"
		}
		for _, who := range contenders {
			row.Cells = append(row.Cells, &cell{Contender: who.name})
		}
		c.Rows = append(c.Rows, row)
	}
	return c
}
