package san

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
)

// web is an HTTP server and a client of net/http whose connections use one lane.
type web struct {
	*httptest.Server
	client *http.Client
}

// httpKinds are net/http's protocols over a net.Conn.
var httpKinds = []struct {
	name  string
	proto string
	tls   bool
}{
	{"HTTP/1.1", "HTTP/1.1", false},
	{"h2c", "HTTP/2.0", false},
	{"h2", "HTTP/2.0", true},
}

func eachHTTP(t *testing.T, test func(t *testing.T, start func(http.Handler, ...func(*http.Server)) *web)) {
	eachLane(t, func(t *testing.T, l lane) {
		for _, k := range httpKinds {
			t.Run(k.name, func(t *testing.T) {
				test(t, func(h http.Handler, change ...func(*http.Server)) *web {
					return startWeb(t, l, k.proto, k.tls, h, change...)
				})
			})
		}
	})
}

func startWeb(t *testing.T, l lane, proto string, withTLS bool, h http.Handler, change ...func(*http.Server)) *web {
	t.Helper()
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Proto != proto {
			t.Errorf("%s instead of %s", r.Proto, proto)
		}
		h.ServeHTTP(w, r)
	}))
	s.Listener.Close()
	s.Listener = l.listen(t, l.here())
	s.Config.ConnState = func(c net.Conn, state http.ConnState) {
		if info := InfoOf(c); state == http.StateNew && !l.moving && info.Provider != l.provider {
			t.Errorf("the server is on %s", info.Provider)
		}
	}
	s.Config.ErrorLog = serverLog(t)
	for _, f := range change {
		f(s.Config)
	}
	var protocols http.Protocols
	protocols.SetHTTP1(proto == "HTTP/1.1")
	protocols.SetHTTP2(proto == "HTTP/2.0" && withTLS)
	protocols.SetUnencryptedHTTP2(proto == "HTTP/2.0" && !withTLS)
	s.Config.Protocols = &protocols
	if withTLS {
		s.EnableHTTP2 = true
		s.StartTLS()
	} else {
		s.Start()
	}
	client := s.Client()
	tr := client.Transport.(*http.Transport)
	tr.Protocols = &protocols
	if withTLS && l.host != "" {
		tr.TLSClientConfig.ServerName = "example.com" // of addresses, its certificate has only loopback
	}
	dialer := l.dialer()
	tr.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dialer.DialContext(ctx, network, addr)
		if info := InfoOf(c); err == nil && !l.moving && info.Provider != l.provider {
			t.Errorf("the client is on %s (%v)", info.Provider, info.Fallback)
		}
		l.begin(c)
		return c, err
	}
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
	})
	return &web{s, client}
}

// serverLog collects a server's log, which is mostly about clients that went away, and shows it if the
// test fails.
func serverLog(t *testing.T) *log.Logger {
	var mu sync.Mutex
	var lines bytes.Buffer
	t.Cleanup(func() {
		mu.Lock()
		defer mu.Unlock()
		if t.Failed() && lines.Len() > 0 {
			t.Logf("the server's log:\n%s", lines.Bytes())
		}
	})
	return log.New(writerFunc(func(p []byte) (int, error) {
		mu.Lock()
		defer mu.Unlock()
		return lines.Write(p)
	}), "", log.Ltime|log.Lmicroseconds)
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// stream is a body of a given length in which each byte depends on its position.
type stream struct{ at, end int }

func (s *stream) Read(p []byte) (int, error) {
	if s.at == s.end {
		return 0, io.EOF
	}
	n := min(len(p), s.end-s.at)
	position(p[:n], s.at)
	s.at += n
	return n, nil
}

// verify reads all of r and checks it against a stream of that length.
func verify(r io.Reader, length int) error {
	at := 0
	b := make([]byte, 64<<10)
	for {
		n, err := r.Read(b)
		if i := misplaced(b[:n], at); i >= 0 {
			return fmt.Errorf("byte %d is not what was written there", i)
		}
		at += n
		if err == io.EOF {
			if at != length {
				return fmt.Errorf("%d bytes instead of %d", at, length)
			}
			return nil
		}
		if err != nil {
			return fmt.Errorf("after %d of %d bytes: %w", at, length, err)
		}
	}
}

func (w *web) wantFine(t *testing.T) {
	t.Helper()
	resp, err := w.client.Get(w.URL + "/fine")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if b, err := io.ReadAll(resp.Body); string(b) != "fine" || err != nil {
		t.Errorf("read %q, %v", b, err)
	}
}
