package san

import (
	"bytes"
	"errors"
	"io"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/provider/shm"
)

// The IPs of the addresses have the same length as net's, because programs compare and convert them
// without To4.
func TestAddressesAreAsLongAsNets(t *testing.T) {
	onlyShm(t)
	for _, on := range []string{":0", "0.0.0.0:0", "127.0.0.1:0", "[::1]:0"} {
		to := "127.0.0.1"
		if on == "[::1]:0" {
			to = "::1"
		}
		lengths := func(l net.Listener, dial func(network, address string) (net.Conn, error)) (all [4]int, c net.Conn) {
			c, err := dial("tcp", net.JoinHostPort(to, portOf(l.Addr().String())))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { c.Close() })
			s := mustAccept(t, l)
			for i, a := range []net.Addr{c.LocalAddr(), c.RemoteAddr(), s.LocalAddr(), s.RemoteAddr()} {
				all[i] = len(a.(*net.TCPAddr).IP)
			}
			return all, c
		}
		want, _ := lengths(plainListen(t, on), net.Dial)
		l := mustListen(t, &ListenConfig{Policy: Require}, "tcp", on)
		got, c := lengths(l, (&Dialer{Policy: Require}).Dial)
		wantProvider(t, c, shm.Name)
		if got != want {
			t.Errorf("%s: %v, and net's %v", on, got, want)
		}
	}
}

// An error names the network by which the connection was made: "tcp4" stays "tcp4".
func TestErrorsNameTheNetwork(t *testing.T) {
	onlyShm(t)
	for network, on := range map[string]string{"tcp": "127.0.0.1:0", "tcp4": "127.0.0.1:0", "tcp6": "[::1]:0"} {
		l := mustListen(t, &ListenConfig{Policy: Require}, network, on)
		c, err := (&Dialer{Policy: Require}).Dial(network, l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		s := mustAccept(t, l)
		wantProvider(t, c, shm.Name)
		for _, end := range []net.Conn{c, s} {
			end.SetDeadline(time.Unix(1, 0))
			_, rerr := end.Read(make([]byte, 1))
			_, werr := end.Write(make([]byte, 1))
			end.Close()
			for _, err := range []error{rerr, werr, end.SetDeadline(time.Time{}), end.Close()} {
				if oe, ok := err.(*net.OpError); !ok || oe.Net != network {
					t.Errorf("%s: %v", network, err)
				}
			}
		}
	}
}

// A process may have any number of listeners. Connections to each of them move.
func TestManyListeners(t *testing.T) {
	onlyShm(t)
	const many = 520 // an earlier version had room for 512
	for i := range many {
		l := mustListen(t, &ListenConfig{Policy: Require}, "tcp", "127.0.0.1:0")
		if i%100 == 0 || i > many-10 {
			c := mustDial(t, &Dialer{Policy: Require}, l.Addr().String())
			send(t, c, mustAccept(t, l), "there")
			wantProvider(t, c, shm.Name)
		}
	}
}

// Two ends that have moved, and both write before they read, get as far as over TCP, even if other
// connections that nobody reads hold all of the process's memory for streams.
func TestBothWriteBesideOthersThatNobodyReads(t *testing.T) {
	onlyShm(t)
	data := randomBytes(512 << 10)
	both := func(t *testing.T, client, server net.Conn) {
		ends := []net.Conn{client, server}
		var writing sync.WaitGroup
		for _, c := range ends {
			c.SetDeadline(time.Now().Add(testTimeout))
			writing.Go(func() {
				if n, err := c.Write(data); n != len(data) || err != nil {
					t.Errorf("wrote %d of %d: %v", n, len(data), err)
				}
			})
		}
		writing.Wait()
		for _, c := range ends {
			got := make([]byte, len(data))
			if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, data) {
				t.Errorf("read: %v, equal: %v", err, bytes.Equal(got, data))
			}
		}
	}
	t.Run("net", func(t *testing.T) {
		client, server := plainTCP.pipe(t)
		both(t, client, server)
	})
	t.Run("shm", func(t *testing.T) {
		var filling sync.WaitGroup
		unread := make([]byte, 4<<20)
		for range 100 {
			c, _ := shmLanes[0].pipe(t)
			c.SetWriteDeadline(time.Now().Add(500 * time.Millisecond))
			filling.Go(func() { c.Write(unread) })
		}
		filling.Wait()
		client, server := shmLanes[0].pipe(t)
		both(t, client, server)
	})
}

// SO_REUSEADDR allows a second socket to bind a dialer's address. It cannot connect from there to the
// same listener, and the connection that has moved goes on.
func TestAddressThatIsBoundAgain(t *testing.T) {
	onlyShm(t)
	reuse := func(_, _ string, c syscall.RawConn) (err error) {
		if cerr := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) }); cerr != nil {
			return cerr
		}
		return err
	}
	l := mustListen(t, &ListenConfig{Policy: Require}, "tcp", "127.0.0.1:0")
	d := &Dialer{Policy: Require, NetDialer: net.Dialer{Control: reuse, LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}}}
	c := mustDial(t, d, l.Addr().String())
	s := mustAccept(t, l)
	wantProvider(t, c, shm.Name)
	for _, dial := range []func(network, address string) (net.Conn, error){
		(&net.Dialer{Control: reuse, LocalAddr: c.LocalAddr()}).Dial,
		(&Dialer{NetDialer: net.Dialer{Control: reuse, LocalAddr: c.LocalAddr()}}).Dial,
	} {
		again, err := dial("tcp", l.Addr().String())
		if !errors.Is(err, syscall.EADDRNOTAVAIL) && !errors.Is(err, syscall.EADDRINUSE) {
			t.Errorf("connected once more from %v: %v", c.LocalAddr(), err)
		}
		if err == nil {
			again.Close()
		}
	}
	send(t, c, s, "it goes on")
	wantProvider(t, c, shm.Name)
}
