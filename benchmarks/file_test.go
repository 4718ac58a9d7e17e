package benchmarks

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"testing"
)

// fileSize is the size in bytes of the file that is sent: so large that the time to connect is
// negligible, and much larger than a processor's caches.
const fileSize = 64 << 20

// serveCopies sends the file over each connection, and closes the connection.
func serveCopies(l net.Listener, file string) error {
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			if err := sendFile(c, file); err != nil {
				fmt.Fprintln(os.Stderr, err)
			}
		}()
	}
}

func sendFile(c net.Conn, file string) error {
	defer c.Close()
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.Copy(c, f)
	return err
}

// sinks are the destinations of a received file.
var sinks = []struct {
	name string
	open func(b *testing.B) (io.Writer, error)
}{
	{"discard", func(*testing.B) (io.Writer, error) { return io.Discard, nil }},
	{"file", func(b *testing.B) (io.Writer, error) {
		f, err := os.Create(filepath.Join(b.TempDir(), "received"))
		if err == nil {
			b.Cleanup(func() { f.Close() })
		}
		return f, err
	}},
}

// BenchmarkCopyFile copies a file from another process with io.Copy at both ends, over a new connection
// each time. The files stay in the page cache; TMPDIR should be in a tmpfs.
func BenchmarkCopyFile(b *testing.B) {
	benchmarkFile(b, "copy", func(b *testing.B, tr transport, from net.Addr) download {
		return func(w io.Writer) (int64, error) {
			c, err := tr.short(from)
			if err != nil {
				return 0, err
			}
			defer c.Close()
			return io.Copy(w, c)
		}
	})
}

// BenchmarkServeFile gets the same file from a net/http server, which sends it with http.ServeFile, over
// one connection that is kept.
func BenchmarkServeFile(b *testing.B) {
	benchmarkFile(b, "http", func(b *testing.B, tr transport, from net.Addr) download {
		client := httpClient(b, tr, from, 1)
		return func(w io.Writer) (int64, error) {
			return get(client, fmt.Sprintf("http://%s/file", from), w)
		}
	})
}

// A download receives the whole file into w and returns the number of bytes.
type download func(w io.Writer) (int64, error)

// benchmarkFile measures the downloads that connect returns, into each sink and over each
// transport.
func benchmarkFile(b *testing.B, server string, connect func(*testing.B, transport, net.Addr) download) {
	content := make([]byte, fileSize)
	rand.NewChaCha8([32]byte{}).Read(content)
	file := filepath.Join(b.TempDir(), "sent")
	if err := os.WriteFile(file, content, 0o600); err != nil {
		b.Fatal(err)
	}
	for _, sink := range sinks {
		for _, tr := range transports {
			if tr.name == "unix" {
				continue
			}
			b.Run(sink.name+"/"+tr.name, func(b *testing.B) {
				w, err := sink.open(b)
				if err != nil {
					b.Fatal(err)
				}
				p := startServer(b, server, tr, file)
				benchmarkDownload(b, connect(b, tr, p.addr), p, content, w)
			})
		}
	}
}

// benchmarkDownload measures downloads into w, and the processor time that they take in both processes.
func benchmarkDownload(b *testing.B, receive download, p *process, content []byte, w io.Writer) {
	var got bytes.Buffer
	if _, err := receive(&got); err != nil {
		b.Fatal(err)
	}
	if !bytes.Equal(got.Bytes(), content) {
		b.Fatal("received other bytes than were sent")
	}
	once := func() {
		if f, ok := w.(io.Seeker); ok {
			if _, err := f.Seek(0, io.SeekStart); err != nil {
				b.Fatal(err)
			}
		}
		if n, err := receive(w); err != nil || n != int64(len(content)) {
			b.Fatalf("received %d bytes of %d: %v", n, len(content), err)
		}
	}
	once() // the received file gets its pages now
	b.SetBytes(int64(len(content)))
	before := p.cpu(b)
	for b.Loop() {
		once()
	}
	gigabytes := float64(b.N) * float64(len(content)) / 1e9
	b.ReportMetric((p.cpu(b)-before).Seconds()/gigabytes, "cpu-s/GB")
}
