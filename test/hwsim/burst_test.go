//go:build linux && cgo

package hwsim_test

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sanconn/san"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/test/hwsim"
)

var burst = flag.Int("burst", 100, "connections that BenchmarkBurst has move at once")

// BenchmarkBurst dials many connections at once, and waits until they have moved: with queue pairs that
// take as long to make as a NIC's, and with queue pairs that take no time.
func BenchmarkBurst(b *testing.B) {
	for _, pairs := range []struct{ name, costs string }{{"NIC", ""}, {"free", ",qp_ns=0,slow_qp_ns=0"}} {
		b.Run(pairs.name, func(b *testing.B) {
			var sum time.Duration
			for range b.N {
				f := hwsim.New(b, "latency_ns=2000"+pairs.costs)
				out := runOn(b, f, "TestAllMove", 1, nil, fmt.Sprintf("-burst=%d", *burst))
				_, after, _ := bytes.Cut(out, []byte(movedIn))
				took, _, _ := bytes.Cut(after, []byte("\n"))
				d, err := time.ParseDuration(string(took))
				if err != nil {
					b.Fatalf("%v\n%s", err, out)
				}
				sum += d
			}
			b.ReportMetric(float64(sum.Milliseconds())/float64(b.N), "ms/burst")
		})
	}
}

var apart = flag.Duration("apart", 0, "pause between the dials that BenchmarkDialRequire makes")

// BenchmarkDialRequire dials connections with Require, and closes them, one after the other. It measures
// how long a program waits for its Dial.
func BenchmarkDialRequire(b *testing.B) {
	for _, pause := range []time.Duration{0, 20 * time.Millisecond} {
		b.Run(fmt.Sprintf("%v apart", pause), func(b *testing.B) {
			out := runOn(b, hwsim.New(b, "latency_ns=2000"), "TestDialRequire", 1, nil, fmt.Sprintf("-burst=%d", b.N), fmt.Sprintf("-apart=%v", pause))
			_, after, _ := bytes.Cut(out, []byte(movedIn))
			var median, late float64
			if _, err := fmt.Sscan(string(after), &median, &late); err != nil {
				b.Fatalf("%v\n%s", err, out)
			}
			b.ReportMetric(0, "ns/op") // most of which would be the pause
			b.ReportMetric(median, "µs-median")
			b.ReportMetric(late, "µs-p95")
		})
	}
}

func TestDialRequire(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // BenchmarkDialRequire runs it in a process of its own
	}
	var e echo
	l := listen(t, e.serve)
	d := san.Dialer{Policy: san.Require}
	dial := func() net.Conn {
		c, err := d.DialContext(t.Context(), "tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		if info := san.InfoOf(c); info.Provider != "verbs" {
			t.Fatalf("%+v", info)
		}
		return c
	}
	defer dial().Close()
	testenv.Eventually(t, patience, func() error {
		if n := hwsim.Objects(t)["queue pairs"]; n > 2+ready {
			return fmt.Errorf("%d queue pairs, as the probe of windows has some", n)
		}
		return nil
	})
	var took []time.Duration
	for range *burst {
		time.Sleep(*apart)
		began := time.Now()
		c := dial()
		took = append(took, time.Since(began))
		c.Close()
	}
	slices.Sort(took)
	t.Logf("%s%d %d", movedIn, took[len(took)/2].Microseconds(), took[len(took)*95/100].Microseconds())
}

// ready is how many queue pairs a device has ready.
const ready = 4

// TestBurst is BenchmarkBurst with fewer connections.
func TestBurst(t *testing.T) {
	if testenv.Device() != "" {
		return // this is such a process, or the lane of real drivers
	}
	runOn(t, hwsim.New(t, "latency_ns=2000"), "TestAllMove", 1, nil, "-burst=300")
}

const movedIn = "moved in " // printed before the time that it took

// All of many connections that are dialed at once move.
func TestAllMove(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // TestBurst and BenchmarkBurst run it in processes of their own
	}
	var e echo
	l := listen(t, e.serve)
	if _, err := dial(t, l); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, patience, func() error {
		if n := hwsim.Objects(t)["queue pairs"]; n > 2+ready {
			return fmt.Errorf("%d queue pairs, as the probe of windows has some", n)
		}
		return nil
	})
	d := san.Dialer{Options: sanconn.Options{MoveAtOnce: true}}
	conns := make([]*sanconn.Conn, *burst)
	began := time.Now()
	var all sync.WaitGroup
	for i := range conns {
		all.Go(func() {
			c, err := d.DialContext(context.Background(), "tcp", l.Addr().String())
			if err != nil {
				t.Error(err)
				return
			}
			conns[i] = c.(*sanconn.Conn)
		})
	}
	all.Wait()
	defer func() {
		for _, c := range conns {
			if c != nil {
				c.Close()
			}
		}
	}()
	if t.Failed() {
		return
	}
	// The connections are used, because an attempt to move that has failed is repeated after more use.
	testenv.Eventually(t, patience, func() error {
		var err error
		for i, c := range conns {
			info := san.InfoOf(c)
			if info.Provider == "verbs" {
				continue
			}
			err = fmt.Errorf("one that has not moved: %+v; all: %+v", info, san.Stats())
			if err := roundTrip(c, []byte{byte(i)}); err != nil {
				t.Fatal(err)
			}
		}
		return err
	})
	t.Logf("%s%v", movedIn, time.Since(began))
	if again := san.Stats().Fallbacks; len(again) > 0 {
		t.Logf("moves that have failed at first: %v", again)
	}
}
