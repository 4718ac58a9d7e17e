package san

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/sanconn"
)

// io.Copy uses ReadFrom at one end and WriteTo at the other. Neither of them may call io.Copy again.
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

// io.Copy from one connection into another, as in a proxy.
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

// eachSANLane runs a test on each lane that is a SAN.
func eachSANLane(t *testing.T, test func(t *testing.T, client, server *sanconn.Conn, l lane)) {
	for _, l := range sanLanes {
		if l.skipped() {
			continue
		}
		t.Run(l.name, func(t *testing.T) {
			client, server := l.sanPipe(t)
			client.SetDeadline(time.Now().Add(testTimeout))
			server.SetDeadline(time.Now().Add(testTimeout))
			test(t, client, server, l)
		})
	}
}

// wantCopied expects io.Copy to copy n bytes, and then to find the end.
func wantCopied(t *testing.T, to io.Writer, from io.Reader, n int) {
	t.Helper()
	if got, err := io.Copy(to, from); got != int64(n) || err != nil {
		t.Errorf("copied %d of %d: %v", got, n, err)
	}
}

// wantLent expects that n bytes went from one end to the other without a copy in between at either end.
func wantLent(t *testing.T, from, to *sanconn.Conn, n int) {
	t.Helper()
	sent, received := from.Stats().LentBytesSent, to.Stats().LentBytesReceived
	if sent != uint64(n) || received != uint64(n) {
		t.Errorf("of %d bytes %d were sent and %d received where they lie", n, sent, received)
	}
}

// io.Copy from a file, and to a file, uses no buffer of its own.
func TestCopyOfAFileWhereTheBytesLie(t *testing.T) {
	eachSANLane(t, func(t *testing.T, client, server *sanconn.Conn, _ lane) {
		data := randomBytes(3<<20 + 17)
		dir := t.TempDir()
		if err := os.WriteFile(dir+"/from", data, 0o600); err != nil {
			t.Fatal(err)
		}
		from, err := os.Open(dir + "/from")
		if err != nil {
			t.Fatal(err)
		}
		defer from.Close()
		to, err := os.Create(dir + "/to")
		if err != nil {
			t.Fatal(err)
		}
		defer to.Close()
		var wg sync.WaitGroup
		wg.Go(func() {
			wantCopied(t, client, from, len(data))
			client.CloseWrite()
		})
		wantCopied(t, to, server, len(data))
		wg.Wait()
		if got, err := os.ReadFile(dir + "/to"); err != nil || !bytes.Equal(got, data) {
			t.Errorf("%d bytes in the file: %v", len(got), err)
		}
		wantLent(t, client, server, len(data))
	})
}

// Neither does io.Copy from a TCP connection, and to one.
func TestCopyOfAStreamWhereTheBytesLie(t *testing.T) {
	eachSANLane(t, func(t *testing.T, client, server *sanconn.Conn, _ lane) {
		data := randomBytes(3<<20 + 17)
		in, from := plainTCP.pipe(t)
		to, out := plainTCP.pipe(t)
		var wg sync.WaitGroup
		wg.Go(func() {
			in.Write(data)
			in.(*net.TCPConn).CloseWrite()
		})
		wg.Go(func() {
			wantCopied(t, client, from, len(data))
			client.CloseWrite()
		})
		wg.Go(func() {
			wantCopied(t, to, server, len(data))
			to.(*net.TCPConn).CloseWrite()
		})
		if got, err := io.ReadAll(out); err != nil || !bytes.Equal(got, data) {
			t.Errorf("%d bytes came: %v", len(got), err)
		}
		wg.Wait()
		wantLent(t, client, server, len(data))
	})
}

// Lent memory keeps its address and content if either end closes the connection, and new connections
// take its place. The loan then ends in order.
func TestLentMemoryOutlivesTheConnection(t *testing.T) {
	for _, how := range []string{"Close", "reset", "peer's Close", "peer's reset"} {
		t.Run(how, func(t *testing.T) {
			eachSANLane(t, func(t *testing.T, client, server *sanconn.Conn, l lane) {
				data := randomBytes(3000)
				if _, err := server.Write(data); err != nil {
					t.Fatal(err)
				}
				lent, err := client.Peek()
				if err != nil {
					t.Fatal(err)
				}
				room, err := client.Reserve(3000)
				if err != nil {
					t.Fatal(err)
				}
				copy(room, data)
				ends := client
				if strings.HasPrefix(how, "peer") {
					ends = server
				}
				if strings.HasSuffix(how, "reset") {
					ends.SetLinger(0)
				}
				began := time.Now()
				ends.Close()
				if d := time.Since(began); d > 5*time.Second {
					t.Errorf("Close took %v", d)
				}
				for range 5 { // these would use memory that has become free
					c, s := l.pipe(t)
					go func() {
						c.Write(make([]byte, 1<<20))
						c.Close()
					}()
					io.Copy(io.Discard, s)
					s.Close()
				}
				if !bytes.Equal(lent, data[:len(lent)]) || !bytes.Equal(room, data[:len(room)]) {
					t.Error("lent memory was touched")
				}
				if err := client.Discard(len(lent)); err != nil {
					t.Errorf("Discard: %v", err)
				}
				if how == "peer's reset" { // over RDMA a reset is found when somebody looks for it
					client.SetReadDeadline(time.Now().Add(testTimeout))
					if _, err := io.Copy(io.Discard, client); !errors.Is(err, syscall.ECONNRESET) {
						t.Errorf("Read: %v", err)
					}
				}
				// The first Write after the peer's Close cannot know of that yet.
				if err := client.Commit(len(room)); err == nil && how != "peer's Close" {
					t.Error("Commit has sent something")
				}
			})
		})
	}
}
