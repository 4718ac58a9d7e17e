package sanconn_test

import (
	"net"
	"runtime"
	"testing"
	"unsafe"

	"github.com/sanconn/san/internal/connpair"
	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

// connMost is the most bytes that a connection which has not moved may allocate here, in addition to
// net's and package san's part. It is the largest size for which the allocator keeps no header; a header
// makes each connect slower.
const connMost = 512

func TestAConnThatHasNotMovedIsSmall(t *testing.T) {
	if n := unsafe.Sizeof(sanconn.Conn{}); n > connMost {
		t.Errorf("%d bytes", n)
	}
	const many = 200
	tcp := make([]*net.TCPConn, 2*many)
	for i := range many {
		var err error
		if tcp[2*i], tcp[2*i+1], err = tcpPair(); err != nil {
			t.Fatal(err)
		}
		defer tcp[2*i].Close()
		defer tcp[2*i+1].Close()
	}
	conns := make([]net.Conn, len(tcp))
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for i, c := range tcp {
		conns[i] = newconn.New(c, newconn.Config{Threshold: 1 << 40, Life: connpair.Nobody{}})
	}
	runtime.ReadMemStats(&after)
	each := int(after.TotalAlloc-before.TotalAlloc) / len(conns)
	if each > connMost+64 { // what the runtime may allocate meanwhile
		t.Errorf("%d bytes each", each)
	}
	if testing.Verbose() {
		t.Logf("%d bytes each, of which the Conn has %d", each, unsafe.Sizeof(sanconn.Conn{}))
	}
	b := make([]byte, 1)
	for i := 0; i < 8; i += 2 { // nothing is allocated when it is used
		if n := testing.AllocsPerRun(100, func() {
			conns[i].Write(b)
			conns[i+1].Read(b)
		}); n != 0 {
			t.Errorf("%v allocations", n)
		}
	}
	runtime.KeepAlive(conns)
}

// BenchmarkOnTCP is a round trip of a byte by TCP, with net's own connection and with one that has not
// moved.
func BenchmarkOnTCP(b *testing.B) {
	b.Run("net", func(b *testing.B) {
		x, y, err := tcpPair()
		if err != nil {
			b.Fatal(err)
		}
		oneWay(b, x, y)
	})
	b.Run("conn", func(b *testing.B) {
		use := newconn.Config{Threshold: 1 << 60, Life: connpair.Nobody{}}
		x, y, err := newPair(use, use)
		if err != nil {
			b.Fatal(err)
		}
		oneWay(b, x, y)
	})
}

// BenchmarkOnASession is the same on a session alone, and with a connection that has moved to one.
func BenchmarkOnASession(b *testing.B) {
	limits := session.Limits{}
	b.Run("session", func(b *testing.B) {
		ea, eb := twin.Pair(twin.Config{Limits: limits})
		x, y := session.New(ea, session.Config{}), session.New(eb, session.Config{})
		if err := x.Negotiate(b.Context()); err != nil {
			b.Fatal(err)
		}
		if err := y.Negotiate(b.Context()); err != nil {
			b.Fatal(err)
		}
		oneWay(b, x, y)
	})
	b.Run("conn", func(b *testing.B) {
		x, y := pipeOn(b, limits, nil)
		oneWay(b, x, y)
	})
}

// oneWay writes a byte and reads it, in one goroutine, so that no call waits.
func oneWay(b *testing.B, x, y interface {
	Read([]byte) (int, error)
	Write([]byte) (int, error)
	Close() error
}) {
	defer x.Close()
	defer y.Close()
	p := make([]byte, 64)
	b.ReportAllocs()
	for b.Loop() {
		x.Write(p)
		if n, err := y.Read(p); n != len(p) || err != nil {
			b.Fatal(n, err)
		}
	}
}

// BenchmarkReadOfWhatWasPeeked is a Read of a byte that a Peek on TCP has brought.
func BenchmarkReadOfWhatWasPeeked(b *testing.B) {
	x, y := pipe(b, onTCP, nil)
	p := make([]byte, 1)
	left := 0
	for b.Loop() {
		if left == 0 {
			b.StopTimer()
			x.Write(make([]byte, 16<<10))
			front, err := y.Peek()
			if err != nil {
				b.Fatal(err)
			}
			left = len(front)
			b.StartTimer()
		}
		y.Read(p)
		left--
	}
}

// BenchmarkMove is a move and the way back.
func BenchmarkMove(b *testing.B) {
	left := make(chan struct{}, 1)
	x, y, err := newPair(newconn.Config{}, newconn.Config{Life: leaver{ending{}, left}})
	if err != nil {
		b.Fatal(err)
	}
	defer x.Close()
	defer y.Close()
	for b.Loop() {
		ea, eb := twin.Pair(twin.Config{})
		if err := movePair(b.Context(), x, y, ea, eb, sessions{}); err != nil {
			b.Fatal(err)
		}
		newconn.HandleOf(x).Moved(b.Context())
		newconn.HandleOf(y).Moved(b.Context())
		if err := sanconn.LeaveSAN(x); err != nil {
			b.Fatal(err)
		}
		<-left
		if sanconn.Leaving(y) || y.Provider() != "tcp" {
			b.Fatalf("it has left, and goes by %s", y.Provider())
		}
	}
}

// leaver is a Life that signals the way back to TCP.
type leaver struct {
	ending
	left chan<- struct{}
}

func (l leaver) Left(error) { l.left <- struct{}{} }
