package main

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"syscall"
	"testing"

	"github.com/pires/go-proxyproto"

	"github.com/sanconn/san/internal/testenv"
)

// Between plain sockets go two sanproxy processes with a SAN between them. Every byte arrives, both
// ways, and the end of each direction arrives as an end of the stream.
func TestBytesThroughTwoProcesses(t *testing.T) {
	const size = 16<<20 + 5
	l, to := listenTCP(t)
	s := startPair(t, anyPort, to)
	client := dial(t, s.first.listen[0])
	server := accept(t, l)
	sum := func(r io.Reader) (int64, []byte, error) {
		h := sha256.New()
		n, err := io.Copy(h, struct{ io.Reader }{r})
		return n, h.Sum(nil), err
	}
	stream := func(seed byte) io.Reader { return io.LimitReader(rand.NewChaCha8([32]byte{seed}), size) }
	var work sync.WaitGroup
	for i, way := range [][2]net.Conn{{client, server}, {server, client}} {
		work.Go(func() {
			if _, err := io.Copy(way[0], stream(byte(i))); err != nil {
				t.Error(err)
			}
			way[0].(*net.TCPConn).CloseWrite()
		})
		work.Go(func() {
			_, want, _ := sum(stream(byte(i)))
			n, got, err := sum(way[1])
			if n != size || !bytes.Equal(got, want) || err != nil {
				t.Errorf("%d bytes of %d, right: %v, %v", n, size, bytes.Equal(got, want), err)
			}
		})
	}
	work.Wait()
	for _, p := range []*process{s.first, s.second} {
		p.wantReport(t, "a connection that has ended", func(r routeReport) bool {
			return r.Accepted == 1 && r.Finished == 1 && r.Open == 0 && r.BytesUp == size && r.BytesDown == size
		})
	}
	s.wantSAN(t)
}

// Whichever of the two processes is killed, and whatever the connection was doing, both sides find a
// reset, and never an end of the stream.
func TestKilledProxy(t *testing.T) {
	for _, busy := range []bool{false, true} {
		for _, victim := range []string{"first", "second"} {
			name := victim + ", idle"
			if busy {
				name = victim + ", busy"
			}
			t.Run(name, func(t *testing.T) {
				l, to := listenTCP(t)
				s := startPair(t, anyPort, to)
				client := dial(t, s.first.listen[0])
				server := accept(t, l)
				silent := dial(t, s.first.listen[0]) // a client that has sent nothing
				silentServer := accept(t, l)
				mustWrite(t, client, "question")
				wantNext(t, server, "question")
				if busy {
					go io.Copy(server, zeros{})
					if _, err := io.ReadFull(client, make([]byte, 1<<20)); err != nil {
						t.Fatal(err)
					}
				} else {
					mustWrite(t, server, "answer")
					wantNext(t, client, "answer")
				}
				s.wantSAN(t)
				p := s.first
				if victim == "second" {
					p = s.second
				}
				p.Process.Kill()
				wantReset(t, client)
				wantReset(t, silent)
				wantReset(t, silentServer)
				if !busy { // if busy, its Write finds the reset
					wantReset(t, server)
				}
			})
		}
	}
}

func wantReset(t *testing.T, c net.Conn) {
	t.Helper()
	if n, err := io.Copy(io.Discard, c); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%v after %d bytes: %v, want a reset", c.LocalAddr(), n, err)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

// After SIGTERM there are no new connections. Those that end in time end in order, the others by a
// reset.
func TestTerminate(t *testing.T) {
	for _, slow := range []bool{false, true} {
		l, to := listenTCP(t)
		drain := "2m"
		if slow {
			drain = "100ms"
		}
		s := startPair(t, anyPort, to, "-drain", drain)
		client := dial(t, s.first.listen[0])
		server := accept(t, l)
		mustWrite(t, client, "question")
		wantNext(t, server, "question")
		if slow {
			go io.Copy(server, zeros{})
		}
		s.first.Process.Signal(syscall.SIGTERM)
		if slow {
			wantReset(t, client)
		} else {
			go func() { // wantRefused's dials may be accepted until then
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					c.Close()
				}
			}()
			s.first.wantRefused(t)
			mustWrite(t, server, "answer")
			server.Close()
			wantNext(t, client, "answer")
			if n, err := client.Read(make([]byte, 1)); err != io.EOF {
				t.Errorf("read %d bytes, %v", n, err)
			}
			client.Close()
		}
		if err := s.first.wait(t); err != nil {
			t.Errorf("slow %v: sanproxy ended with %v", slow, err)
		}
	}
}

// wantRefused waits until nobody listens any more.
func (p *process) wantRefused(t *testing.T) {
	t.Helper()
	for {
		c, err := net.DialTimeout("tcp", p.listen[0].address, testTimeout)
		if err != nil {
			return
		}
		// It may have been accepted before the signal; then it ends in order.
		c.Close()
		select {
		case err := <-p.ended:
			t.Fatalf("sanproxy ended with %v", err)
		default:
		}
	}
}

// The server first reads the header with the client's address, and then the client's bytes.
func TestProxyHeader(t *testing.T) {
	l, to := listenTCP(t)
	s := startPair(t, anyPort, to, "-proxy-protocol")
	for range 3 {
		client := dial(t, s.first.listen[0])
		mustWrite(t, client, "question")
		server := accept(t, l)
		r := bufio.NewReader(server)
		h, err := proxyproto.Read(r)
		if err != nil {
			t.Fatal(err)
		}
		if h.Version != 2 || h.SourceAddr.String() != client.LocalAddr().String() || h.DestinationAddr.String() != client.RemoteAddr().String() {
			t.Errorf("header of version %d from %v to %v; the client is %v", h.Version, h.SourceAddr, h.DestinationAddr, client.LocalAddr())
		}
		wantNext(t, r, "question")
		mustWrite(t, server, "answer")
		wantNext(t, client, "answer")
	}
	s.wantSAN(t)
}

// A client on a unix socket has no address: the header has to say so.
func TestProxyHeaderOfUnixClient(t *testing.T) {
	l, to := listenTCP(t)
	p := start(t, "-listen", "unix:"+t.TempDir()+"/s", "-to", to.String(), "-proxy-protocol")
	client := dial(t, p.listen[0])
	mustWrite(t, client, "question")
	r := bufio.NewReader(accept(t, l))
	if h, err := proxyproto.Read(r); err != nil || h.Version != 2 {
		t.Fatalf("%+v, %v", h, err)
	}
	wantNext(t, r, "question")
}

// One process forwards several routes, from and to package san.
func TestSeveralRoutes(t *testing.T) {
	l1, to1 := listenTCP(t)
	l2, to2 := listenTCP(t)
	abstract := "unix:@sanproxy-test-" + t.Name() + to1.address
	second := start(t, "-listen", "san:127.0.0.1:0", "-to", to1.String(), "-listen", "san:127.0.0.1:0", "-to", to2.String())
	first := start(t, "-listen", "tcp:127.0.0.1:0", "-to", second.listen[0].String(), "-listen", abstract, "-to", second.listen[1].String())
	for i, l := range []net.Listener{l1, l2} {
		client := dial(t, first.listen[i])
		server := accept(t, l)
		mustWrite(t, client, "question")
		wantNext(t, server, "question")
	}
	testenv.Eventually(t, testTimeout, func() error { // the counter is updated a little after the Write
		for i, r := range first.report(t).Routes {
			if r.Open != 1 || r.BytesUp != 8 || r.Listen != first.listen[i].String() {
				return fmt.Errorf("%+v", r)
			}
		}
		return nil
	})
}
