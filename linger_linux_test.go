package san

import (
	"io"
	"net"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/provider/shm"
)

// SO_LINGER 0 that a Control hook has set also holds on shm, until SetLinger changes it.
func TestLingerOfAControlHook(t *testing.T) {
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	d := &Dialer{Policy: Require, Providers: []string{shm.Name}}
	d.NetDialer.Control = func(_, _ string, c syscall.RawConn) (err error) {
		c.Control(func(fd uintptr) {
			err = unix.SetsockoptLinger(int(fd), unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
		})
		return err
	}
	for _, off := range []bool{false, true} {
		accepted := make(chan net.Conn, 1)
		go func() {
			c, _ := l.Accept()
			accepted <- c
		}()
		client := mustDial(t, d, l.Addr().String())
		server := <-accepted
		defer server.Close()
		if by := InfoOf(client).Provider; by != shm.Name {
			t.Fatalf("it is on %q", by)
		}
		if off {
			client.(interface{ SetLinger(int) error }).SetLinger(-1)
		}
		client.Close()
		server.SetDeadline(time.Now().Add(testTimeout))
		if _, err := server.Read(make([]byte, 1)); !off {
			wantOpError(t, err, "read", syscall.ECONNRESET)
		} else if err != io.EOF {
			t.Errorf("with SetLinger(-1): %v", err)
		}
	}
}
