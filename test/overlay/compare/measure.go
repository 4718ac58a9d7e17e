package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/sanconn/san/test/turns"
)

// A measurement is a load on a server, by a number of callers. The first word of its name is the
// server's program.
type measurement struct {
	what, server, load, path string
	callers                  int
	env                      string // VARIABLE=VALUE, for both processes
}

// plainReads makes gRPC read by the connection's Read instead of RawConn.Read.
const plainReads = "GRPC_GO_EXPERIMENTAL_HTTP_FRAMER_READ_BUFFER_POOLING=false"

var measurements = []measurement{
	{"net/http, 1 KiB", "web", "http", "/", 1, ""},
	{"net/http, 1 KiB", "web", "http", "/", 16, ""},
	{"nats, a request of 1 KiB", "nats-server", "nats-request", "", 1, ""},
	{"nats, a request of 1 KiB", "nats-server", "nats-request", "", 16, ""},
	{"nats, 200 messages of 128 bytes", "nats-server", "nats-publish", "", 1, ""},
	{"gRPC, a health check", "grpc", "grpc", "", 1, ""},
	{"gRPC, a health check", "grpc", "grpc", "", 16, ""},
	{"gRPC with plain reads, a health check", "grpc", "grpc", "", 1, plainReads},
	{"gRPC with plain reads, a health check", "grpc", "grpc", "", 16, plainReads},
	{"pgx and pgproto3, 100 rows", "postgres", "postgres", "", 1, ""},
	{"pgx and pgproto3, 100 rows", "postgres", "postgres", "", 16, ""},
	{"etcd, a put by its client", "etcd", "etcd-put", "", 1, ""},
	{"etcd, a put by its client", "etcd", "etcd-put", "", 16, ""},
	{"etcd, a get by its client", "etcd", "etcd-get", "", 1, ""},
	{"etcd, a get by its client", "etcd", "etcd-get", "", 16, ""},
	{"caddy, a file of 10 KiB", "caddy", "http", "/10KiB", 1, ""},
	{"caddy, a file of 10 KiB", "caddy", "http", "/10KiB", 16, ""},
	{"caddy, a file of 1 MiB", "caddy", "http", "/1MiB", 1, ""},
	{"caddy, a file of 1 MiB", "caddy", "http", "/1MiB", 16, ""},
	{"caddy before caddy, a file of 10 KiB", "caddy proxy", "http", "/10KiB", 1, ""},
	{"caddy before caddy, a file of 10 KiB", "caddy proxy", "http", "/10KiB", 16, ""},
	{"caddy before caddy, a file of 1 MiB", "caddy proxy", "http", "/1MiB", 1, ""},
	{"caddy before caddy, a file of 1 MiB", "caddy proxy", "http", "/1MiB", 16, ""},
	{"client_golang's page, as prometheus gets it", "web", "http", "/metrics", 1, ""},
	{"client_golang's page, as prometheus gets it", "web", "http", "/metrics", 16, ""},
}

func (m measurement) name() string {
	if m.callers == 1 {
		return m.what + ", 1 caller"
	}
	return fmt.Sprintf("%s, %d callers", m.what, m.callers)
}

// result is what a load prints.
type result struct {
	turns.Result
	Dialed map[string]int
}

// run makes the measurement, and returns the line of the table.
func (m measurement) run(b *builder, rounds int, length time.Duration) (line string, err error) {
	if name, value, ok := strings.Cut(m.env, "="); ok {
		os.Setenv(name, value)
		defer os.Unsetenv(name)
	}
	var loads [2]process
	for i, way := range ways {
		program, _, _ := strings.Cut(m.server, " ")
		file, err := b.built(program, way)
		if err != nil {
			return "", err
		}
		server, address, err := servers[m.server](file, b.dir)
		if err != nil {
			return "", err
		}
		defer server.end()
		if m.load == "http" {
			address = "http://" + address + m.path
		}
		if file, err = b.built("load", way); err != nil {
			return "", err
		}
		if loads[i], err = start(file, m.load, address, fmt.Sprint(m.callers)); err != nil {
			return "", err
		}
		defer loads[i].end()
	}
	for _, load := range loads { // makes the connections, warms up, and lets them move
		if _, err := load.round(max(length, time.Second)); err != nil {
			return "", err
		}
	}
	var all [][2]result
	for round := range rounds {
		var r [2]result
		for i := range r {
			i := (i + round) % 2
			if r[i], err = loads[i].round(length); err != nil {
				return "", err
			}
		}
		all = append(all, r)
	}
	return row(m.name(), all), nil
}

// round makes a load run for some time.
func (p process) round(length time.Duration) (r result, err error) {
	if _, err = fmt.Fprintln(p.in, length); err != nil {
		return r, err
	}
	line, err := p.out.ReadBytes('\n')
	if err != nil {
		return r, err
	}
	return r, json.Unmarshal(line, &r)
}

// row returns a line of the table. After a ratio, which is the median of the rounds' ratios, are their
// quartiles.
func row(name string, rounds [][2]result) string {
	rate := func(i int) string {
		_, median, _ := turns.Quartiles(rounds, func(r [2]result) float64 { return r[i].Rate })
		return turns.ThreeDigits(median)
	}
	p99 := func(i int) string {
		_, median, _ := turns.Quartiles(rounds, func(r [2]result) float64 { return float64(r[i].P99) })
		return turns.ThreeDigits(median/1000) + " µs"
	}
	ratio := func(f func([2]result) float64) string {
		low, median, high := turns.Quartiles(rounds, f)
		return fmt.Sprintf("**%.2f** (%.2f–%.2f)", median, low, high)
	}
	return fmt.Sprintf("| %s | %s | %s | %s | %s | %s | %s | %s |", name, rate(0), rate(1),
		ratio(func(r [2]result) float64 { return r[1].Rate / r[0].Rate }), p99(0), p99(1),
		ratio(func(r [2]result) float64 { return float64(r[0].P99) / float64(r[1].P99) }),
		carriers(rounds[len(rounds)-1][1].Dialed))
}

// carriers returns what carried the load's connections at the end, if it was built by san.
func carriers(dialed map[string]int) string {
	var all []string
	for _, name := range slices.Sorted(maps.Keys(dialed)) {
		if dialed[name] > 0 {
			all = append(all, name)
		}
	}
	return strings.Join(all, ", ")
}
