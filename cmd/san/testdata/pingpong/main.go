// Pingpong measures a TCP connection whose other end is a bare descriptor in the same process, by round
// trips of 64 bytes. No system call has to wait for what it needs, so the time of a round trip is
// processor time only. It does not use package san.
package main

import (
	"fmt"
	"io"
	"net"
	"syscall"
	"time"
)

func main() {
	l, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	check(err)
	check(syscall.Bind(l, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	check(syscall.Listen(l, 1))
	at, err := syscall.Getsockname(l)
	check(err)
	c, err := net.Dial("tcp", fmt.Sprint("127.0.0.1:", at.(*syscall.SockaddrInet4).Port))
	check(err)
	peer, _, err := syscall.Accept(l)
	check(err)
	b := make([]byte, 64)
	fmt.Println(perOperation(100_000, func() {
		_, err := c.Write(b)
		check(err)
		_, err = syscall.Read(peer, b)
		check(err)
		_, err = syscall.Write(peer, b)
		check(err)
		_, err = io.ReadFull(c, b)
		check(err)
	}))
}

// perOperation returns how many nanoseconds one call of f takes, in the mean of n.
func perOperation(n int, f func()) float64 {
	for range n / 10 {
		f()
	}
	start := time.Now()
	for range n {
		f()
	}
	return float64(time.Since(start).Nanoseconds()) / float64(n)
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
