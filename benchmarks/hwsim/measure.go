package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sanconn/san/provider/verbs"
	"github.com/sanconn/san/session"
	"github.com/sanconn/san/test/hwsim/conns"
)

const (
	small    = 64 // bytes of a message
	pings    = 10000
	measured = 200 * time.Millisecond // at least
)

// measure starts a server and a client on the fabric and returns what the client prints.
func (f figure) measure(o options, env []string) (float64, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	self, err := os.Executable()
	if err != nil {
		return 0, err
	}
	server := o.command(ctx, 0, self, "-spin", o.spin.String(), "-disable", o.disable, "-server")
	server.Env, server.Stderr = env, os.Stderr
	in, err := server.StdinPipe()
	if err != nil {
		return 0, err
	}
	out, err := server.StdoutPipe()
	if err != nil {
		return 0, err
	}
	if err := server.Start(); err != nil {
		return 0, err
	}
	defer server.Wait()
	defer in.Close()
	address, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		return 0, fmt.Errorf("server: %w", err)
	}
	client := o.command(ctx, 1, self, "-spin", o.spin.String(), "-disable", o.disable, "-client", f.kind, strings.TrimSpace(address))
	client.Env, client.Stderr = env, os.Stderr
	text, err := client.Output()
	if err != nil {
		return 0, fmt.Errorf("client: %w", err)
	}
	return strconv.ParseFloat(strings.TrimSpace(string(text)), 64)
}

// A request is what a client begins with, and again after each answer.
type request struct {
	Echo  uint64 // 1: each message is sent back
	Read  uint64 // bytes that a Read has room for
	Total uint64 // bytes; then there is one byte as an answer, unless they are echoed
}

// conns is how connections are made.
func (o options) conns() conns.Config {
	off := session.FeatureNames[o.disable]
	return conns.Config{Verbs: verbs.Config{Disable: off}, Session: session.Config{Spin: o.spin, Disable: off}}
}

// serve serves until standard input ends.
func serve(o options) error {
	l, err := conns.Listen(o.conns())
	if err != nil {
		return err
	}
	defer l.Close()
	fmt.Println(l.Addr())
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				for answer(c) == nil {
				}
			}()
		}
	}()
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

func answer(c net.Conn) error {
	var r request
	if err := binary.Read(c, binary.LittleEndian, &r); err != nil {
		return err
	}
	b := make([]byte, r.Read)
	for got := uint64(0); got < r.Total; {
		n, err := c.Read(b)
		if err != nil {
			return err
		}
		got += uint64(n)
		if r.Echo == 1 {
			if _, err := c.Write(b[:n]); err != nil {
				return err
			}
		}
	}
	if r.Echo == 1 {
		return nil
	}
	_, err := c.Write(b[:1])
	return err
}

// measure prints one figure.
func measure(o options, what, address string) error {
	at, err := netip.ParseAddrPort(address)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := conns.Dial(ctx, o.conns(), at)
	if err != nil {
		return err
	}
	defer c.Close()
	var value float64
	kind, number, _ := strings.Cut(what, " ")
	switch kind {
	case "ping":
		value, err = ping(c)
	case "messages":
		value, err = stream(c, small, 64<<10)
		value /= small * 1e6
	case "write":
		size, _ := strconv.Atoi(number)
		value, err = stream(c, size, max(size, 1<<20))
		value /= 1e9
	default:
		err = fmt.Errorf("-client %s is not known", what)
	}
	if err != nil {
		return err
	}
	_, err = fmt.Println(value)
	return err
}

// begin announces what follows.
func begin(c net.Conn, r request) error { return binary.Write(c, binary.LittleEndian, r) }

// ping returns the median round trip in µs.
func ping(c net.Conn) (float64, error) {
	if err := begin(c, request{Echo: 1, Read: small, Total: pings * small}); err != nil {
		return 0, err
	}
	b := make([]byte, small)
	times := make([]time.Duration, pings)
	for i := range times {
		start := time.Now()
		if _, err := c.Write(b); err != nil {
			return 0, err
		}
		if _, err := io.ReadFull(c, b); err != nil {
			return 0, err
		}
		times[i] = time.Since(start)
	}
	slices.Sort(times)
	return float64(times[pings/2].Nanoseconds()) / 1e3, nil
}

// stream returns bytes a second, of Writes from one buffer into Reads of one.
func stream(c net.Conn, size, read int) (float64, error) {
	b := make([]byte, size)
	for count := 16; ; count *= 2 { // the shorter ones warm up
		took, err := send(c, b, read, count)
		if err != nil || took >= measured {
			return float64(count*size) / took.Seconds(), err
		}
	}
}

// send is how long Writes take until the other end has all.
func send(c net.Conn, b []byte, read, count int) (time.Duration, error) {
	if err := begin(c, request{Read: uint64(read), Total: uint64(count * len(b))}); err != nil {
		return 0, err
	}
	start := time.Now()
	for range count {
		if _, err := c.Write(b); err != nil {
			return 0, err
		}
	}
	_, err := io.ReadFull(c, b[:1])
	return time.Since(start), err
}
