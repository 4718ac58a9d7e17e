// Beside does what a program may do in addition to net's Dial and Listen: it uses connections of package
// san, copies of descriptors, and other networks than TCP. It publishes a variable under the name that
// docs/OPERATING.md reserves for one.
package main

import (
	"expvar"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/sanconn/san"
	"github.com/sanconn/san/sanconn"
)

func main() {
	expvar.Publish("san", expvar.Func(func() any { return san.Stats() }))
	fmt.Println("published by san build:", expvar.Get("sanbuild") != nil)

	tcp := listen(net.Listen)
	own := listen(san.Listen)
	adopted, err := new(san.ListenConfig).Adopt(listen(net.Listen).(*net.TCPListener))
	check(err)
	for _, pair := range []struct {
		name string
		l    net.Listener
		dial func(network, address string) (net.Conn, error)
		ours [2]bool // is a *sanconn.Conn
	}{
		{name: "net.Dial, net.Listen", l: tcp, dial: net.Dial},
		{name: "net.Dial, san.Listen", l: own, dial: net.Dial, ours: [2]bool{false, true}},
		{name: "san.Dial, net.Listen", l: tcp, dial: san.Dial, ours: [2]bool{true, false}},
		{name: "net.Dial, Adopt", l: adopted, dial: net.Dial, ours: [2]bool{false, true}},
	} {
		c, s := connect(pair.l, pair.dial)
		for i, end := range []net.Conn{c, s} {
			if _, ours := end.(*sanconn.Conn); ours != pair.ours[i] {
				fail("%s: end %d is a %T", pair.name, i, end)
			}
		}
		move(c, s)
		fmt.Printf("%s: %s %s\n", pair.name, san.InfoOf(c).Provider, san.InfoOf(s).Provider)
		c.Close()
		s.Close()
	}

	// Copies of the descriptors of a connection that has moved, and of a listener.
	c, s := connect(tcp, net.Dial)
	move(c, s)
	f, err := s.(*net.TCPConn).File()
	check(err)
	s.Close()
	s, err = net.FileConn(f)
	check(err)
	f.Close()
	echo(c, s)
	fmt.Printf("net.FileConn: %s %s\n", san.InfoOf(c).Provider, san.InfoOf(s).Provider)
	f, err = tcp.(*net.TCPListener).File()
	check(err)
	tcp.Close()
	tcp, err = net.FileListener(f)
	check(err)
	f.Close()
	c, s = connect(tcp, net.Dial)
	move(c, s)
	fmt.Printf("net.FileListener: %s %s\n", san.InfoOf(c).Provider, san.InfoOf(s).Provider)

	// Networks other than TCP.
	dir, err := os.MkdirTemp("", "beside")
	check(err)
	defer os.RemoveAll(dir)
	unix, err := net.Listen("unix", filepath.Join(dir, "socket"))
	check(err)
	echo(connect(unix, net.Dial))
	a, err := net.ListenPacket("udp", "127.0.0.1:0")
	check(err)
	b, err := net.Dial("udp", a.LocalAddr().String())
	check(err)
	_, err = b.Write([]byte("datagram"))
	check(err)
	buf := make([]byte, 100)
	n, _, err := a.ReadFrom(buf)
	check(err)
	addrs, err := net.LookupHost("localhost")
	check(err)
	fmt.Printf("udp: %s; localhost: %v\n", buf[:n], len(addrs) > 0)
}

func listen(by func(network, address string) (net.Listener, error)) net.Listener {
	l, err := by("tcp", "127.0.0.1:0")
	check(err)
	return l
}

func connect(l net.Listener, dial func(network, address string) (net.Conn, error)) (c, s net.Conn) {
	c, err := dial(l.Addr().Network(), l.Addr().String())
	check(err)
	s, err = l.Accept()
	check(err)
	return c, s
}

// move uses a connection until it has moved.
func move(c, s net.Conn) {
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		echo(c, s)
		if san.InfoOf(c).Provider != "tcp" && san.InfoOf(s).Provider != "tcp" {
			return
		}
	}
}

func echo(a, b net.Conn) {
	buf := make([]byte, 1)
	for _, way := range [][2]net.Conn{{a, b}, {b, a}} {
		_, err := way[0].Write(buf)
		check(err)
		_, err = way[1].Read(buf)
		check(err)
	}
}

func check(err error) {
	if err != nil {
		fail("%v", err)
	}
}

func fail(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }
