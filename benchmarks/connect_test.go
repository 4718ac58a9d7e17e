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

// serveConnects closes what it accepts.
func serveConnects(l net.Listener, _ string) error {
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		c.Close()
	}
}

// BenchmarkConnect connects to another process, which accepts and closes, reads the end, and
// closes, in so many goroutines at a time.
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

// serveUntilEnd reads what it accepts to the end.
func serveUntilEnd(l net.Listener, _ string) error {
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go func() { io.Copy(io.Discard, c); c.Close() }()
	}
}

// BenchmarkMove connects to another process over a link that is there, moves to it, and closes;
// and without the move.
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
