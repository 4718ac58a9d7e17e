// Echo dials itself, and prints what has carried the connection at both ends after each step. It
// uses package san only for that.
package main

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"time"

	"github.com/sanconn/san"
)

func main() {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	check(err)
	c, err := net.Dial("tcp", l.Addr().String())
	check(err)
	s, err := l.Accept()
	check(err)
	dialed, accepted := c.(*net.TCPConn), s.(*net.TCPConn)
	say := func(step string) {
		fmt.Printf("%s: %s %s\n", step, san.InfoOf(c).Provider, san.InfoOf(s).Provider)
	}
	say("at first")

	// It moves once it has been used enough.
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		echo(dialed, accepted)
		if san.InfoOf(c).Provider != "tcp" && san.InfoOf(s).Provider != "tcp" {
			break
		}
	}
	say("used")

	// Calls that act on the socket work.
	check(dialed.SetNoDelay(false))
	check(dialed.SetKeepAlivePeriod(time.Minute))
	check(dialed.SetReadDeadline(time.Now().Add(time.Millisecond)))
	if _, err := dialed.Read(make([]byte, 1)); !isTimeout(err) {
		fail("Read behind its deadline: %v", err)
	}
	check(dialed.SetReadDeadline(time.Time{}))
	echo(dialed, accepted)
	say("options")

	// So do other ways to read and write than Read and Write.
	sent := bytes.Repeat([]byte("0123456789abcdef"), 1<<14)
	file, err := os.CreateTemp("", "echo")
	check(err)
	defer os.Remove(file.Name())
	_, err = file.Write(sent)
	check(err)
	_, err = file.Seek(0, io.SeekStart)
	check(err)
	go func() {
		n, err := io.Copy(dialed, file)
		check(err)
		if n != int64(len(sent)) {
			fail("copied %d bytes", n)
		}
		buffers := net.Buffers{sent[:100], sent[100:]}
		_, err = buffers.WriteTo(dialed)
		check(err)
	}()
	for range 2 {
		got := make([]byte, len(sent))
		_, err = io.ReadFull(accepted, got)
		check(err)
		if !bytes.Equal(got, sent) {
			fail("other bytes than were sent")
		}
	}
	say("copied")

	// While a function has the descriptor of a connection that goes back to TCP, a concurrent Read gets
	// no bytes; it does once the function has returned.
	raw, err := dialed.SyscallConn()
	check(err)
	one := make([]byte, 1)
	_, err = accepted.Write(one)
	check(err)
	check(raw.Read(func(fd uintptr) bool {
		_, err := syscall.Read(int(fd), one)
		return err != syscall.EAGAIN
	}))
	say("by a function")
	has, ends, ended := make(chan struct{}), make(chan struct{}), make(chan error, 2)
	go func() {
		ended <- raw.Read(func(fd uintptr) bool {
			if _, err := syscall.Read(int(fd), one); err != syscall.EAGAIN {
				fail("nothing has come, and Read has %v", err)
			}
			close(has)
			<-ends
			return true
		})
	}()
	<-has
	peers, err := accepted.SyscallConn()
	check(err)
	check(peers.Control(func(uintptr) {}))
	_, err = accepted.Write(one)
	check(err)
	time.Sleep(50 * time.Millisecond) // until the poller has reported the bytes
	check(dialed.SetReadDeadline(time.Now().Add(20 * time.Second)))
	go func() {
		_, err := dialed.Read(one)
		ended <- err
	}()
	time.Sleep(50 * time.Millisecond) // until the Read waits
	close(ends)
	for i := 0; i < cap(ended); i++ { // it must also compile as Go 1.16
		check(<-ended)
	}
	check(dialed.SetReadDeadline(time.Time{}))
	say("gone back")

	// The program gets the descriptor for a moment, or for good.
	check(raw.Control(func(fd uintptr) {
		for _, o := range []struct{ level, name, want int }{
			{syscall.SOL_SOCKET, syscall.SO_KEEPALIVE, 1},
			{syscall.IPPROTO_TCP, syscall.TCP_KEEPIDLE, 60},
			{syscall.IPPROTO_TCP, syscall.TCP_NODELAY, 0},
		} {
			if v, err := syscall.GetsockoptInt(int(fd), o.level, o.name); err != nil || v != o.want {
				fail("option %d of level %d is %d, %v, want %d", o.name, o.level, v, err, o.want)
			}
		}
	}))
	echo(dialed, accepted)
	f, err := accepted.File()
	check(err)
	f.Close()
	echo(dialed, accepted)
	say("with a descriptor")

	// Both ends of a copy are connections that move.
	d, err := net.Dial("tcp", l.Addr().String())
	check(err)
	e, err := l.Accept()
	check(err)
	go func() {
		_, err := io.Copy(d, accepted)
		check(err)
		check(d.(*net.TCPConn).CloseWrite())
	}()
	go func() {
		_, err := dialed.Write(sent)
		check(err)
		check(dialed.CloseWrite())
	}()
	got, err := io.ReadAll(e)
	check(err)
	if !bytes.Equal(got, sent) {
		fail("%d bytes came through", len(got))
	}
	for _, c := range []net.Conn{c, s, d, e} {
		check(c.Close())
		if c.Close() == nil {
			fail("a second Close has no error")
		}
	}
	check(l.Close())

	open := 0
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if open = san.Stats().Open["shm"]; open == 0 {
			break
		}
	}
	fmt.Println("open at the end:", open)
}

// echo sends 1000 bytes one way and back.
func echo(a, b net.Conn) {
	sent, got := bytes.Repeat([]byte("x"), 1000), make([]byte, 1000)
	for _, way := range [][2]net.Conn{{a, b}, {b, a}} {
		_, err := way[0].Write(sent)
		check(err)
		_, err = io.ReadFull(way[1], got)
		check(err)
	}
}

func isTimeout(err error) bool {
	e, ok := err.(net.Error)
	return ok && e.Timeout()
}

func check(err error) {
	if err != nil {
		fail("%v", err)
	}
}

func fail(format string, args ...any) {
	panic(fmt.Sprintf(format, args...))
}
