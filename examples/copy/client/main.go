// Client sends a file to the server example, reads it back, and compares checksums. It uses io.Copy in
// both directions, on a connection of package san.
package main

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"log"
	"os"

	"github.com/sanconn/san"
)

func main() {
	log.SetFlags(0)
	if len(os.Args) != 3 {
		log.Fatal("usage: client ADDRESS FILE")
	}
	if err := run(os.Args[1], os.Args[2]); err != nil {
		log.Fatal(err)
	}
}

func run(address, name string) error {
	file, err := os.Open(name)
	if err != nil {
		return err
	}
	defer file.Close()
	want := sha256.New()
	if _, err := io.Copy(want, file); err != nil {
		return err
	}
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return err
	}

	c, err := san.Dial("tcp", address)
	if err != nil {
		return err
	}
	defer c.Close()
	sent, err := io.Copy(c, file)
	if err != nil {
		return err
	}
	// *sanconn.Conn can end one direction alone, as *net.TCPConn can.
	if err := c.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		return err
	}
	got := sha256.New()
	received, err := io.Copy(got, c)
	if err != nil {
		return err
	}
	if sent != received || !bytes.Equal(got.Sum(nil), want.Sum(nil)) {
		return fmt.Errorf("sent %d bytes with checksum %x, got %d with %x back", sent, want.Sum(nil), received, got.Sum(nil))
	}
	fmt.Printf("%x %d bytes by %s\n", got.Sum(nil), received, san.InfoOf(c).Provider)
	return nil
}
