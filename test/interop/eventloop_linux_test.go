package interop

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cloudwego/netpoll"
	"github.com/panjf2000/gnet/v2"

	"github.com/sanconn/san"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/sanconn"
)

// Packages that poll descriptors themselves accept types of package net, and none of package san. They
// get connections made from File, which are on TCP.

// eventLoops are such packages. Each takes over a connection, and echoes until the peer ends it.
var eventLoops = []struct {
	name string
	take func(t *testing.T, c *sanconn.Conn)
}{
	{"gnet", gnetTakes},
	{"netpoll", netpollTakes},
}

// A connection that has moved goes back to TCP for a package that polls its descriptor, whichever end
// does that. Bytes that have come and were not read arrive there.
func TestEventLoops(t *testing.T) {
	for _, loop := range eventLoops {
		for _, end := range []string{"dialed", "accepted"} {
			t.Run(loop.name+" "+end, func(t *testing.T) {
				other, taken := movedPair(t)
				if end == "dialed" {
					other, taken = taken, other
				}
				data := randomBytes(1 << 20)
				const echoed, unread = 1000, 100_000 // echoed before the package takes it over, and unread then
				if _, err := other.Write(data[:echoed+unread]); err != nil {
					t.Fatal(err)
				}
				if _, err := io.CopyN(taken, taken, echoed); err != nil {
					t.Fatal(err)
				}
				loop.take(t, taken)
				var sending sync.WaitGroup
				sending.Go(func() {
					if _, err := other.Write(data[echoed+unread:]); err != nil {
						t.Error(err)
					}
				})
				got := make([]byte, len(data))
				if _, err := io.ReadFull(other, got); err != nil {
					t.Error(err)
				}
				sending.Wait()
				wantBytes(t, got, data)
				// The unread bytes have come back, and were sent again over TCP.
				info := san.InfoOf(other)
				if info.Provider != "tcp" || info.SANBytes != 2*echoed || info.TCPBytes != 2*uint64(len(data)-echoed) {
					t.Errorf("the other end is on %+v", info)
				}
				if err := other.CloseWrite(); err != nil {
					t.Error(err)
				}
				if n, err := other.Read(got); err != io.EOF {
					t.Errorf("at the end %d bytes, %v", n, err)
				}
			})
		}
	}
}

// movedPair returns both ends of a connection over shm: the dialed and the accepted one.
func movedPair(t *testing.T) (dialed, accepted *sanconn.Conn) {
	t.Helper()
	l := must(san.Listen("tcp", "127.0.0.1:0"))
	t.Cleanup(func() { l.Close() })
	d := &san.Dialer{Options: sanconn.Options{MoveAtOnce: true, AttemptTimeout: patience}}
	dialed = mustDial(t, d.DialContext, l.Addr().String()).(*sanconn.Conn)
	accepted = must(l.Accept()).(*sanconn.Conn)
	t.Cleanup(func() { accepted.Close() })
	accepted.SetDeadline(time.Now().Add(patience))
	for _, c := range []*sanconn.Conn{dialed, accepted} {
		testenv.Eventually(t, patience, func() error {
			if info := san.InfoOf(c); info.Provider != "shm" {
				return fmt.Errorf("on %+v", info)
			}
			return nil
		})
	}
	return dialed, accepted
}

// descriptorOf returns TCP's descriptor of a connection, and closes the connection itself.
func descriptorOf(t *testing.T, c *sanconn.Conn) *os.File {
	t.Helper()
	f, err := c.File()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	return f
}

func gnetTakes(t *testing.T, c *sanconn.Conn) {
	client := must(gnet.NewClient(gnetEcho{new(gnet.BuiltinEventEngine)}))
	if err := client.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := client.Stop(); err != nil {
			t.Error(err)
		}
	})
	f := descriptorOf(t, c)
	tcp, err := net.FileConn(f) // a *net.TCPConn, which Enroll requires
	f.Close()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.Enroll(tcp); err != nil {
		t.Fatal(err)
	}
}

// gnetEcho echoes.
type gnetEcho struct{ *gnet.BuiltinEventEngine }

func (gnetEcho) OnTraffic(c gnet.Conn) gnet.Action {
	b, err := c.Next(-1)
	if err == nil {
		_, err = c.Write(b)
	}
	if err != nil {
		return gnet.Close
	}
	return gnet.None
}

func netpollTakes(t *testing.T, c *sanconn.Conn) {
	f := descriptorOf(t, c)
	defer f.Close()
	conn, err := netpoll.NewFDConnection(must(syscall.Dup(int(f.Fd()))))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	if err := conn.SetOnRequest(netpollEcho); err != nil {
		t.Fatal(err)
	}
}

func netpollEcho(_ context.Context, c netpoll.Connection) error {
	b, err := c.Reader().ReadBinary(c.Reader().Len())
	if err != nil {
		return err
	}
	if _, err := c.Writer().WriteBinary(b); err != nil {
		return err
	}
	return c.Writer().Flush()
}

// netpoll accepts by a listener's descriptor. Its connections are not the listener's, so they stay on
// TCP, although their dialers would move them.
func TestNetpollListens(t *testing.T) {
	l := must(san.Listen("tcp", "127.0.0.1:0")).(*san.Listener)
	defer l.Close()
	if _, err := netpoll.ConvertListener(l); err == nil {
		t.Error("netpoll takes what package san returns")
	}
	f := must(l.File())
	tcp, err := net.FileListener(f) // a *net.TCPListener, which Serve requires
	f.Close()
	if err != nil {
		t.Fatal(err)
	}
	loop := must(netpoll.NewEventLoop(netpollEcho))
	stop := inBackground(func() error { return loop.Serve(tcp) }, func() error { return loop.Shutdown(t.Context()) }, nil)
	d := &san.Dialer{Options: sanconn.Options{MoveAtOnce: true}}
	c := mustDial(t, d.DialContext, l.Addr().String())
	data, got := randomBytes(1<<20), make([]byte, 1<<20)
	var sending sync.WaitGroup
	sending.Go(func() {
		if _, err := c.Write(data); err != nil {
			t.Error(err)
		}
	})
	if _, err := io.ReadFull(c, got); err != nil {
		t.Error(err)
	}
	sending.Wait()
	wantBytes(t, got, data)
	if info := san.InfoOf(c); info.Provider != "tcp" || info.SANBytes > 0 {
		t.Errorf("the dialed end is on %+v", info)
	}
	c.Close()
	if err := stop(); err != nil {
		t.Error(err)
	}
}
