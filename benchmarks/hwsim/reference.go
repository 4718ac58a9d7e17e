package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sanconn/san/test/hwsim/conns"
)

// patience bounds each program. A thousand queue pairs take some time, and others may use the machine.
const patience = 3 * time.Minute

const anywhere = -1 // on any processor

// command returns a program to be run on one of the two processors, if these are reserved (-alone).
func (o options) command(ctx context.Context, processor int, name string, args ...string) *exec.Cmd {
	if !o.alone {
		return exec.CommandContext(ctx, name, args...)
	}
	args = append([]string{"--rr", "1", name}, args...)
	if processor == anywhere {
		return exec.CommandContext(ctx, "chrt", args...)
	}
	return exec.CommandContext(ctx, "taskset", append([]string{"-c", strconv.Itoa(processor), "chrt"}, args...)...)
}

// sendLatency returns the round trip in µs that perftest measures. perftest prints half of it.
func sendLatency(o options, env []string) (float64, error) {
	const typical = 4 // the column with the median
	us, err := perftest(o, env, typical, "ib_send_lat", "-s", "64", "-n", "20000")
	return 2 * us, err
}

// sendRate returns millions of messages a second.
func sendRate(o options, env []string) (float64, error) {
	const rate = 4 // the column with the rate
	return perftest(o, env, rate, "ib_send_bw", "-s", "64", "-n", "1000000")
}

// writeBandwidth returns GB/s of RDMA writes only.
func writeBandwidth(o options, env []string, size, count string, more ...string) (float64, error) {
	const average = 3 // the column with the average, in MiB/s
	mib, err := perftest(o, env, average, "ib_write_bw", append(more, "-s", size, "-n", count)...)
	return mib * (1 << 20) / 1e9, err
}

func writes256K(o options, env []string) (float64, error) {
	return writeBandwidth(o, env, "262144", "20000")
}

func writes512K(o options, env []string) (float64, error) {
	return writeBandwidth(o, env, "524288", "10000")
}

func writes1M(o options, env []string) (float64, error) {
	return writeBandwidth(o, env, "1048576", "5000")
}

func writes4M(o options, env []string) (float64, error) {
	return writeBandwidth(o, env, "4194304", "2000")
}

func writes16M(o options, env []string) (float64, error) {
	return writeBandwidth(o, env, "16777216", "500")
}

func bothWays1M(o options, env []string) (float64, error) {
	return writeBandwidth(o, env, "1048576", "5000", "-b")
}

// throughBuffer measures the library itself, with no Write of 1 MiB going from its own memory.
func throughBuffer(kind string) func(options, []string) (float64, error) {
	return func(o options, env []string) (float64, error) {
		o.disable = "windows"
		return figure{kind: kind}.measure(o, env)
	}
}

// overTCP measures this host's TCP.
func overTCP(kind string) func(options, []string) (float64, error) {
	return func(o options, env []string) (float64, error) {
		o.plain = true
		return figure{kind: kind}.measure(o, env)
	}
}

// perftest runs one of perftest's programs, as a server and as a client, and returns a column of the
// only row that the client prints.
func perftest(o options, env []string, column int, program string, args ...string) (float64, error) {
	if _, err := exec.LookPath(program); err != nil { // chrt would hide that it is missing
		return 0, fmt.Errorf("package perftest: %w", err)
	}
	port, err := conns.FreePort()
	if err != nil {
		return 0, err
	}
	at := strconv.Itoa(int(port))
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	command := func(processor int, more ...string) *exec.Cmd {
		c := o.command(ctx, processor, program, append(append(args[:len(args):len(args)], "-p", at), more...)...)
		c.Env = env
		return c
	}
	server := command(0)
	if err := server.Start(); err != nil {
		return 0, err
	}
	defer server.Wait()
	defer cancel()
	for { // until the server listens
		out, err := command(1, "localhost").CombinedOutput()
		if ctx.Err() != nil {
			return 0, fmt.Errorf("%s: %w\n%s", program, ctx.Err(), out)
		}
		if err == nil {
			return cell(string(out), column)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// cell returns a column of the last row of numbers.
func cell(out string, column int) (float64, error) {
	lines := strings.Split(out, "\n")
	for i := len(lines) - 1; i >= 0; i-- {
		fields := strings.Fields(lines[i])
		if len(fields) <= column {
			continue
		}
		if _, err := strconv.Atoi(fields[0]); err == nil {
			return strconv.ParseFloat(fields[column], 64)
		}
	}
	return 0, fmt.Errorf("no figures in:\n%s", out)
}

func copies(o options, env []string) (float64, error) {
	self, err := os.Executable()
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	out, err := o.command(ctx, anywhere, self, "-copies").Output()
	if err != nil {
		return 0, err
	}
	return strconv.ParseFloat(strings.TrimSpace(string(out)), 64)
}

// twoCopies returns the rate, in GB/s, of two processors that each copy all bytes once, as both ends of
// a connection do: one from the program's buffer to registered memory, the other from registered memory
// to its program's buffer.
func twoCopies() float64 {
	const (
		write  = 64 << 10
		buffer = 1 << 20
		total  = 1 << 30
	)
	start := time.Now()
	var both sync.WaitGroup
	for receives := range 2 {
		both.Go(func() {
			program, registered := make([]byte, write), make([]byte, buffer)
			for at := 0; at < total; at += write {
				part := registered[at%buffer:][:write]
				if receives == 1 {
					copy(program, part)
				} else {
					copy(part, program)
				}
			}
		})
	}
	both.Wait()
	return total / time.Since(start).Seconds() / 1e9
}
