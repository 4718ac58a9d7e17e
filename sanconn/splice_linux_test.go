package sanconn_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/twin"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/session"
)

// readByThisProcess returns how many bytes the process has read by system calls. splice(2) does not
// count.
func readByThisProcess(t *testing.T) (n int64) {
	t.Helper()
	b, err := os.ReadFile("/proc/self/io")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Sscanf(string(b), "rchar: %d", &n); err != nil {
		t.Fatal(err)
	}
	return n
}

// Copies between connections on TCP, from or to a plain socket, and to a file go by splice, as in net,
// which brings no byte into the process.
func TestCopyBetweenSocketsIsSpliced(t *testing.T) {
	const n = 16 << 20
	for name, mk := range map[string]func(t *testing.T) (from io.Writer, src io.Reader, dst io.Writer, to io.Reader){
		"connections": func(t *testing.T) (io.Writer, io.Reader, io.Writer, io.Reader) {
			a, b := pipe(t, onTCP, nil)
			c, d := pipe(t, onTCP, nil)
			return a, b, c, d
		},
		"from a socket": func(t *testing.T) (io.Writer, io.Reader, io.Writer, io.Reader) {
			a, b := sockets(t)
			c, d := pipe(t, onTCP, nil)
			return a, b, c, d
		},
		"to a socket": func(t *testing.T) (io.Writer, io.Reader, io.Writer, io.Reader) {
			a, b := pipe(t, onTCP, nil)
			c, d := sockets(t)
			return a, b, c, d
		},
		"to a file": func(t *testing.T) (io.Writer, io.Reader, io.Writer, io.Reader) {
			a, b := pipe(t, onTCP, nil)
			return a, b, fileOf(t, nil), nil
		},
		"to a file's end": func(t *testing.T) (io.Writer, io.Reader, io.Writer, io.Reader) { // not by splice(2)
			a, b := pipe(t, onTCP, nil)
			f, err := os.OpenFile(filepath.Join(t.TempDir(), "data"), os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { f.Close() })
			return a, b, f, nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			from, src, dst, to := mk(t)
			data := pattern(n)
			before := readByThisProcess(t)
			go func() {
				from.Write(data)
				from.(interface{ CloseWrite() error }).CloseWrite()
			}()
			copying := goCopy(dst, src)
			var got []byte
			if to != nil {
				got = make([]byte, n)
				if _, err := io.ReadFull(to, got); err != nil {
					t.Fatal(err)
				}
			}
			if r := ended(t, copying); r.n != n || r.err != nil {
				t.Errorf("copied %d of %d, %v", r.n, n, r.err)
			}
			read := readByThisProcess(t) - before
			if to == nil {
				var err error
				if got, err = os.ReadFile(dst.(*os.File).Name()); err != nil {
					t.Fatal(err)
				}
				read += n
			}
			wantBytes(t, got, data)
			if spliced := read < 3*n/2; spliced != (name != "to a file's end") {
				t.Errorf("%d bytes were read by this process, which has to read %d", read, n)
			}
		})
	}
}

// A copy of a file on TCP goes by sendfile, as in net. sendfile gives the socket the file's own pages,
// so bytes that are written to them before the peer reads are what arrives. A count of read bytes would
// not show it, because sendfile adds to it.
func TestCopyOfAFileOnTCPIsSendfile(t *testing.T) {
	const n = 16 << 10 // the sockets take it without a Read
	a, b := pipe(t, onTCP, nil)
	f := fileOf(t, make([]byte, n))
	if m, err := io.Copy(a, f); m != n || err != nil {
		t.Fatalf("copied %d of %d, %v", m, n, err)
	}
	later := pattern(n)
	if _, err := f.WriteAt(later, 0); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, n)
	if _, err := io.ReadFull(b, got); err != nil {
		t.Fatal(err)
	}
	wantBytes(t, got, later)
	if a.Provider() != "tcp" {
		t.Errorf("it went by %s", a.Provider())
	}
}

// A copy on TCP to a writer that splice cannot reach uses one buffer.
func TestCopyOnTCPHasOneBuffer(t *testing.T) {
	a, b := pipe(t, onTCP, nil)
	const n = 32 << 20
	data := pattern(n)
	go func() {
		a.Write(data)
		a.CloseWrite()
	}()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if r := ended(t, goCopy(io.Discard, b)); r.n != n || r.err != nil {
		t.Errorf("copied %d of %d, %v", r.n, n, r.err)
	}
	runtime.ReadMemStats(&after)
	if made := after.TotalAlloc - before.TotalAlloc; made > n/32 {
		t.Errorf("%d bytes were allocated to copy %d", made, n)
	}
}

// sockets returns both ends of a stream socket, as net's connections.
func sockets(t *testing.T) (a, b net.Conn) {
	a, b, err := socketsOf()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		a.Close()
		b.Close()
	})
	return a, b
}

// A proxy whose connections move, and go back, in the middle of its copies in both directions loses no
// byte, and passes on each end of stream.
func TestProxyOfConnectionsThatMove(t *testing.T) {
	var byTCP, all uint64
	for seed := range uint64(20) {
		client, front := pipe(t, onTCP, nil)
		back, server := pipe(t, onTCP, nil)
		over := make(chan struct{})
		var wg, movers sync.WaitGroup
		for i, pair := range [][2]*sanconn.Conn{{client, front}, {back, server}} {
			movers.Go(func() {
				r := rand.New(rand.NewPCG(seed, uint64(i)))
				for {
					select {
					case <-over:
						return
					case <-time.After(time.Duration(r.IntN(3000)) * time.Microsecond):
					}
					ea, eb := twin.Pair(twin.Config{})
					ctx, cancel := context.WithTimeout(context.Background(), patience)
					movePair(ctx, pair[0], pair[1], ea, eb, sessions{}) // fails once a stream has ended
					cancel()
					pause(r)
					sanconn.LeaveSAN(pair[r.IntN(2)]) // may fail likewise
				}
			})
		}
		for _, way := range [][2]*sanconn.Conn{{front, back}, {back, front}} {
			wg.Go(func() {
				if _, err := io.Copy(way[1], way[0]); err != nil {
					t.Errorf("seed %d: the proxy's copy: %v", seed, err)
				}
				way[1].CloseWrite()
			})
		}
		data := pattern(3<<20 + 17)
		for _, way := range [][2]*sanconn.Conn{{client, server}, {server, client}} {
			wg.Go(func() {
				r := rand.New(rand.NewPCG(seed, 7))
				for at := 0; at < len(data); {
					k := min(1+r.IntN(1<<uint(4+r.IntN(15))), len(data)-at)
					if _, err := way[0].Write(data[at : at+k]); err != nil {
						t.Errorf("seed %d: %v", seed, err)
						break
					}
					if at += k; r.IntN(20) == 0 {
						pause(r)
					}
				}
				way[0].CloseWrite()
			})
			wg.Go(func() {
				got, err := io.ReadAll(way[1])
				if err != nil {
					t.Errorf("seed %d: %v", seed, err)
				}
				wantBytes(t, got, data)
			})
		}
		wg.Wait()
		close(over)
		movers.Wait()
		for _, c := range []*sanconn.Conn{client, front, back, server} {
			byTCP, all = byTCP+c.Stats().TCPBytesSent, all+uint64(len(data))
		}
		if t.Failed() {
			return
		}
	}
	if byTCP == 0 || byTCP == all {
		t.Errorf("of %d bytes %d went by TCP", all, byTCP)
	}
}

// A copy from a socket fails if the peer has closed, even during a loan of room.
func TestCopyBesideALoanBehindThePeersClose(t *testing.T) {
	a, b := pipe(t, session.Limits{}, nil)
	if _, err := a.Reserve(5); err != nil {
		t.Fatal(err)
	}
	b.Close()
	a.SetDeadline(time.Now().Add(patience))
	if _, err := a.Peek(); err != io.EOF {
		t.Fatalf("the peer's end: %v", err)
	}
	w, r := sockets(t)
	if _, err := w.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if x := ended(t, goCopy(a, r)); !errors.Is(x.err, syscall.EPIPE) {
		t.Errorf("%d bytes, %v", x.n, x.err)
	}
}
