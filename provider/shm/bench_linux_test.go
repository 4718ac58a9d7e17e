package shm

import (
	"fmt"
	"net"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/provider/shm/internal/ring"
	"github.com/sanconn/san/session"
)

// BenchmarkSend measures Reserve and Commit of a 64-byte message, BenchmarkReceive Poll and Drop.
// Neither includes the other side's cost: the ring is emptied or filled while the clock is stopped.
func BenchmarkSend(b *testing.B)    { benchmarkOneSide(b, true) }
func BenchmarkReceive(b *testing.B) { benchmarkOneSide(b, false) }

func benchmarkOneSide(b *testing.B, sending bool) {
	const batch = 500
	p, q := pair(b, Config{})
	b.ReportAllocs()
	b.StopTimer()
	var ev session.Event
	for n := b.N; n > 0; n -= batch {
		k := min(n, batch)
		if sending {
			b.StartTimer()
		}
		for range k {
			p.Reserve(64, 64)
			p.Commit(64)
		}
		if sending {
			b.StopTimer()
		} else {
			b.StartTimer()
		}
		for range k {
			if !q.Poll(&ev) {
				b.Fatal("a message is missing")
			}
			q.Drop()
		}
		if !sending {
			b.StopTimer()
		}
		q.Poll(&ev)
	}
}

// spinPoll polls the way a session spins, without sleeping.
func spinPoll(p *peer, ev *session.Event) {
	for i := 1; !p.Poll(ev); i++ {
		if i%64 == 0 {
			unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
		}
	}
}

func BenchmarkTwoProcesses(b *testing.B) {
	b.Run("PingPong64", func(b *testing.B) {
		p := dialChild(b, spawn(b, "spin-echo", nil), Config{})
		msg := make([]byte, 64)
		var ev session.Event
		b.ResetTimer()
		for range b.N {
			p.send(msg)
			spinPoll(p, &ev)
			p.Drop()
		}
	})
	b.Run("PingPong64Sleeping", func(b *testing.B) {
		p := dialChild(b, spawn(b, "echo", nil), Config{})
		msg := make([]byte, 64)
		var ev session.Event
		b.ResetTimer()
		for range b.N {
			p.send(msg)
			p.poll(&ev)
			p.Drop()
		}
	})
	for _, ring := range []int{256 << 10, 1 << 20, 4 << 20} {
		for _, size := range []int{64, 4 << 10, 16 << 10, 32 << 10, 64 << 10} {
			b.Run(fmt.Sprintf("Stream%d/ring=%dK", size, ring>>10), func(b *testing.B) {
				p := dialChild(b, spawn(b, "sink", nil), Config{ringMax: ring})
				src := make([]byte, size)
				b.SetBytes(int64(size))
				b.ResetTimer()
				for range b.N {
					p.send(src)
				}
				b.StopTimer()
			})
		}
	}
}

func BenchmarkConnect(b *testing.B) {
	c := spawn(b, "echo", nil)
	first := dialChild(b, c, Config{})
	defer end(first)
	b.ResetTimer()
	for range b.N {
		ep, err := dial(c.at, Config{})
		if err != nil {
			b.Fatal(err)
		}
		newPeer(ep)
		end(ep)
	}
}

func init() {
	roles["spin-echo"] = func() error {
		return serveRole(func(p *peer) {
			var ev session.Event
			for p.Err() == nil {
				deadline := time.Now().Add(time.Second)
				for i := 1; !p.Poll(&ev); i++ {
					if i%64 == 0 {
						unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
					}
					if i%4096 == 0 && (p.Err() != nil || time.Now().After(deadline)) {
						return
					}
				}
				p.send(ev.Msg)
				p.Drop()
			}
		})
	}
	roles["sink"] = func() error {
		return serveRole(func(p *peer) {
			into := make([]byte, ring.MaxMessage)
			var ev session.Event
			for p.pollSpinning(&ev) {
				copy(into, ev.Msg)
				p.Drop()
			}
		})
	}
}

// pollSpinning polls for a while before it sleeps, as a session does.
func (p *peer) pollSpinning(ev *session.Event) bool {
	for range 2000 {
		if p.Poll(ev) {
			return true
		}
		runtime.Gosched()
	}
	return p.poll(ev)
}

// BenchmarkConnectTCP is the baseline for BenchmarkConnect.
func BenchmarkConnectTCP(b *testing.B) {
	c := spawn(b, "tcp-accept", nil)
	addr := c.line(b, "listening")
	b.ResetTimer()
	for range b.N {
		conn, err := net.Dial("tcp", addr)
		if err != nil {
			b.Fatal(err)
		}
		conn.(*net.TCPConn).SetLinger(0)
		conn.Close()
	}
}

func init() {
	roles["tcp-accept"] = func() error {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		defer l.Close()
		fmt.Println("listening", l.Addr())
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				c.Close()
			}
		}()
		untilStdinEnds()
		return nil
	}
}
