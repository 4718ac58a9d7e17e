package benchmarks

import (
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/sanconn/san"
)

// serveConnects closes each connection that it accepts.
func serveConnects(l net.Listener, _ string) error {
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		c.Close()
	}
}

// BenchmarkConnect connects to another process, which accepts and closes; then this process reads the
// end, and closes. It does so in several goroutines at a time.
func BenchmarkConnect(b *testing.B) {
	for _, dialers := range []int{1, 8} {
		for _, tr := range transports {
			b.Run(fmt.Sprintf("%d/%s", dialers, tr.name), func(b *testing.B) {
				benchmarkConnect(b, tr, dialers)
			})
		}
	}
}

func benchmarkConnect(b *testing.B, tr transport, dialers int) {
	if tr.name == "unix" {
		b.Skip("the server process has no directory")
	}
	server := startServer(b, "connect", tr, "")
	once := func() error {
		c, err := tr.short(server.addr)
		if err != nil {
			return err
		}
		defer c.Close()
		if n, err := c.Read(make([]byte, 1)); err != io.EOF {
			return fmt.Errorf("read %d, %w", n, err)
		}
		return nil
	}
	for range 100 {
		if err := once(); err != nil {
			b.Fatal(err)
		}
	}
	before := server.cpu(b)
	b.ResetTimer()
	var left atomic.Int64
	left.Store(int64(b.N))
	var all sync.WaitGroup
	for range dialers {
		all.Go(func() {
			for left.Add(-1) >= 0 {
				if err := once(); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	b.StopTimer()
	b.ReportMetric(float64(server.cpu(b)-before)/float64(b.N)/1e3, "cpu-us/op")
}

// serveUntilEnd reads each connection that it accepts until the end.
func serveUntilEnd(l net.Listener, _ string) error {
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go func() { io.Copy(io.Discard, c); c.Close() }()
	}
}

// BenchmarkMove connects to another process over an existing link, moves the connection to shared
// memory, and closes it; and it does the same without the move.
func BenchmarkMove(b *testing.B) {
	for _, tr := range transports {
		dial := (&san.Dialer{Policy: san.Require}).Dial
		switch tr.name {
		case "unix":
			continue
		case "tcp":
			dial = net.Dial
		}
		b.Run(tr.name, func(b *testing.B) {
			server := startServer(b, "move", tr, "")
			once := func() {
				c, err := dial("tcp", server.addr.String())
				if err != nil {
					b.Fatal(err)
				}
				c.Close()
			}
			once() // makes the link
			before := server.cpu(b)
			for b.Loop() {
				once()
			}
			b.ReportMetric(float64(server.cpu(b)-before)/float64(b.N)/1e3, "cpu-us/op")
		})
	}
}

// BenchmarkBreakEven connects to another process over an existing link, makes some round trips or writes
// some bytes, and closes: by net, by package san with its default rule, and moved at once. Where a move
// costs less than it saves, cpu-us/op of both ends is below net's.
func BenchmarkBreakEven(b *testing.B) {
	dials := []struct {
		name string
		dial func(network, address string) (net.Conn, error)
	}{{"net", net.Dial}, {"san", san.Dial}, {"now", atOnce.Dial}}
	echo := func(turns int) func(net.Conn) error {
		return func(c net.Conn) error {
			p := make([]byte, 64)
			for range turns {
				if _, err := c.Write(p); err != nil {
					return err
				}
				if _, err := io.ReadFull(c, p); err != nil {
					return err
				}
			}
			return nil
		}
	}
	stream := func(bytes int) func(net.Conn) error {
		return func(c net.Conn) error {
			p := make([]byte, 64<<10)
			for n := 0; n < bytes; n += len(p) {
				if _, err := c.Write(p); err != nil {
					return err
				}
			}
			return nil
		}
	}
	for _, use := range []struct {
		name, server string
		run          func(net.Conn) error
	}{
		{"turns=1", "echo", echo(1)},
		{"turns=8", "echo", echo(8)},
		{"turns=32", "echo", echo(32)},
		{"turns=128", "echo", echo(128)},
		{"turns=512", "echo", echo(512)},
		{"KiB=64", "move", stream(64 << 10)},
		{"KiB=1024", "move", stream(1 << 20)},
		{"KiB=4096", "move", stream(4 << 20)},
		{"KiB=16384", "move", stream(16 << 20)},
	} {
		server := startServer(b, use.server, transports[2], "")
		for _, d := range dials {
			b.Run(use.name+"/"+d.name, func(b *testing.B) {
				once := func() {
					c, err := d.dial("tcp", server.addr.String())
					if err != nil {
						b.Fatal(err)
					}
					defer c.Close()
					if err := use.run(c); err != nil {
						b.Fatal(err)
					}
				}
				once() // makes the link
				before := server.cpu(b)
				for b.Loop() {
					once()
				}
				b.ReportMetric(float64(server.cpu(b)-before)/float64(b.N)/1e3, "cpu-us/op")
			})
		}
	}
}
