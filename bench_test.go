package san

import (
	"io"
	"testing"
)

// BenchmarkPingPong measures a round trip of 64 bytes between two goroutines.
func BenchmarkPingPong(b *testing.B) {
	for _, l := range lanes {
		b.Run(l.name, func(b *testing.B) {
			client, server := l.pipe(b)
			go func() {
				p := make([]byte, 64)
				for {
					if _, err := io.ReadFull(server, p); err != nil {
						return
					}
					if _, err := server.Write(p); err != nil {
						return
					}
				}
			}()
			p := make([]byte, 64)
			b.ReportAllocs()
			for b.Loop() {
				if _, err := client.Write(p); err != nil {
					b.Fatal(err)
				}
				if _, err := io.ReadFull(client, p); err != nil {
					b.Fatal(err)
				}
			}
			client.Close()
		})
	}
}

// BenchmarkDial measures making, accepting and closing a connection.
func BenchmarkDial(b *testing.B) {
	for _, l := range lanes {
		b.Run(l.name, func(b *testing.B) {
			ln := l.listen(b, "127.0.0.1:0")
			d := l.dialer()
			b.ReportAllocs()
			for b.Loop() {
				c, err := d.Dial("tcp", ln.Addr().String())
				if err != nil {
					b.Fatal(err)
				}
				s, err := ln.Accept()
				if err != nil {
					b.Fatal(err)
				}
				c.Close()
				s.Close()
			}
		})
	}
}
