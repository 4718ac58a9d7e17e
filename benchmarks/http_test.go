package benchmarks

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
)

// serveHTTP answers /N with N bytes, and /file with the file.
func serveHTTP(l net.Listener, file string) error {
	body := make([]byte, 1<<20)
	return http.Serve(l, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/file" {
			http.ServeFile(w, r, file)
			return
		}
		n, err := strconv.Atoi(r.URL.Path[1:])
		if err != nil || n < 0 || n > len(body) {
			http.NotFound(w, r)
			return
		}
		w.Write(body[:n])
	}))
}

// httpClient returns a client that keeps conns connections over tr, until the benchmark ends.
func httpClient(b *testing.B, tr transport, to net.Addr, conns int) *http.Client {
	client := &http.Client{Transport: &http.Transport{
		MaxIdleConnsPerHost: conns,
		MaxConnsPerHost:     conns, // otherwise a request that finds none idle dials another one
		DialContext: func(context.Context, string, string) (net.Conn, error) {
			return tr.connect(to)
		},
	}}
	b.Cleanup(client.CloseIdleConnections)
	return client
}

// get copies what the URL has to w, and returns the number of bytes.
func get(client *http.Client, url string, w io.Writer) (int64, error) {
	r, err := client.Get(url)
	if err != nil {
		return 0, err
	}
	n, err := io.Copy(w, r.Body)
	r.Body.Close()
	if err == nil && r.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", url, r.Status)
	}
	return n, err
}

// BenchmarkHTTP requests responses of a given size from a net/http server in another process, over a
// given number of connections at a time, which are kept.
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
	server := startServer(b, "http", tr, "")
	client := httpClient(b, tr, server.addr, conns)
	url := fmt.Sprintf("http://%s/%d", server.addr, size)
	ask := func(n int) {
		var left atomic.Int64
		left.Store(int64(n))
		var all sync.WaitGroup
		for range conns {
			all.Go(func() {
				for left.Add(-1) >= 0 {
					n, err := get(client, url, io.Discard)
					if err == nil && n != int64(size) {
						err = fmt.Errorf("%d bytes", n)
					}
					if err != nil {
						b.Error(err)
						return
					}
				}
			})
		}
		all.Wait()
	}
	ask(4 * conns) // makes the connections
	if b.Failed() {
		return
	}
	b.SetBytes(int64(size))
	b.ResetTimer()
	ask(b.N)
}
