// Server writes each stream that arrives to a temporary file, and sends it back once it has ended. It uses
// io.Copy in both directions, on a connection of package san.
package main

import (
	"crypto/sha256"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"os"

	"github.com/sanconn/san"
)

func main() {
	address := flag.String("l", "127.0.0.1:8081", "`address` to listen on")
	flag.Parse()
	l, err := san.Listen("tcp", *address)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(l.Addr())
	for {
		c, err := l.Accept()
		if err != nil {
			log.Fatal(err)
		}
		go func() {
			defer c.Close()
			if err := keepAndReturn(c); err != nil {
				log.Printf("%v: %v", c.RemoteAddr(), err)
			}
		}()
	}
}

func keepAndReturn(c net.Conn) error {
	file, err := os.CreateTemp("", "san-copy-")
	if err != nil {
		return err
	}
	defer os.Remove(file.Name())
	defer file.Close()

	if _, err := io.Copy(file, c); err != nil { // until the client's CloseWrite
		return err
	}
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return err
	}
	// The checksum is of the file's content, computed while it is sent back.
	sum := sha256.New()
	n, err := io.Copy(c, io.TeeReader(file, sum))
	if err != nil {
		return err
	}
	fmt.Printf("%x %d bytes by %s\n", sum.Sum(nil), n, san.InfoOf(c).Provider)
	return nil
}
