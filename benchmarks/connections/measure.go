package main

import (
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"time"
)

const (
	idleTime   = 2 * time.Second
	activeTime = 2 * time.Second
	pingTime   = 500 * time.Millisecond

	// onePer is the number of connections for each active one, which makes a round trip per period.
	onePer = 100
	period = 10 * time.Millisecond
)

// A point is what connections cost, if there are so many.
type point struct {
	connections int
	connect     time.Duration // to connect one, and one round trip
	memory      int64         // bytes of a connection, at both ends together
	idle        float64       // processors that all connections use while nothing moves, at both ends together
	alone       latency       // of round trips by one connection, the others idle
	active      latency       // of round trips by one connection in a hundred, at the same time
	activeCPU   time.Duration // of such a round trip, at both ends together
}

type latency struct{ p50, p99 time.Duration }

// measure returns a point for each number of connections. The numbers must rise.
func measure(tr transport, numbers []int) (points []point, err error) {
	server, err := start(tr)
	if err != nil {
		return nil, err
	}
	defer server.end()
	var conns []net.Conn
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	memory, err := server.both("memory") // before there are connections
	if err != nil {
		return nil, err
	}
	for _, n := range numbers {
		p := point{connections: n}
		start, had := time.Now(), len(conns)
		for len(conns) < n {
			c, err := tr.dial(server.address)
			if err != nil {
				return nil, fmt.Errorf("connection %d: %w", len(conns)+1, err)
			}
			conns = append(conns, c)
			if _, err := roundTrip(c); err != nil {
				return nil, err
			}
		}
		p.connect = time.Since(start) / time.Duration(n-had)
		if err := p.use(server, conns, memory); err != nil {
			return nil, err
		}
		points = append(points, p)
	}
	return points, nil
}

// use fills in what the connections cost. before is the memory used before there were any.
func (p *point) use(server *peer, conns []net.Conn, before int64) error {
	memory, err := server.both("memory")
	if err != nil {
		return err
	}
	p.memory = (memory - before) / int64(len(conns))

	cpu, err := server.processor(func() error {
		time.Sleep(idleTime)
		return nil
	})
	if err != nil {
		return err
	}
	p.idle = float64(cpu) / float64(idleTime)

	var times []time.Duration
	for end := time.Now().Add(pingTime); time.Now().Before(end); {
		took, err := roundTrip(conns[len(conns)/2])
		if err != nil {
			return err
		}
		times = append(times, took)
	}
	p.alone = latencyOf(times)

	cpu, err = server.processor(func() error {
		times, err = someActive(conns)
		return err
	})
	if err != nil {
		return err
	}
	p.active = latencyOf(times)
	p.activeCPU = cpu / time.Duration(len(times))
	return nil
}

// processor returns the processor time that both processes use during a function.
func (p *peer) processor(meanwhile func() error) (time.Duration, error) {
	before, err := p.both("processor")
	if err != nil {
		return 0, err
	}
	if err := meanwhile(); err != nil {
		return 0, err
	}
	after, err := p.both("processor")
	return time.Duration(after - before), err
}

// someActive makes a round trip per period on one in a hundred connections.
func someActive(conns []net.Conn) ([]time.Duration, error) {
	n := max(1, len(conns)/onePer)
	times := make([][]time.Duration, n)
	errs := make([]error, n)
	var all sync.WaitGroup
	for i := range n {
		c := conns[i*len(conns)/n]
		all.Go(func() {
			time.Sleep(period * time.Duration(i) / time.Duration(n)) // so that they do not all begin at the same time
			tick := time.NewTicker(period)
			defer tick.Stop()
			for end := time.Now().Add(activeTime); time.Now().Before(end); <-tick.C {
				took, err := roundTrip(c)
				if err != nil {
					errs[i] = err
					return
				}
				times[i] = append(times[i], took)
			}
		})
	}
	all.Wait()
	for _, err := range errs {
		if err != nil {
			return nil, err
		}
	}
	return slices.Concat(times...), nil
}

func roundTrip(c net.Conn) (time.Duration, error) {
	var b [messageSize]byte
	start := time.Now()
	if _, err := c.Write(b[:]); err != nil {
		return 0, err
	}
	_, err := io.ReadFull(c, b[:])
	return time.Since(start), err
}

func latencyOf(times []time.Duration) latency {
	slices.Sort(times)
	return latency{times[len(times)/2], times[len(times)*99/100]}
}
