package interop

import (
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"
)

const fileSize = 8<<20 + 5

// fileContent returns the same bytes in both processes.
func fileContent() []byte {
	b := make([]byte, fileSize)
	for i := range b {
		b[i] = byte(i ^ i>>8 ^ i>>16)
	}
	return b
}

func serveFiles(l net.Listener) func() error {
	dir := must(os.MkdirTemp("", "interop"))
	if err := os.WriteFile(filepath.Join(dir, "file"), fileContent(), 0o600); err != nil {
		panic(err)
	}
	server := &http.Server{Handler: http.FileServer(http.Dir(dir))}
	return inBackground(func() error { return server.Serve(l) }, func() error {
		server.Close()
		return os.RemoveAll(dir)
	}, http.ErrServerClosed)
}

func useFiles(t *testing.T, dial dialFunc, address string) {
	client := &http.Client{Transport: &http.Transport{DialContext: dial}}
	defer client.CloseIdleConnections()
	want := fileContent()
	get := func(ranges string) *http.Response {
		r := must(http.NewRequestWithContext(t.Context(), "GET", "http://"+address+"/file", nil))
		if ranges != "" {
			r.Header.Set("Range", "bytes="+ranges)
		}
		response, err := client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { response.Body.Close() })
		return response
	}
	for _, tt := range []struct {
		ranges   string
		from, to int
	}{
		{"", 0, fileSize},
		{"0-0", 0, 1},
		{"1000000-4999999", 1000000, 5000000},
		{"-70000", fileSize - 70000, fileSize},
		{fmt.Sprintf("%d-", fileSize-3), fileSize - 3, fileSize},
	} {
		got, err := io.ReadAll(get(tt.ranges).Body)
		if err != nil {
			t.Error(err)
		}
		wantBytes(t, got, want[tt.from:tt.to])
	}

	several := get("5-9,1000000-1999999")
	_, params, err := mime.ParseMediaType(several.Header.Get("Content-Type"))
	if err != nil {
		t.Fatal(err)
	}
	parts := multipart.NewReader(several.Body, params["boundary"])
	for _, want := range [][]byte{want[5:10], want[1000000:2000000]} {
		part, err := parts.NextPart()
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(part)
		if err != nil {
			t.Error(err)
		}
		wantBytes(t, got, want)
	}
}
