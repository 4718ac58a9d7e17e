//go:build linux && cgo

package hwsim_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strconv"
	"sync/atomic"
	"testing"

	"github.com/sanconn/san"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/test/hwsim"
)

// TestProxysBuffers runs TestReverseProxy on the simulated device.
func TestProxysBuffers(t *testing.T) {
	if testenv.Device() != "" {
		return // this is such a process, or the lane of real drivers
	}
	for name, env := range map[string][]string{"slow copies": nil, "fast copies": {fastCopies + "=1"}} {
		t.Run(name, func(t *testing.T) {
			runOn(t, hwsim.New(t, "latency_ns=2000"), "TestReverseProxy", 1, env)
		})
	}
}

// serveHTTP serves on a listener of package san, and calls each for each connection.
func serveHTTP(t *testing.T, h http.Handler, each func(net.Conn)) *url.URL {
	t.Helper()
	l, err := san.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: h, ConnState: func(c net.Conn, s http.ConnState) {
		if s == http.StateNew {
			each(c)
		}
	}}
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	t.Cleanup(func() {
		server.Close()
		<-served
	})
	return &url.URL{Scheme: "http", Host: l.Addr().String()}
}

// transport dials by package san, and uses one connection for all requests.
func transport(t *testing.T) *http.Transport {
	x := &http.Transport{MaxConnsPerHost: 1, DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
		return (&san.Dialer{Options: sanconn.Options{MoveAtOnce: true}}).DialContext(ctx, network, address)
	}}
	t.Cleanup(x.CloseIdleConnections)
	return x
}

// A reverse proxy with buffers of the arena writes answers from the memory into which it has read them,
// by its clients' RDMA reads. It registers nothing for that, once the memory that serves all answers is
// registered.
func TestReverseProxy(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // TestProxysBuffers runs it in a process of its own
	}
	body := random(16 << 20)
	backend := serveHTTP(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Length", strconv.Itoa(len(body)))
		w.Write(body)
	}), func(net.Conn) {})
	var conn atomic.Pointer[sanconn.Conn] // the proxy's connection to its client
	front := serveHTTP(t, &httputil.ReverseProxy{
		Rewrite:    func(r *httputil.ProxyRequest) { r.SetURL(backend) },
		Transport:  transport(t),
		BufferPool: regcache.DefaultArena().BufferPool(8 << 20),
	}, func(c net.Conn) { conn.Store(c.(*sanconn.Conn)) })
	client := &http.Client{Transport: transport(t), Timeout: patience}
	testenv.Eventually(t, patience, func() error { // until the connections have moved, and windows are used
		before := regcache.DefaultBudget().Stats().Registrations
		answer, err := client.Get(front.String())
		if err != nil {
			t.Fatal(err)
		}
		defer answer.Body.Close()
		if got, err := io.ReadAll(answer.Body); err != nil || !bytes.Equal(got, body) {
			t.Fatalf("%d of %d bytes: %v", len(got), len(body), err)
		}
		st := conn.Load().Stats()
		if st.Unregistered > 0 {
			t.Fatalf("%d Writes or Reads were copied for want of a registration", st.Unregistered)
		}
		if st.DirectBytesSent == 0 {
			return fmt.Errorf("nothing of %d bytes left the proxy's own memory", st.BytesSent)
		}
		if n := regcache.DefaultBudget().Stats().Registrations - before; n > 0 {
			return fmt.Errorf("%d registrations for an answer", n)
		}
		return nil
	})
}
