package benchmarks

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

// serveVar names the transport over which this program, started once more, serves HTTP.
const serveVar = "BENCH_HTTP"

func TestMain(m *testing.M) {
	for _, tr := range transports {
		if tr.name == os.Getenv(serveVar) {
			if err := serveHTTP(tr); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			return
		}
	}
	os.Exit(m.Run())
}

// serveHTTP answers /N with N bytes, until its standard input ends.
func serveHTTP(tr transport) error {
	l, err := tr.listen("")
	if err != nil {
		return err
	}
	body := make([]byte, 1<<20)
	var s http.Server
	s.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n, err := strconv.Atoi(r.URL.Path[1:])
		if err != nil || n < 0 || n > len(body) {
			http.NotFound(w, r)
			return
		}
		w.Write(body[:n])
	})
	go func() {
		io.Copy(io.Discard, os.Stdin)
		s.Close()
	}()
	fmt.Println(l.Addr())
	if err := s.Serve(l); err != http.ErrServerClosed {
		return err
	}
	return nil
}

// BenchmarkHTTP asks a net/http server in another process, by so many connections at a
// time, which it keeps, for responses of so many bytes.
func BenchmarkHTTP(b *testing.B) {
	for _, size := range []int{100, 100 << 10, 1 << 20} {
		for _, conns := range []int{1, 8, 64} {
			for _, tr := range transports {
				if tr.name == "unix" {
					continue
				}
				b.Run(fmt.Sprintf("%dB/%d/%s", size, conns, tr.name), func(b *testing.B) {
					benchmarkHTTP(b, tr, size, conns)
				})
			}
		}
	}
}

func benchmarkHTTP(b *testing.B, tr transport, size, conns int) {
	server := exec.Command(os.Args[0])
	server.Env = append(os.Environ(), serveVar+"="+tr.name)
	server.Stderr = os.Stderr
	out, err := server.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	in, err := server.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := server.Start(); err != nil {
		b.Fatal(err)
	}
	defer server.Wait()
	defer in.Close()
	addr, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		b.Fatal(err)
	}
	addr = strings.TrimSpace(addr)

	client := http.Client{Transport: &http.Transport{
		MaxIdleConnsPerHost: conns,
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			to, err := net.ResolveTCPAddr(network, address)
			if err != nil {
				return nil, err
			}
			return tr.connect(to)
		},
	}}
	defer client.CloseIdleConnections()
	get := func() error {
		r, err := client.Get("http://" + addr + "/" + strconv.Itoa(size))
		if err != nil {
			return err
		}
		n, err := io.Copy(io.Discard, r.Body)
		r.Body.Close()
		if err == nil && (n != int64(size) || r.StatusCode != http.StatusOK) {
			err = fmt.Errorf("%s, %d bytes", r.Status, n)
		}
		return err
	}
	ask := func(n int) {
		var left atomic.Int64
		left.Store(int64(n))
		var all sync.WaitGroup
		for range conns {
			all.Go(func() {
				for left.Add(-1) >= 0 {
					if err := get(); err != nil {
						b.Error(err)
						return
					}
				}
			})
		}
		all.Wait()
	}
	ask(4 * conns) // connects
	if b.Failed() {
		return
	}
	b.SetBytes(int64(size))
	b.ResetTimer()
	ask(b.N)
}
