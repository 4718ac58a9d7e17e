package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sanconn/san/benchmarks/internal/cputime"
	"github.com/sanconn/san/provider/verbs"
	"github.com/sanconn/san/session"
	"github.com/sanconn/san/test/hwsim/conns"
)

const (
	small    = 64 // bytes of a small message
	pings    = 10000
	measured = 200 * time.Millisecond // the shortest time that counts

	// warm is how many bytes each connection moves before it is measured. The first use of a send buffer
	// touches its pages for the first time. With a real device they would be pinned at registration;
	// here the kernel allocates them one by one: a page fault takes up to 14 µs in a virtual machine, a
	// copy of the page's bytes 0.2.
	warm = 16 << 20
)

// measure starts a server and a client on the fabric, and returns the figure that the client prints.
func (f figure) measure(o options, env []string) (float64, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	self, err := os.Executable()
	if err != nil {
		return 0, err
	}
	how := []string{"-spin", o.spin.String(), "-disable", o.disable, "-plain=" + strconv.FormatBool(o.plain)}
	serve := []string{"-server"}
	if f.kind == "file" {
		dir, err := os.MkdirTemp("/dev/shm", "san-hwsim")
		if err != nil {
			return 0, err
		}
		defer os.RemoveAll(dir)
		if err := os.WriteFile(filepath.Join(dir, fileName), make([]byte, fileSize), 0o600); err != nil {
			return 0, err
		}
		serve = []string{"-files", dir}
	}
	server := o.command(ctx, 0, self, append(how, serve...)...)
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
	client := o.command(ctx, 1, self, append(how, "-client", f.kind, strings.TrimSpace(address))...)
	client.Env, client.Stderr = env, os.Stderr
	text, err := client.Output()
	if err != nil {
		return 0, fmt.Errorf("client: %w", err)
	}
	return strconv.ParseFloat(strings.TrimSpace(string(text)), 64)
}

// A request is the first message of a client, and again the next one after each answer.
type request struct {
	Kind  uint64 // one of the kinds below
	Read  uint64 // bytes that a Read of the server has room for
	Total uint64 // bytes that the client sends; the answer is one byte, unless they are echoed
}

const (
	takes   = iota // the server reads the bytes
	echoes         // the server sends each message back
	sends          // the server sends as many bytes at the same time, in Writes of Read bytes
	tellCPU        // the server sends its processor time so far, in ns
	fills          // the server reads each Read bytes into new memory
)

// conns returns how connections are made.
func (o options) conns() conns.Config {
	off := session.FeatureNames[o.disable]
	return conns.Config{Verbs: verbs.Config{Disable: off}, Session: session.Config{Spin: o.spin, Disable: off}}
}

func (o options) listen() (net.Listener, error) {
	if o.plain {
		return net.Listen("tcp", "127.0.0.1:0")
	}
	return conns.Listen(o.conns())
}

func (o options) dial(ctx context.Context, address string) (net.Conn, error) {
	if o.plain {
		return new(net.Dialer).DialContext(ctx, "tcp", address)
	}
	at, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil, err
	}
	return conns.Dial(ctx, o.conns(), at)
}

// serve serves until standard input ends.
func serve(o options) error {
	l, err := o.listen()
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
				var room []byte
				for answer(c, &room) == nil {
				}
			}()
		}
	}()
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// answer serves one request. It reads into room, which is kept: what is measured is a program that reads
// into one buffer, whose pages the earlier, shorter streams have already touched.
func answer(c net.Conn, room *[]byte) error {
	var r request
	if err := binary.Read(c, binary.LittleEndian, &r); err != nil {
		return err
	}
	if r.Kind == tellCPU {
		return binary.Write(c, binary.LittleEndian, uint64(cputime.OfProcess()))
	}
	if uint64(len(*room)) != r.Read {
		*room = make([]byte, r.Read)
		clear(*room)
	}
	b := *room
	sent := make(chan error, 1)
	go func() { // returns at the latest when the connection ends
		var err error
		if r.Kind == sends {
			err = write(c, make([]byte, r.Read), int(r.Total/r.Read))
		}
		sent <- err
	}()
	for got := uint64(0); got < r.Total; {
		at := uint64(0)
		if r.Kind == fills {
			if at = got % r.Read; at == 0 { // as in a program that returns what it has read
				b = make([]byte, r.Read)
			}
		}
		n, err := c.Read(b[at:])
		if err != nil {
			return err
		}
		got += uint64(n)
		if r.Kind == echoes {
			if _, err := c.Write(b[:n]); err != nil {
				return err
			}
		}
	}
	if r.Kind == echoes {
		return nil
	}
	if err := <-sent; err != nil {
		return err
	}
	_, err := c.Write(b[:1])
	return err
}

func write(c net.Conn, b []byte, count int) error {
	for range count {
		if _, err := c.Write(b); err != nil {
			return err
		}
	}
	return nil
}

// probing is longer than the background probe of the device's windows takes (40 ms here). With -alone
// nothing runs in the background of a process that never sleeps. Writes of 1 MiB are not offered before
// the probe's result is known, so in some runs they went through the send buffer.
const probing = 300 * time.Millisecond

// measure prints one figure.
func measure(o options, what, address string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	kind, number, _ := strings.Cut(what, " ")
	size, _ := strconv.Atoi(number)
	if kind == "file" {
		return show(fetch(ctx, o, address))
	}
	if kind == "many" {
		return show(streams(ctx, o, address, size))
	}
	c, err := o.dial(ctx, address)
	if err != nil {
		return err
	}
	defer c.Close()
	time.Sleep(probing)
	var value float64
	switch kind {
	case "ping":
		value, err = ping(c)
	case "messages":
		value, err = stream([]net.Conn{c}, small, 64<<10, send)
		value /= small * 1e6
	case "write":
		value, err = stream([]net.Conn{c}, size, max(size, 1<<20), send)
		value /= 1e9
	case "fresh":
		value, err = stream([]net.Conn{c}, size, max(size, 1<<20), sendFresh)
		value /= 1e9
	case "into":
		value, err = stream([]net.Conn{c}, size, size, sendToFill)
		value /= 1e9
	case "both":
		value, err = stream([]net.Conn{c}, size, size, sendBothWays)
		value *= 2 / 1e9
	case "cpu":
		value, err = cpuOf(c, size)
	default:
		err = fmt.Errorf("-client %s is not known", what)
	}
	return show(value, err)
}

// show prints a figure, or returns the error.
func show(value float64, err error) error {
	if err == nil {
		_, err = fmt.Println(value)
	}
	return err
}

// begin sends a request.
func begin(c net.Conn, r request) error { return binary.Write(c, binary.LittleEndian, r) }

// ping returns the median round trip in µs.
func ping(c net.Conn) (float64, error) {
	if err := begin(c, request{Kind: echoes, Read: small, Total: pings * small}); err != nil {
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

// stream returns how many bytes a second all connections move together, by Writes into Reads of one
// buffer each.
func stream(all []net.Conn, size, read int, send func(c net.Conn, size, read, count int) error) (float64, error) {
	const first = 16
	for count := first; ; count *= 2 { // the first, shorter loops warm up
		failed := make(chan error, len(all))
		start := time.Now()
		for _, c := range all {
			go func() { failed <- send(c, size, read, count) }()
		}
		var err error
		for range all {
			err = cmp.Or(err, <-failed)
		}
		if took := time.Since(start); err != nil || took >= measured && count > first && count*size > warm {
			return float64(len(all)*count*size) / took.Seconds(), err
		}
	}
}

// send writes from one buffer until the other end has read all bytes.
func send(c net.Conn, size, read, count int) error {
	b := make([]byte, size)
	return sendBy(c, takes, size, read, count, func() []byte { return b })
}

// sendFresh writes from a new buffer each time, as a program whose encoder returns one does.
func sendFresh(c net.Conn, size, read, count int) error {
	return sendBy(c, takes, size, read, count, func() []byte { return make([]byte, size) })
}

// sendToFill writes from one buffer; the other end reads into a new buffer each time.
func sendToFill(c net.Conn, size, read, count int) error {
	b := make([]byte, size)
	return sendBy(c, fills, size, read, count, func() []byte { return b })
}

func sendBy(c net.Conn, kind uint64, size, read, count int, buffer func() []byte) error {
	if err := begin(c, request{Kind: kind, Read: uint64(read), Total: uint64(count * size)}); err != nil {
		return err
	}
	for range count {
		if err := write(c, buffer(), 1); err != nil {
			return err
		}
	}
	_, err := io.ReadFull(c, make([]byte, 1))
	return err
}

// sendBothWays sends while the other end sends as much.
func sendBothWays(c net.Conn, size, _, count int) error {
	if err := begin(c, request{Kind: sends, Read: uint64(size), Total: uint64(count * size)}); err != nil {
		return err
	}
	wrote := make(chan error, 1)
	go func() { wrote <- write(c, make([]byte, size), count) }()
	b := make([]byte, size)
	for range count {
		if _, err := io.ReadFull(c, b); err != nil {
			return err
		}
	}
	_, err := io.ReadFull(c, b[:1])
	return cmp.Or(err, <-wrote)
}

// streams returns the rate, in GB/s, of a number of connections together, by Writes of 64 KiB.
func streams(ctx context.Context, o options, address string, number int) (float64, error) {
	var all []net.Conn
	for range number {
		c, err := o.dial(ctx, address)
		if err != nil {
			return 0, fmt.Errorf("connection %d: %w", len(all), err)
		}
		defer c.Close()
		all = append(all, c)
	}
	rate, err := stream(all, 64<<10, 64<<10, send)
	return rate / 1e9, err
}

// cpuOf returns the processor time of both ends, in seconds, for 1 GB in Writes of a given size.
func cpuOf(c net.Conn, size int) (float64, error) {
	if _, err := stream([]net.Conn{c}, size, max(size, 1<<20), send); err != nil { // warms up
		return 0, err
	}
	before, err := cpuSoFar(c)
	if err != nil {
		return 0, err
	}
	total := (1 << 30) / size * size
	if err := send(c, size, max(size, 1<<20), total/size); err != nil {
		return 0, err
	}
	after, err := cpuSoFar(c)
	return (after - before).Seconds() / float64(total) * 1e9, err
}

// cpuSoFar returns the processor time that both ends have used so far.
func cpuSoFar(c net.Conn) (time.Duration, error) {
	if err := begin(c, request{Kind: tellCPU}); err != nil {
		return 0, err
	}
	var theirs uint64
	err := binary.Read(c, binary.LittleEndian, &theirs)
	return cputime.OfProcess() + time.Duration(theirs), err
}
