package san

import (
	"bytes"
	"io"
	"net"
	"os"
	"sync"
	"testing"
	"time"
)

// io.Copy uses ReadFrom at one end and WriteTo at the other; neither calls io.Copy again.
func TestCopyOfAFileBothWays(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		client, server := l.pipe(t)
		client.SetDeadline(time.Now().Add(testTimeout))
		server.SetDeadline(time.Now().Add(testTimeout))
		data := randomBytes(5<<20 + 17)
		path := t.TempDir() + "/data"
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for _, c := range []net.Conn{client, server} {
			wg.Go(func() {
				f, err := os.Open(path)
				if err != nil {
					t.Error(err)
					return
				}
				defer f.Close()
				if n, err := io.Copy(c, f); n != int64(len(data)) || err != nil {
					t.Errorf("copied %d of %d: %v", n, len(data), err)
				}
				c.(interface{ CloseWrite() error }).CloseWrite()
			})
			wg.Go(func() {
				var got bytes.Buffer
				if n, err := io.Copy(&got, c); n != int64(len(data)) || err != nil || !bytes.Equal(got.Bytes(), data) {
					t.Errorf("received %d of %d: %v", n, len(data), err)
				}
			})
		}
		wg.Wait()
	})
}

func TestCopyNStopsAtTheLimit(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		client, server := l.pipe(t)
		src := bytes.NewReader(randomBytes(300 << 10))
		for _, n := range []int64{0, 1, 70 << 10, 200 << 10} {
			client.SetDeadline(time.Now().Add(testTimeout))
			server.SetDeadline(time.Now().Add(testTimeout))
			if got, err := io.Copy(client, io.LimitReader(src, n)); got != n || err != nil {
				t.Errorf("copied %d of %d: %v", got, n, err)
			}
			if got, err := io.CopyN(io.Discard, server, n); got != n || err != nil {
				t.Errorf("received %d of %d: %v", got, n, err)
			}
		}
	})
}

// From one connection into another, as a proxy does.
func TestCopyFromConnToConn(t *testing.T) {
	eachLane(t, func(t *testing.T, l lane) {
		client, front := l.pipe(t)
		back, server := l.pipe(t)
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, err := io.Copy(back, front); err != nil {
				t.Error(err)
			}
			back.(interface{ CloseWrite() error }).CloseWrite()
		})
		data := randomBytes(3 << 20)
		wg.Go(func() {
			client.Write(data)
			client.(interface{ CloseWrite() error }).CloseWrite()
		})
		server.SetDeadline(time.Now().Add(testTimeout))
		got, err := io.ReadAll(server)
		wg.Wait()
		if err != nil || !bytes.Equal(got, data) {
			t.Errorf("%d of %d bytes came through: %v", len(got), len(data), err)
		}
	})
}
