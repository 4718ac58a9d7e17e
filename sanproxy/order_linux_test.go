package sanproxy

import (
	"context"
	"errors"
	"net"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/internal/testenv"
)

// lateLook is a connection whose socket is examined only after both directions have ended.
type lateLook struct {
	*net.TCPConn
	ended func() // waits until both have ended
}

func (c lateLook) SyscallConn() (syscall.RawConn, error) {
	c.ended()
	return c.TCPConn.SyscallConn()
}

// Both directions end in order. The second one ends after the first one's end of file, but before the
// proxy examines the socket: the socket is closed by then, as it is after a reset, and must not be taken
// for one.
func TestEndDuringTheLookForAReset(t *testing.T) {
	r := route{outside: "tcp"}
	servers, front := r.listen(t), r.listen(t)
	clients := make(chan conn, 1)
	p := &Proxy{Dial: func(ctx context.Context, _ net.Conn) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, "tcp", servers.Addr().String())
		if err != nil {
			return nil, err
		}
		to := c.(*net.TCPConn)
		return lateLook{to, func() {
			(<-clients).CloseWrite()
			testenv.Await(testTimeout, func() error { return wantClosed(to) })
		}}, nil
	}}
	serve(t, p, front)
	c := &chain{route: r, clients: front.Addr().String(), servers: servers}
	client := c.dial(t)
	clients <- client
	mustWrite(t, client, "question")
	server := c.accept(t)
	wantNext(t, server, "question")
	mustWrite(t, server, "answer")
	server.CloseWrite()
	wantAll(t, client, "answer")
	wantAll(t, server, "")
	wantStats(t, p, func(s Stats) bool { return s.Open == 0 })
	if s := p.Stats(); s.Finished != 1 {
		t.Errorf("%+v", s)
	}
}

// wantClosed returns nil once both directions of a socket have ended.
func wantClosed(c *net.TCPConn) (err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	raw.Control(func(fd uintptr) {
		info, e := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		if err = e; err == nil && info.State != tcpClose {
			err = errors.New("not closed yet")
		}
	})
	return err
}
