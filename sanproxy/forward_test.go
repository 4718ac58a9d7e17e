package sanproxy

import (
	"bytes"
	"context"
	"crypto/sha256"
	"hash"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sanconn/san"
	"github.com/sanconn/san/sanconn"
)

// stream returns n bytes that depend on a seed.
func stream(seed byte, n int64) io.Reader {
	return io.LimitReader(rand.NewChaCha8([32]byte{seed}), n)
}

func sumOf(r io.Reader) (int64, []byte, error) {
	h := sha256.New()
	n, err := io.Copy(struct{ hash.Hash }{h}, struct{ io.Reader }{r})
	return n, h.Sum(nil), err
}

// Every byte arrives while both directions are busy, and each direction ends with the end of its stream.
// Over a SAN each byte was copied once, in the memory of the SAN.
func TestBytesBothWays(t *testing.T) {
	up, down := int64(scaled(20<<20)+1), int64(scaled(10<<20)+3)
	eachRoute(t, func(t *testing.T, r route) {
		c := r.chain(t)
		client, server, middle := c.whole(t)
		var work sync.WaitGroup
		for _, way := range []struct {
			from, to conn
			seed     byte
			n        int64
		}{{client, server, 1, up}, {server, client, 2, down}} {
			work.Go(func() {
				if _, err := io.Copy(struct{ io.Writer }{way.from}, stream(way.seed, way.n)); err != nil {
					t.Error(err)
				}
				if err := way.from.CloseWrite(); err != nil {
					t.Error(err)
				}
			})
			work.Go(func() {
				_, want, _ := sumOf(stream(way.seed, way.n))
				n, got, err := sumOf(way.to)
				if n != way.n || !bytes.Equal(got, want) || err != nil {
					t.Errorf("%d bytes of %d, checksum right: %v, %v", n, way.n, bytes.Equal(got, want), err)
				}
			})
		}
		work.Wait()
		for _, p := range []*Proxy{c.first, c.second} {
			wantStats(t, p, func(s Stats) bool {
				return s == Stats{Accepted: 1, Finished: 1, BytesUp: uint64(up), BytesDown: uint64(down)}
			})
		}
		switch info := san.InfoOf(middle); r.provider {
		case "shm", "verbs":
			st := middle.(*sanconn.Conn).Stats()
			if st.LentBytesSent != uint64(up) || st.LentBytesReceived != uint64(down) || info.TCPBytes != 0 {
				t.Errorf("of %d and %d bytes, %d and %d were lent, %d went by TCP", up, down, st.LentBytesSent, st.LentBytesReceived, info.TCPBytes)
			}
		case "tcp":
			if _, ok := middle.(*net.TCPConn); !ok {
				t.Errorf("the connection in the middle is a %T", middle)
			}
		default: // the connection may have ended before it has moved: see TestCopyAcrossTheMove
			if info.TCPBytes+info.SANBytes != uint64(up+down) {
				t.Errorf("%d bytes by TCP and %d by a SAN", info.TCPBytes, info.SANBytes)
			}
		}
	})
}

// A connection moves in the middle of a stream: the stream goes on, and both directions end as on one
// carrier.
func TestCopyAcrossTheMove(t *testing.T) {
	for _, r := range routes() {
		if r.provider != "" {
			continue
		}
		t.Run(r.name, func(t *testing.T) {
			client, server, middle := r.chain(t).whole(t)
			var work sync.WaitGroup
			for i, way := range [][2]conn{{client, server}, {server, client}} {
				sent, got := sha256.New(), sha256.New()
				work.Go(func() {
					src := rand.NewChaCha8([32]byte{byte(i)})
					for left := int64(-1); left != 0; { // until it has moved, and a little longer
						n, err := io.CopyN(io.MultiWriter(sent, struct{ io.Writer }{way[0]}), src, 64<<10)
						if err != nil {
							t.Errorf("after %d bytes: %v", n, err)
							return
						}
						if left--; left < 0 && san.InfoOf(middle).Provider == "shm" {
							left = 16
						}
					}
					way[0].CloseWrite()
				})
				work.Go(func() {
					if _, err := io.Copy(got, struct{ io.Reader }{way[1]}); err != nil {
						t.Error(err)
					}
				})
				defer func() {
					if !bytes.Equal(sent.Sum(nil), got.Sum(nil)) {
						t.Error("what arrived is not what was sent")
					}
				}()
			}
			work.Wait()
			if info := san.InfoOf(middle); info.TCPBytes == 0 || info.SANBytes == 0 {
				t.Errorf("%d bytes by TCP and %d by a SAN, %v: %v", info.TCPBytes, info.SANBytes, info.Fallback, info.Cause)
			}
		})
	}
}

// Bytes of a connection that is still open are counted if one of its ends is on a SAN.
func TestBytesOfOpenConnections(t *testing.T) {
	c := routes()[0].chain(t)
	client, server := c.pair(t)
	mustWrite(t, client, "hello")
	wantNext(t, server, "hello")
	mustWrite(t, server, "hi")
	wantNext(t, client, "hi")
	for _, p := range []*Proxy{c.first, c.second} {
		wantStats(t, p, func(s Stats) bool { return s.BytesUp == 5 && s.BytesDown == 2 && s.Open == 1 })
	}
}

// After one direction has ended, the other goes on.
func TestHalfClose(t *testing.T) {
	eachRoute(t, func(t *testing.T, r route) {
		c := r.chain(t)
		for _, clientFirst := range []bool{true, false} {
			a, b := c.pair(t)
			if !clientFirst {
				a, b = b, a
			}
			mustWrite(t, a, "question")
			a.CloseWrite()
			wantAll(t, b, "question")
			mustWrite(t, b, "answer, ")
			wantNext(t, a, "answer, ")
			mustWrite(t, b, "and its end")
			b.CloseWrite()
			wantAll(t, a, "and its end")
		}
		wantStats(t, c.first, func(s Stats) bool { return s.Finished == 2 && s.Open == 0 })
		wantStats(t, c.second, func(s Stats) bool { return s.Finished == 2 && s.Open == 0 })
	})
}

// If a server closes right after its answer, the client gets the answer and the end of the stream, not a
// reset.
func TestCloseAfterTheAnswer(t *testing.T) {
	eachRoute(t, func(t *testing.T, r route) {
		c := r.chain(t)
		for range 20 {
			client, server := c.pair(t)
			mustWrite(t, client, "question")
			wantNext(t, server, "question")
			mustWrite(t, server, "answer")
			server.Close()
			wantAll(t, client, "answer")
			client.Close()
		}
		wantStats(t, c.first, func(s Stats) bool { return s.Finished == 20 })
	})
}

func TestManyConnections(t *testing.T) {
	const rounds = 5
	conns := scaled(200)
	eachRoute(t, func(t *testing.T, r route) {
		c := r.chain(t)
		var servers, clients sync.WaitGroup
		servers.Go(func() {
			for range conns {
				s := c.accept(t)
				s.SetDeadline(time.Now().Add(2 * testTimeout))
				servers.Go(func() {
					io.Copy(struct{ io.Writer }{s}, struct{ io.Reader }{s})
					s.Close()
				})
			}
		})
		dialing := make(chan struct{}, 16) // a connection with Require has 10 s to move, including its wait for others
		var open sync.WaitGroup
		open.Add(conns)
		for i := range conns {
			clients.Go(func() {
				dialing <- struct{}{}
				dialed := sync.OnceFunc(func() { <-dialing; open.Done() })
				defer dialed()
				conn := c.dial(t)
				defer conn.Close()
				text := strings.Repeat("x", 1+i*50)
				for range rounds {
					conn.SetDeadline(time.Now().Add(testTimeout))
					mustWrite(t, conn, text)
					wantNext(t, conn, text)
					dialed()
					open.Wait() // all of them are open at the same time
				}
				conn.CloseWrite()
				wantAll(t, conn, "")
			})
		}
		clients.Wait()
		servers.Wait()
		wantStats(t, c.first, func(s Stats) bool { return s.Finished == uint64(conns) && s.Open == 0 })
		wantStats(t, c.second, func(s Stats) bool { return s.Finished == uint64(conns) && s.Open == 0 })
	})
}

// If a connection cannot end one direction alone, such as net.Pipe's, the end of one direction ends
// both.
func TestServerInTheProcess(t *testing.T) {
	for _, who := range []string{"client", "server"} {
		t.Run(who+" closes", func(t *testing.T) {
			servers := make(chan net.Conn, 1)
			p := &Proxy{Dial: func(context.Context, net.Conn) (net.Conn, error) {
				a, b := net.Pipe()
				servers <- b
				return a, nil
			}}
			r := route{outside: "tcp"}
			l := r.listen(t)
			serve(t, p, l)
			c, err := net.Dial("tcp", l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			client, server := prepared(t, c), <-servers
			mustWrite(t, client, "question")
			wantNext(t, server, "question")
			mustWrite(t, server, "answer")
			wantNext(t, client, "answer")
			if who == "client" {
				client.Close()
				wantAll(t, server, "")
			} else {
				server.Close()
				wantAll(t, client, "")
			}
			wantStats(t, p, func(s Stats) bool { return s.Finished == 1 })
		})
	}
}
