package san

import (
	"bytes"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/sanconn/san/provider/shm"
)

// The addresses' IPs are as long as net's: programs compare and convert them without To4.
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

// A process may have any number of listeners: connections to each move.
func TestManyListeners(t *testing.T) {
	onlyShm(t)
	const many = 520 // there were numbers for 512
	for i := range many {
		l := mustListen(t, &ListenConfig{Policy: Require}, "tcp", "127.0.0.1:0")
		if i%100 == 0 || i > many-10 {
			c := mustDial(t, &Dialer{Policy: Require}, l.Addr().String())
			send(t, c, mustAccept(t, l), "there")
			wantProvider(t, c, shm.Name)
		}
	}
}

// Two ends that write before they read get as far as TCP's do, however much of the process's
// memory for streams other connections hold that nobody reads.
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
