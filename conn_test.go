package san

import (
	"bytes"
	"context"
	"io"
	"net"
	"os/exec"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/nettest"
)

func TestConformance(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
			c1, c2 = l.pipe(t)
			return c1, c2, func() {
				c1.Close()
				c2.Close()
			}, nil
		})
	})
}

func TestBothEndsAgreeOnAddresses(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		for _, c := range []struct{ listen, dial string }{
			{"127.0.0.1:0", "127.0.0.1"},
			{"[::1]:0", "::1"},
			{"0.0.0.0:0", "127.0.0.1"},
			{":0", "127.0.0.1"},
			{":0", "::1"},
			{":0", "localhost"},
			{":0", ""},
			{net.JoinHostPort(l.host, "0"), l.host},
			{":0", l.host},
		} {
			if (l.host == "") != (c.dial != l.host || c.dial == "") {
				continue
			}
			t.Run(c.listen+" from "+c.dial, func(t *testing.T) {
				ln := l.listen(t, c.listen)
				client := mustDial(t, l.dialer(), net.JoinHostPort(c.dial, portOf(ln.Addr().String())))
				l.carries(t, client)
				server := mustAccept(t, ln)
				for _, a := range []net.Addr{client.LocalAddr(), client.RemoteAddr(), server.LocalAddr(), server.RemoteAddr()} {
					if _, ok := a.(*net.TCPAddr); !ok || a.Network() != "tcp" {
						t.Fatalf("%v is a %T of network %s", a, a, a.Network())
					}
				}
				if client.LocalAddr().String() != server.RemoteAddr().String() {
					t.Errorf("the dialer is %v to itself and %v to the acceptor", client.LocalAddr(), server.RemoteAddr())
				}
				if client.RemoteAddr().String() != server.LocalAddr().String() {
					t.Errorf("the acceptor is %v to itself and %v to the dialer", server.LocalAddr(), client.RemoteAddr())
				}
			})
		}
	})
}

func TestAddressesAreUnique(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		ln := l.listen(t, l.here())
		seen := make(map[string]bool)
		for range amount(100, 20) {
			mustDial(t, l.dialer(), ln.Addr().String())
			a := mustAccept(t, ln).RemoteAddr().String()
			if seen[a] {
				t.Fatalf("%s twice", a)
			}
			seen[a] = true
		}
	})
}

func TestNothingIsReadAndWritten(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		client, server := l.pipe(t)
		for _, b := range [][]byte{nil, {}} {
			if n, err := client.Write(b); n != 0 || err != nil {
				t.Errorf("wrote %d, %v", n, err)
			}
			if n, err := server.Read(b); n != 0 || err != nil { // a Read without room does not wait
				t.Errorf("read %d, %v", n, err)
			}
		}
		send(t, client, server, "something")
	})
}

func TestConcurrentWritesAreNotMixed(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		client, server := l.pipe(t)
		const writers, size, rounds = 8, 100_003, 20
		client.SetDeadline(time.Now().Add(testTimeout))
		server.SetDeadline(time.Now().Add(testTimeout))
		var wg sync.WaitGroup
		for w := range writers {
			wg.Go(func() {
				b := bytes.Repeat([]byte{byte(w)}, size)
				for range rounds {
					if _, err := client.Write(b); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		b := make([]byte, size)
		for range writers * rounds {
			if _, err := io.ReadFull(server, b); err != nil {
				t.Fatal(err)
			}
			if len(bytes.Trim(b, string(b[:1]))) != 0 {
				t.Fatal("two Writes are mixed")
			}
		}
		wg.Wait()
	})
}

// A blocking connection is not affected by the context of another dial, by a forked child or by the
// garbage collector.
func TestConnSurvivesExec(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		client, server := l.pipe(t)
		for range 3 {
			if err := runTrue(context.Background()); err != nil {
				t.Fatal(err)
			}
			send(t, client, server, "before, after")
			send(t, server, client, "and back")
		}
	})
}

// runTrue forks, and executes a program.
func runTrue(ctx context.Context) error {
	return exec.CommandContext(ctx, "true").Run()
}
