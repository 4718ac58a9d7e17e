// Pingpong measures a TCP connection to itself as a server: round trips of 64 bytes, a second of
// them, and reads of no bytes, which make no system call. It knows nothing of package san.
package main

import (
	"fmt"
	"io"
	"net"
	"os"
	"time"
)

func main() {
	if len(os.Args) == 1 {
		serve()
		return
	}
	c, err := net.Dial("tcp", os.Args[1])
	check(err)
	b := make([]byte, 64)
	fmt.Println(perOperation(30_000, func() {
		_, err := c.Write(b)
		check(err)
		_, err = io.ReadFull(c, b)
		check(err)
	}), perOperation(1_000_000, func() {
		if _, err := c.Read(nil); err != nil {
			check(err)
		}
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

func serve() {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	check(err)
	fmt.Println(l.Addr())
	for {
		c, err := l.Accept()
		check(err)
		go func() {
			defer c.Close()
			b := make([]byte, 64)
			for {
				if _, err := io.ReadFull(c, b); err != nil {
					return
				}
				if _, err := c.Write(b); err != nil {
					return
				}
			}
		}()
	}
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
