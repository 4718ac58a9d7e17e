package san_test

import (
	"fmt"
	"io"
	"log"
	"strings"

	"github.com/sanconn/san"
	"github.com/sanconn/san/regcache"
)

// Over verbs, the bytes of large Writes and Reads move between the device and the program's own slices.
// Slices of Go's heap, and variables, are registered with the device when they are used for the second to
// ninth time, and stay registered while a connection that has used them is open, unless the cache needs
// room. The program need not do anything for that, but should make its buffers once and use them again.
//
// Two kinds of memory need a call: buffers that are registered from the start, and memory that the program
// has mapped, which is copied unless the mapping is declared to stay.
func Example_buffers() {
	l, err := san.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	defer l.Close()
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		n, _ := io.Copy(io.Discard, c)
		fmt.Fprintln(c, n, "bytes")
	}()
	c, err := san.Dial("tcp", l.Addr().String())
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()

	// A buffer from the arena of the process, which has a budget. When that is
	// used up the error is ENOBUFS.
	buffer, err := regcache.DefaultArena().Get(4 << 20)
	if err != nil {
		log.Fatal(err)
	}
	defer buffer.Put()
	buffer.ReadFrom(strings.NewReader("what a file has to say"))
	buffer.WriteTo(c)

	mapped := make([]byte, 1<<20) // for example from unix.Mmap
	stable, err := regcache.Declare(mapped)
	if err != nil {
		log.Fatal(err)
	}
	c.Write(mapped)
	if err := stable.Withdraw(); err != nil { // before it is unmapped
		log.Fatal(err)
	}

	c.(interface{ CloseWrite() error }).CloseWrite()
	answer, _ := io.ReadAll(c)
	fmt.Print(string(answer))

	// What the caches of all connections have done: hits, misses, and what is registered now.
	fmt.Println(regcache.DefaultBudget().Stats().Refused, "refused")
	// Output:
	// 1048598 bytes
	// 0 refused
}
