package san

import (
	"errors"
	"io"
	"net"
	"syscall"
	"testing"
	"time"
)

// Close is called in the middle of a large Write.
func TestCloseInTheMiddle(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		for _, who := range []string{"writer", "reader"} {
			t.Run("by the "+who, func(t *testing.T) {
				client, server := l.pipe(t)
				data := make([]byte, 64<<20)
				position(data, 0)
				started := make(chan struct{})
				type result struct {
					n   int
					err error
				}
				wrote := make(chan result, 1)
				go func() {
					n, err := client.Write(data)
					clear(data)
					wrote <- result{n, err}
				}()
				got := make([]byte, 0, 4<<20)
				server.SetReadDeadline(time.Now().Add(testTimeout))
				for len(got) < 2<<20 {
					n, err := server.Read(got[len(got):cap(got)])
					if err != nil {
						t.Fatal(err)
					}
					got = got[:len(got)+n]
				}
				close(started)
				if who == "writer" {
					client.Close()
				} else {
					server.Close()
				}
				select {
				case r := <-wrote:
					if r.err == nil {
						t.Error("Write succeeded")
					}
					if who == "writer" {
						wantOpError(t, r.err, "write", net.ErrClosed)
						rest, _ := io.ReadAll(server)
						got = append(got, rest...)
						if len(got) > r.n {
							t.Errorf("%d bytes arrived, %d were written", len(got), r.n)
						}
					} else if !isPeerGone(r.err) {
						t.Errorf("error %v, want EPIPE or ECONNRESET", r.err)
					}
				case <-time.After(testTimeout):
					t.Fatal("Write does not return")
				}
				wantPositions(t, got, 0)
			})
		}
	})
}

// isPeerGone reports whether a Write failed because the peer no longer reads.
func isPeerGone(err error) bool {
	return errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET)
}

func TestHalfClose(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		client, server := l.pipe(t)
		type halfCloser interface {
			CloseRead() error
			CloseWrite() error
		}
		send(t, client, server, "request")
		if err := client.(halfCloser).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		server.SetDeadline(time.Now().Add(testTimeout))
		if n, err := server.Read(make([]byte, 1)); n != 0 || err != io.EOF {
			t.Errorf("read %d, %v after the peer's CloseWrite", n, err)
		}
		send(t, server, client, "the answer still comes")
		_, err := client.Write([]byte("x"))
		wantOpError(t, err, "write", syscall.EPIPE)
		if err := client.(halfCloser).CloseRead(); err != nil {
			t.Fatal(err)
		}
		if n, err := client.Read(make([]byte, 1)); n != 0 || err != io.EOF {
			t.Errorf("read %d, %v after CloseRead", n, err)
		}
	})
}

func TestCloseWriteAfterThePeerHasClosed(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		for _, read := range []bool{true, false} {
			client, server := l.pipe(t)
			send(t, server, client, "all there is")
			server.Close()
			client.SetDeadline(time.Now().Add(testTimeout))
			if read {
				if n, err := client.Read(make([]byte, 1)); n != 0 || err != io.EOF {
					t.Errorf("read %d, %v", n, err)
				}
			}
			if err := client.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
				t.Errorf("CloseWrite: %v (read to the end: %v)", err, read)
			}
		}
	})
}

func TestCloseWithUnreadDataIsAReset(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		client, server := l.pipe(t)
		send(t, client, server, "seen")
		if _, err := io.WriteString(client, "not seen"); err != nil {
			t.Fatal(err)
		}
		one := make([]byte, 1)
		server.SetDeadline(time.Now().Add(testTimeout))
		if _, err := io.ReadFull(server, one); err != nil { // now it has arrived
			t.Fatal(err)
		}
		server.Close()
		client.SetDeadline(time.Now().Add(testTimeout))
		_, err := client.Read(one)
		wantOpError(t, err, "read", syscall.ECONNRESET)
	})
}

func TestLingerZeroIsAReset(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		client, server := l.pipe(t)
		if err := client.(interface{ SetLinger(int) error }).SetLinger(0); err != nil {
			t.Fatal(err)
		}
		client.Close()
		server.SetDeadline(time.Now().Add(testTimeout))
		_, err := server.Read(make([]byte, 1))
		wantOpError(t, err, "read", syscall.ECONNRESET)
	})
}

func TestWriteToAPeerThatClosedEnds(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		client, server := l.pipe(t)
		server.Close()
		client.SetDeadline(time.Now().Add(testTimeout))
		for {
			if _, err := client.Write(make([]byte, 1000)); err != nil {
				if !isPeerGone(err) {
					t.Errorf("error %v", err)
				}
				return
			}
		}
	})
}

func TestClosedConnSaysSo(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		client, _ := l.pipe(t)
		tcp, _ := net.Dial("tcp", plainListen(t, "127.0.0.1:0").Addr().String())
		tcp.Close()
		client.Close()
		calls := map[string]func(c net.Conn) error{
			"read":             func(c net.Conn) error { _, err := c.Read(make([]byte, 1)); return err },
			"write":            func(c net.Conn) error { _, err := c.Write(make([]byte, 1)); return err },
			"read of nothing":  func(c net.Conn) error { _, err := c.Read(nil); return err },
			"write of nothing": func(c net.Conn) error { _, err := c.Write(nil); return err },
			"deadline":         func(c net.Conn) error { return c.SetDeadline(time.Now()) },
			"read deadline":    func(c net.Conn) error { return c.SetReadDeadline(time.Now()) },
			"write deadline":   func(c net.Conn) error { return c.SetWriteDeadline(time.Now()) },
			"close":            func(c net.Conn) error { return c.Close() },
			"closewrite":       func(c net.Conn) error { return c.(interface{ CloseWrite() error }).CloseWrite() },
			"closeread":        func(c net.Conn) error { return c.(interface{ CloseRead() error }).CloseRead() },
			"nodelay":          func(c net.Conn) error { return c.(interface{ SetNoDelay(bool) error }).SetNoDelay(true) },
			"linger":           func(c net.Conn) error { return c.(interface{ SetLinger(int) error }).SetLinger(1) },
			"keepalive": func(c net.Conn) error {
				return c.(interface{ SetKeepAlivePeriod(time.Duration) error }).SetKeepAlivePeriod(time.Second)
			},
		}
		for name, call := range calls {
			var want, got *net.OpError
			if !errors.As(call(tcp), &want) || !errors.As(call(client), &got) {
				t.Errorf("%s: no OpError", name)
				continue
			}
			if got.Op != want.Op || got.Net != want.Net || !errors.Is(got, net.ErrClosed) ||
				(got.Source == nil) != (want.Source == nil) || (got.Addr == nil) != (want.Addr == nil) {
				t.Errorf("%s: %#v, want %#v", name, got, want)
			}
		}
	})
}
