package san

import (
	"io"
	"sync"
	"testing"
	"time"

	"github.com/sanconn/san/sanconn"
)

// Connections of the moving lane do move, in the middle of streams in both directions: both carriers
// have carried bytes, and each byte arrives in its place.
func TestMovingLanesMove(t *testing.T) {
	for _, l := range systemLanes {
		if !l.moving {
			continue
		}
		t.Run(l.name, func(t *testing.T) {
			client, server := l.sanPipe(t)
			moved := func() bool {
				return InfoOf(client).Provider == l.provider && InfoOf(server).Provider == l.provider
			}
			var streaming sync.WaitGroup
			for from, to := range map[*sanconn.Conn]*sanconn.Conn{client: server, server: client} {
				from.SetDeadline(time.Now().Add(testTimeout))
				sent := make(chan int, 1)
				streaming.Go(func() {
					b, at := make([]byte, 10_000), 0
					for last := false; !last; at += len(b) {
						last = moved()
						position(b, at)
						if _, err := from.Write(b); err != nil {
							t.Error(err)
							break
						}
					}
					from.CloseWrite()
					sent <- at
				})
				streaming.Go(func() {
					b, at := make([]byte, 7_000), 0
					for {
						n, err := to.Read(b)
						if i := misplaced(b[:n], at); i >= 0 {
							t.Errorf("byte %d is not what was written there", i)
							to.Close()
							return
						}
						if at += n; err != nil {
							if want := <-sent; err != io.EOF || at != want {
								t.Errorf("%d of %d bytes, %v", at, want, err)
							}
							return
						}
					}
				})
			}
			streaming.Wait()
			for name, c := range map[string]*sanconn.Conn{"dialer": client, "acceptor": server} {
				if info := InfoOf(c); info.TCPBytes == 0 || info.SANBytes == 0 {
					t.Errorf("%s: %+v", name, info)
				}
			}
		})
	}
}
