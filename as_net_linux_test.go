package san

import (
	"net"
	"testing"

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
