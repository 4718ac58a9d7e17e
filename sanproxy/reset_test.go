package sanproxy

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"math/big"
	"net"
	"testing"
	"time"
)

// A reset at one end becomes a reset at the other, in both directions. (A unix socket can neither cause
// one nor, if nothing is unread, show one.)
func TestReset(t *testing.T) {
	eachRoute(t, func(t *testing.T, r route) {
		c := r.chain(t)
		for _, clientFirst := range []bool{true, false} {
			a, b := c.pair(t)
			if !clientFirst {
				a, b = b, a
			}
			mustWrite(t, a, "some")
			wantNext(t, b, "some")
			if tcp, ok := a.(*net.TCPConn); ok {
				tcp.SetLinger(0)
				tcp.Close()
				wantReset(t, b)
				continue
			}
			mustWrite(t, b, "unread")
			wantNext(t, a, "u") // then the rest has come as well
			a.Close()
			io.Copy(io.Discard, b) // may find the end of file of an end in order
		}
		wantStats(t, c.first, func(s Stats) bool { return s.Reset == 2 && s.Open == 0 })
		wantStats(t, c.second, func(s Stats) bool { return s.Reset == 2 && s.Open == 0 })
	})
}

// A reset of a busy connection never arrives as an end in order, whichever direction finds it first.
func TestResetUnderLoad(t *testing.T) {
	eachRoute(t, func(t *testing.T, r route) {
		if r.outside == "unix" {
			return // a unix socket has no reset
		}
		c := r.chain(t)
		for i := range scaled(30) {
			client, server := c.pair(t)
			writing := flood(client)
			flooding := flood(server)
			b := make([]byte, 64<<10)
			for range 1 + i%7 {
				if _, err := server.Read(b); err != nil {
					t.Fatal(err)
				}
			}
			server.(*net.TCPConn).SetLinger(0)
			server.Close()
			wantReset(t, client, writing)
			<-flooding
			client.Close()
		}
	})
}

// If a server sends an answer, and then stops reading, the answer still arrives, and then the reset.
func TestAnswerBeforeTheReset(t *testing.T) {
	eachRoute(t, func(t *testing.T, r route) {
		c := r.chain(t)
		client, server := c.pair(t)
		writing := flood(client)
		if _, err := io.ReadFull(server, make([]byte, 1<<20)); err != nil {
			t.Fatal(err)
		}
		mustWrite(t, server, "413 too large")
		wantNext(t, client, "413 too large")
		wantNext(t, server, "\x00") // more have come with it
		server.Close()              // with bytes unread, which resets the connection
		if r.outside == "tcp" {
			wantReset(t, client, writing)
		}
	})
}

// A unix socket that shuts down only its reading side goes on sending.
func TestServerThatReadsNoMore(t *testing.T) {
	for _, r := range routes() {
		if r.outside != "unix" {
			continue
		}
		t.Run(r.name, func(t *testing.T) {
			c := r.chain(t)
			client, server := c.pair(t)
			mustWrite(t, client, "question")
			wantNext(t, server, "question")
			if err := server.(*net.UnixConn).CloseRead(); err != nil {
				t.Fatal(err)
			}
			mustWrite(t, client, "too much")
			wantStats(t, c.second, func(s Stats) bool { return s.Open == 1 })
			mustWrite(t, server, "answer")
			wantNext(t, client, "answer")
		})
	}
}

// If the server is dead, a client's connection is reset at once, and counted.
func TestNoServer(t *testing.T) {
	eachRoute(t, func(t *testing.T, r route) {
		c := r.chain(t)
		c.servers.Close()
		for range 3 {
			c.wantTurnedAway(t)
		}
		wantStats(t, c.second, func(s Stats) bool { return s.Failed == 3 && s.Open == 0 })
		wantStats(t, c.first, func(s Stats) bool { return s.Reset+s.Failed == 3 && s.Open == 0 })
	})
}

// An abort of a TLS connection does not send close_notify, which would be an end in order.
func TestResetUnderTLS(t *testing.T) {
	broken := make(chan net.Conn, 1)
	p := &Proxy{Dial: func(ctx context.Context, _ net.Conn) (net.Conn, error) {
		a, b := net.Pipe()
		broken <- b
		return halfPipe{a}, nil
	}}
	r := route{outside: "tcp"}
	l := r.listen(t)
	config := testTLS(t)
	serve(t, p, tls.NewListener(l, config))
	c, err := tls.Dial("tcp", l.Addr().String(), &tls.Config{InsecureSkipVerify: true})
	if err != nil {
		t.Fatal(err)
	}
	client := prepared(t, c)
	server := <-broken
	mustWrite(t, client, "question")
	wantNext(t, server, "question")
	p.Close()
	wantReset(t, client)
}

// halfPipe has the methods of a connection with half-close.
type halfPipe struct{ net.Conn }

func (p halfPipe) CloseWrite() error { return errors.New("not in this test") }

func testTLS(t *testing.T) *tls.Config {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{cert}, PrivateKey: key}}}
}
