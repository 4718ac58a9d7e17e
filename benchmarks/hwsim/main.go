// Hwsim measures what connections over RDMA cost in this library, at native speed. It runs two processes
// on the simulated device of test/hwsim in timed mode, which delays bytes by a clock, and moves no payload
// of RDMA. In the same rounds it runs perftest's programs (in C, directly on verbs) on the same device.
//
//	go run ./benchmarks/hwsim [-rounds 7] [-alone] [-spin 1ms] [-disable windows] [-costs=false] [-latency 2000] [-bandwidth 50000000000] [-only TEXT]
//
// It prints a table of medians and quartiles. If others use the machine, -alone gives each process a
// processor, with priority over all other programs, for a second at a time. It needs Linux, a C compiler,
// libibverbs-dev, librdmacm-dev and perftest.
package main

import (
	"flag"
	"fmt"
	"log"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/sanconn/san/test/hwsim"
)

// options are the settings of the simulated fabric, and of the connections on it.
type options struct {
	latency   int   // ns, one way
	bandwidth int64 // bytes/s, each way
	costs     bool  // registering, binding and the like take time
	alone     bool
	spin      time.Duration // session.Config.Spin, at both ends
	disable   string        // one of session.FeatureNames
	plain     bool          // plain TCP instead of the library
}

func main() {
	log.SetFlags(0)
	var o options
	rounds := flag.Int("rounds", 7, "`number` of rounds, each with every figure once")
	flag.IntVar(&o.latency, "latency", 2000, "of the network, one way, in `ns`")
	flag.Int64Var(&o.bandwidth, "bandwidth", 50_000_000_000, "of the network, in `bytes/s`")
	flag.BoolVar(&o.costs, "costs", true, "registering, binding, making queue pairs and wake-ups take time (test/hwsim/README.md)")
	flag.DurationVar(&o.spin, "spin", 0, "how long Reads and Writes poll; 0: the library's default")
	flag.StringVar(&o.disable, "disable", "", "a `mechanism` to switch off, as in SAN_DISABLE")
	flag.BoolVar(&o.alone, "alone", false, "keep a processor for each process, before all other programs (Linux: root)")
	only := flag.String("only", "", "the figures whose name contains this `text`")
	flag.BoolVar(&o.plain, "plain", false, "use TCP alone (what this program starts)")
	files := flag.String("files", "", "serve this `directory` by HTTP (what this program starts)")
	server := flag.Bool("server", false, "serve (what this program starts)")
	client := flag.String("client", "", "`measure` at the address that follows (what this program starts)")
	copies := flag.Bool("copies", false, "copy (what this program starts)")
	flag.Parse()
	var err error
	switch {
	case *copies:
		_, err = fmt.Println(twoCopies())
	case *files != "":
		err = serveFiles(o, *files)
	case *server:
		err = serve(o)
	case *client != "":
		err = measure(o, *client, flag.Arg(0))
	default:
		err = run(o, *rounds, *only)
	}
	if err != nil {
		log.Fatal(err)
	}
}

// A figure is one row of the table: how much the library does, and how much its reference does, in one
// unit.
type figure struct {
	name, unit string
	than       string                                   // the name of the reference
	kind       string                                   // what the client measures: see measure.go
	reference  func(options, []string) (float64, error) // measures the reference, in an environment
	goal       string                                   // for the ratio
}

var figures = []figure{
	{"64 B round trip", "µs", "ib_send_lat", "ping", sendLatency, "≤ 1.6"},
	{"64 B messages", "M/s", "ib_send_bw", "messages", sendRate, "5 M/s"},
	{"64 KiB Writes", "GB/s", "two copies", "write 65536", copies, "≥ 0.6"},
	{"256 KiB Writes, large Reads", "GB/s", "ib_write_bw", "write 262144", writes256K, "32 GB/s"},
	{"512 KiB Writes, large Reads", "GB/s", "ib_write_bw", "write 524288", writes512K, "32 GB/s"},
	{"1 MiB Writes, large Reads", "GB/s", "ib_write_bw", "write 1048576", writes1M, "≥ 0.75"},
	{"4 MiB Writes, large Reads", "GB/s", "ib_write_bw", "write 4194304", writes4M, "≥ 0.9"},
	{"16 MiB Writes, large Reads", "GB/s", "ib_write_bw", "write 16777216", writes16M, "≥ 0.93"},
	{"1 MiB Writes, both ways at once", "GB/s", "ib_write_bw -b", "both 1048576", bothWays1M, "none"},
	{"64 KiB Writes, 64 connections", "GB/s", "two copies", "many 64", copies, "none"},
	{"64 KiB Writes, 1,000 connections", "GB/s", "two copies", "many 1000", copies, "none"},
	{"1 MiB Writes, each of new memory", "GB/s", "through the send buffer", "fresh 1048576", throughBuffer("fresh 1048576"), "≥ 0.91"},
	{"1 MiB Reads, each into new memory", "GB/s", "through the send buffer", "into 1048576", throughBuffer("into 1048576"), "≥ 0.91"},
	{"CPU per GB, 64 KiB Writes", "s", "TCP", "cpu 65536", overTCP("cpu 65536"), "none"},
	{"CPU per GB, 1 MiB Writes", "s", "TCP", "cpu 1048576", overTCP("cpu 1048576"), "none"},
	{"http.FileServer, a file of 64 MiB", "GB/s", "TCP", "file", overTCP("file"), "none"},
}

// rows collects the rounds' measurements of a figure.
type rows struct{ san, reference, ratio []float64 }

func run(o options, rounds int, only string) error {
	measured := make([]rows, len(figures))
	for round := range rounds {
		for i, f := range figures {
			if !strings.Contains(f.name, only) {
				continue
			}
			if err := measured[i].add(f, o); err != nil {
				return fmt.Errorf("round %d, %s: %w", round+1, f.name, err)
			}
		}
	}
	fmt.Printf("| %d ns, %.3g GB/s, costs: %v, %d rounds | library | compared with | | ratio | goal |\n|---|---|---|---|---|---|\n", o.latency, float64(o.bandwidth)/1e9, o.costs, rounds)
	for i, f := range figures {
		if m := &measured[i]; len(m.ratio) > 0 {
			fmt.Printf("| %s | %s %s | %s | %s | %s | %s |\n", f.name, spread(m.san), f.unit, f.than, spread(m.reference), spread(m.ratio), f.goal)
		}
	}
	return nil
}

// add measures a figure once, on a fabric of its own.
func (m *rows) add(f figure, o options) error {
	dir, err := os.MkdirTemp("/dev/shm", "san-hwsim")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	fabric, err := hwsim.In(dir, fmt.Sprintf("latency_ns=%d,bandwidth=%d,no_copy,costs=%d", o.latency, o.bandwidth, digit(o.costs)))
	if err != nil {
		return err
	}
	env := fabric.Programs()
	reference, err := f.reference(o, env)
	if err != nil {
		return fmt.Errorf("%s: %w", f.than, err)
	}
	san, err := f.measure(o, env)
	if err != nil {
		return err
	}
	m.reference = append(m.reference, reference)
	m.san = append(m.san, san)
	m.ratio = append(m.ratio, san/reference)
	return nil
}

// digit returns 1 for true.
func digit(b bool) int {
	if b {
		return 1
	}
	return 0
}

// spread formats a median with its quartiles.
func spread(v []float64) string {
	v = slices.Sorted(slices.Values(v))
	return fmt.Sprintf("%.3g (%.3g–%.3g)", v[len(v)/2], v[len(v)/4], v[len(v)*3/4])
}
