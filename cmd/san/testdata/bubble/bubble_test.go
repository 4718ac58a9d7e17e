package bubble

import (
	"io"
	"net"
	"testing"
	"testing/synctest"
)

func TestBubble(t *testing.T) {
	for range 2 {
		synctest.Test(t, converse)
	}
	converse(t)
}

// converse uses a connection for as long as a move takes.
func converse(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		if c, err := l.Accept(); err == nil {
			io.Copy(c, c)
			c.Close()
		}
	}()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	b := make([]byte, 1000)
	for range 10000 {
		if _, err := c.Write(b); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, b); err != nil {
			t.Fatal(err)
		}
	}
}
