// Pingpong measures a TCP connection whose other end is a bare descriptor in the same process:
// round trips of 64 bytes, in which each system call finds at once what it is for. So nothing
// waits, and what a round trip takes is processor time. It does not use package san.
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

// perOperation is how many nanoseconds one takes.
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
