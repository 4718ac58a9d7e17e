package verbs

import (
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/session"
)

// BenchmarkRoundTrip makes round trips of 64 bytes between sessions in this process.
func BenchmarkRoundTrip(b *testing.B) {
	for _, tt := range []struct {
		name string
		spin time.Duration
	}{{"spin", 0}, {"spin 200 µs", 200 * time.Microsecond}, {"spin 2 ms", 2 * time.Millisecond}, {"sleep", -1}} {
		b.Run(tt.name, func(b *testing.B) {
			l := listen(b, Config{})
			x, y := sessions(b, l, session.Config{Spin: tt.spin})
			go func() {
				buf := make([]byte, 64)
				for {
					if _, err := io.ReadFull(readerFunc(y.Read), buf); err != nil {
						return
					}
					if _, err := y.Write(buf); err != nil {
						return
					}
				}
			}()
			buf := make([]byte, 64)
			for b.Loop() {
				x.Write(buf)
				if _, err := io.ReadFull(readerFunc(x.Read), buf); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// BenchmarkEndpointRoundTrip makes round trips of 64 bytes between endpoints in this process that always
// sleep. The difference is what the session adds.
func BenchmarkEndpointRoundTrip(b *testing.B) {
	l := listen(b, Config{})
	x, y, err := connect(l, Config{})
	if err != nil {
		b.Fatal(err)
	}
	defer y.discard()
	defer x.discard()
	wx, wy := make(woken, 1), make(woken, 1)
	x.Start(wx)
	y.Start(wy)
	send := func(e *Endpoint) {
		room := e.Reserve(64, 64)
		e.Commit(len(room))
	}
	receive := func(e *Endpoint, w woken) bool {
		var ev session.Event
		for !e.Poll(&ev) {
			e.Arm(session.RecvReady)
			if e.Poll(&ev) {
				break
			}
			if e.Err() != nil {
				return false
			}
			<-w
		}
		e.Drop()
		return true
	}
	go func() {
		for receive(y, wy) {
			send(y)
		}
	}()
	for b.Loop() {
		send(x)
		if !receive(x, wx) {
			b.Fatal(x.Err())
		}
	}
}

// BenchmarkStream sends one way: by messages of several sizes, by rendezvous, and by the way that the
// session chooses.
func BenchmarkStream(b *testing.B) {
	for _, tt := range []struct {
		name      string
		cfg       Config
		windows   bool
		threshold int
	}{
		{"4K messages", Config{bufferSize: 4 << 10}, false, -1},
		{"8K messages", Config{bufferSize: 8 << 10}, false, -1},
		{"16K messages", Config{bufferSize: 16 << 10, sendBuffer: 512 << 10}, false, -1},
		{"rendezvous", Config{}, false, 32 << 10},
		{"rendezvous, windows", Config{}, true, 32 << 10},
		{"as it comes", Config{}, false, 0},
	} {
		if tt.windows && testenv.Device() == "siw" {
			continue // the lane does not have it
		}
		for _, size := range []int{64 << 10, 1 << 20} {
			b.Run(fmt.Sprintf("%s/%d", tt.name, size), func(b *testing.B) {
				l := listen(b, tt.cfg)
				l.windows = tt.windows
				x, y := sessions(b, l, session.Config{Threshold: tt.threshold})
				b.SetBytes(int64(size))
				done := make(chan struct{})
				go func() {
					defer close(done)
					buf := make([]byte, 1<<20)
					for {
						if _, err := y.Read(buf); err != nil {
							return
						}
					}
				}()
				buf := make([]byte, size)
				before := registering()
				for b.Loop() {
					if _, err := x.Write(buf); err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(100*float64(registering()-before)/float64(b.Elapsed()), "%registering")
				x.CloseWrite()
				<-done
			})
		}
	}
}

// registering returns how long this process, with both ends, has spent on registrations so far.
func registering() time.Duration {
	s := regcache.DefaultBudget().Stats()
	return s.RegisterTime + s.DeregisterTime
}
