// Package benchmarks measures connections within one process, where the Go tools count allocations and
// profile both ends. Between two processes it measures net/http, copies of files and short connections:
//
//	go test -bench . -benchmem ./benchmarks
//
// sanperf measures other connections between two processes. On a machine with devices for tests
// (test/guest) there is also a transport "verbs".
package benchmarks

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/sanconn/san"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/sanconn"
)

// A transport is a way to connect two ends.
type transport struct {
	name   string
	listen func(dir string) (net.Listener, error)
	dial   func(net.Addr) (net.Conn, error)

	provider string // to which a connection has to move before it is measured; "": it does not move

	fresh bool // short connections stay on TCP, as package san makes them by default
}

var transports = append([]transport{
	{
		"tcp",
		func(string) (net.Listener, error) { return net.Listen("tcp", "127.0.0.1:0") },
		func(a net.Addr) (net.Conn, error) { return net.Dial("tcp", a.String()) },
		"", false,
	},
	{
		"unix",
		func(dir string) (net.Listener, error) { return net.Listen("unix", filepath.Join(dir, "s")) },
		func(a net.Addr) (net.Conn, error) { return net.Dial("unix", a.String()) },
		"", false,
	},
	{
		"san",
		func(string) (net.Listener, error) { return san.Listen("tcp", "127.0.0.1:0") },
		func(a net.Addr) (net.Conn, error) { return atOnce.Dial("tcp", a.String()) },
		map[string]string{"linux": "shm"}[runtime.GOOS], true,
	},
}, verbs()...)

// atOnce makes connections move at once. The attempt may take as long as connect waits for the move:
// nothing is written in the meantime, after which a failed attempt would be repeated.
var atOnce = &san.Dialer{Options: sanconn.Options{MoveAtOnce: true, AttemptTimeout: moveTime}}

const moveTime = 30 * time.Second

// verbs connects one end of the guest's cable with the other, if there is one.
func verbs() []transport {
	host := map[string]string{"rxe": "10.8.0.2", "siw": "10.8.1.2"}[testenv.Device()]
	if host == "" {
		return nil
	}
	const name = "verbs"
	lc := san.ListenConfig{Policy: san.Require, Providers: []string{name}}
	d := san.Dialer{Policy: san.Require, Providers: []string{name}}
	return []transport{{
		name,
		func(string) (net.Listener, error) { return lc.Listen(context.Background(), "tcp", host+":0") },
		func(a net.Addr) (net.Conn, error) { return d.Dial("tcp", a.String()) },
		name, false,
	}}
}

// serve listens and passes every connection to handle, until the benchmark ends.
func (tr transport) serve(b *testing.B, handle func(net.Conn)) net.Addr {
	b.Helper()
	l, err := tr.listen(b.TempDir())
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				handle(c)
			}()
		}
	}()
	return l.Addr()
}

// short dials a connection whose use may end before a move pays.
func (tr transport) short(a net.Addr) (net.Conn, error) {
	if tr.fresh {
		return san.Dial("tcp", a.String())
	}
	return tr.dial(a)
}

// connect dials, and waits until the connection has moved to the transport's provider.
func (tr transport) connect(a net.Addr) (net.Conn, error) {
	c, err := tr.dial(a)
	if err != nil {
		return nil, err
	}
	if tr.provider != "" {
		testenv.Await(moveTime, func() error {
			if san.InfoOf(c).Fallback == san.ReasonUnused {
				return errors.New("nothing has become of its move yet")
			}
			return nil
		})
	}
	if info := san.InfoOf(c); tr.provider != "" && info.Provider != tr.provider {
		c.Close()
		return nil, fmt.Errorf("went by %s: %v", info.Provider, info.Fallback)
	}
	return c, nil
}

func (tr transport) mustConnect(b *testing.B, a net.Addr) net.Conn {
	b.Helper()
	c, err := tr.connect(a)
	if err != nil {
		b.Fatal(err)
	}
	return c
}

func BenchmarkRoundTrip(b *testing.B) {
	for _, tr := range transports {
		for _, size := range []int{64, 4 << 10, 64 << 10} {
			b.Run(fmt.Sprintf("%s/%d", tr.name, size), func(b *testing.B) {
				c := tr.mustConnect(b, tr.serve(b, func(c net.Conn) {
					buf := make([]byte, size)
					for {
						n, err := c.Read(buf)
						if err != nil {
							return
						}
						if _, err := c.Write(buf[:n]); err != nil {
							return
						}
					}
				}))
				defer c.Close()
				buf := make([]byte, size)
				b.ReportAllocs()
				for b.Loop() {
					if _, err := c.Write(buf); err != nil {
						b.Fatal(err)
					}
					if _, err := io.ReadFull(c, buf); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

func BenchmarkWrite(b *testing.B) {
	for _, tr := range transports {
		for _, size := range []int{64, 4 << 10, 64 << 10, 1 << 20} {
			b.Run(fmt.Sprintf("%s/%d", tr.name, size), func(b *testing.B) {
				c := tr.mustConnect(b, tr.serve(b, func(c net.Conn) {
					buf := make([]byte, max(size, 64<<10))
					for {
						if _, err := c.Read(buf); err != nil {
							return
						}
					}
				}))
				defer c.Close()
				buf := make([]byte, size)
				b.SetBytes(int64(size))
				b.ReportAllocs()
				for b.Loop() {
					if _, err := c.Write(buf); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
