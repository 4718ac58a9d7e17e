package interop

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// What net/http does with a connection beyond requests and responses.

// Server-sent events: the server sends each event after a request that the client makes when it has
// received the one before.
func serveEvents(l net.Listener) func() error {
	next := make(chan bool)
	var mux http.ServeMux
	mux.HandleFunc("/events", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for i := 0; ; i++ {
			fmt.Fprintf(w, "data: %d\n\n", i)
			if err := http.NewResponseController(w).Flush(); err != nil {
				return
			}
			select {
			case <-next:
			case <-r.Context().Done():
				close(next) // the client learns that the server has noticed
				return
			}
		}
	})
	mux.HandleFunc("/next", func(w http.ResponseWriter, r *http.Request) { next <- true })
	mux.HandleFunc("/left", func(w http.ResponseWriter, r *http.Request) { <-next })
	server := &http.Server{Handler: &mux}
	return inBackground(func() error { return server.Serve(l) }, server.Close, http.ErrServerClosed)
}

func useEvents(t *testing.T, dial dialFunc, address string) {
	client := &http.Client{Transport: &http.Transport{DialContext: dial}}
	defer client.CloseIdleConnections()
	get := func(ctx context.Context, path string) *http.Response {
		r, err := client.Do(must(http.NewRequestWithContext(ctx, "GET", "http://"+address+path, nil)))
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	stream := get(ctx, "/events")
	defer stream.Body.Close()
	lines := bufio.NewScanner(stream.Body)
	for i := range 100 {
		if !lines.Scan() || lines.Text() != fmt.Sprint("data: ", i) || !lines.Scan() || lines.Text() != "" {
			t.Fatalf("event %d: %q, %v", i, lines.Text(), lines.Err())
		}
		get(t.Context(), "/next").Body.Close()
	}
	leave()
	get(t.Context(), "/left").Body.Close() // returns once the handler has noticed
}

// The protocol of a hijacked connection: the client sends until it closes its direction, and then gets a
// checksum.
func serveHijack(l net.Listener) func() error {
	var hijacked sync.WaitGroup
	hijacked.Add(1) // until stop, because nothing else orders a handler's first Go before Wait
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, buffered, err := http.NewResponseController(w).Hijack()
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		hijacked.Go(func() {
			defer c.Close()
			io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: sum\r\n\r\n")
			data, err := io.ReadAll(buffered)
			if err != nil {
				return // the client notices that its checksum is missing
			}
			io.WriteString(c, checksum(data))
		})
	})}
	return inBackground(func() error { return server.Serve(l) }, func() error {
		defer hijacked.Wait()
		hijacked.Done()
		return server.Close()
	}, http.ErrServerClosed)
}

func useHijack(t *testing.T, dial dialFunc, address string) {
	c := mustDial(t, dial, address)
	data := randomBytes(amount(3<<20 + 1))
	request := "GET / HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: sum\r\n\r\n"
	if _, err := c.Write(append([]byte(request), data...)); err != nil {
		t.Fatal(err)
	}
	if err := c.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	r := bufio.NewReader(c)
	response, err := http.ReadResponse(r, nil)
	if err != nil || response.StatusCode != http.StatusSwitchingProtocols {
		t.Fatal(response, err)
	}
	if got, err := io.ReadAll(r); err != nil || string(got) != checksum(data) {
		t.Errorf("the server's checksum is %s, want %s: %v", got, checksum(data), err)
	}
}

// The server begins its Shutdown in the middle of a response.
func serveShutdown(l net.Listener) func() error {
	var server *http.Server
	var refusing sync.WaitGroup
	down := make(chan error, 1)
	var mux http.ServeMux
	mux.HandleFunc("/idle", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("/last", func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, "first ")
		http.NewResponseController(w).Flush()
		go func() { down <- server.Shutdown(context.Background()) }()
		refusing.Wait()
		io.WriteString(w, strings.Repeat("last", 100_000))
	})
	server = &http.Server{Handler: &mux}
	refusing.Add(1)
	server.RegisterOnShutdown(refusing.Done) // by then the listener is closed
	stop := inBackground(func() error { return server.Serve(l) }, func() error { return <-down }, http.ErrServerClosed)
	return stop
}

func useShutdown(t *testing.T, dial dialFunc, address string) {
	client := &http.Client{Transport: &http.Transport{DialContext: dial}}
	defer client.CloseIdleConnections()
	idle := mustDial(t, dial, address) // it has made a request, and is idle
	fmt.Fprintf(idle, "GET /idle HTTP/1.1\r\nHost: h\r\n\r\n")
	fromIdle := bufio.NewReader(idle)
	if _, err := http.ReadResponse(fromIdle, nil); err != nil {
		t.Fatal(err)
	}
	r, err := client.Get("http://" + address + "/last")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	if got, err := io.ReadAll(r.Body); err != nil || len(got) != len("first ")+400_000 {
		t.Errorf("the last response ends after %d bytes: %v", len(got), err)
	}
	if _, err := fromIdle.ReadByte(); !errors.Is(err, io.EOF) {
		t.Errorf("an idle connection: %v", err)
	}
	if c, err := dial(t.Context(), "tcp", address); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a dial after the shutdown: %v, %v", c, err)
	}
}
