package interop

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"sync"
	"testing"
)

// echo answers each request with its body.
var echo = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Write(body)
})

// postAll posts bodies of many sizes, several at the same time, and expects them back.
func postAll(t *testing.T, client *http.Client, url, proto string) {
	t.Helper()
	defer client.CloseIdleConnections()
	together(4, func() {
		for _, size := range []int{0, 1, 1000, 64 << 10, amount(1 << 20), amount(5<<20 + 3)} {
			body := randomBytes(size)
			r, err := client.Post(url, "application/octet-stream", bytes.NewReader(body))
			if err != nil {
				t.Error(err)
				return
			}
			got, err := io.ReadAll(r.Body)
			r.Body.Close()
			if err != nil || r.Proto != proto {
				t.Errorf("%s: %v", r.Proto, err)
			}
			wantBytes(t, got, body)
		}
	})
}

func serveHTTP(l net.Listener) func() error {
	server := &http.Server{Handler: echo}
	return inBackground(func() error { return server.Serve(l) }, server.Close, http.ErrServerClosed)
}

func useHTTP(t *testing.T, dial dialFunc, address string) {
	client := &http.Client{Transport: &http.Transport{DialContext: dial}}
	postAll(t, client, "http://"+address, "HTTP/1.1")
}

// testCert is the certificate of net/http/httptest, for example.com.
var testCert = sync.OnceValues(func() (tls.Certificate, *x509.CertPool) {
	s := httptest.NewTLSServer(nil)
	defer s.Close()
	roots := x509.NewCertPool()
	roots.AddCert(s.Certificate())
	return s.TLS.Certificates[0], roots
})

func serverTLS() *tls.Config {
	cert, _ := testCert()
	return &tls.Config{Certificates: []tls.Certificate{cert}}
}

func clientTLS() *tls.Config {
	_, roots := testCert()
	return &tls.Config{RootCAs: roots, ServerName: "example.com"}
}

func serveHTTP2(l net.Listener) func() error {
	server := &http.Server{Handler: echo, TLSConfig: serverTLS()}
	return inBackground(func() error { return server.ServeTLS(l, "", "") }, server.Close, http.ErrServerClosed)
}

func useHTTP2(t *testing.T, dial dialFunc, address string) {
	client := &http.Client{Transport: &http.Transport{
		DialContext:       dial,
		TLSClientConfig:   clientTLS(),
		ForceAttemptHTTP2: true, // needed because of DialContext
	}}
	postAll(t, client, "https://"+address, "HTTP/2.0")
}

// h2c is HTTP 2 without TLS.
func h2c() *http.Protocols {
	var p http.Protocols
	p.SetUnencryptedHTTP2(true)
	return &p
}

func serveH2C(l net.Listener) func() error {
	server := &http.Server{Handler: echo, Protocols: h2c()}
	return inBackground(func() error { return server.Serve(l) }, server.Close, http.ErrServerClosed)
}

func useH2C(t *testing.T, dial dialFunc, address string) {
	client := &http.Client{Transport: &http.Transport{DialContext: dial, Protocols: h2c()}}
	postAll(t, client, "http://"+address, "HTTP/2.0")
}

// Two proxies in a row. The far ends use TCP; between the proxies is the way that is tested.

// fullDuplex lets a proxy answer while it may still read the request. Without it, an answer is cut if it
// comes before the Transport has checked whether the request has more bytes than Content-Length, also
// over TCP (golang.org/issue/40747).
func fullDuplex(proxy http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := http.NewResponseController(w).EnableFullDuplex(); err != nil {
			panic(err) // HTTP/1.1 supports it
		}
		proxy.ServeHTTP(w, r)
	})
}

func serveReverseProxy(l net.Listener) func() error {
	backend := httptest.NewServer(echo)
	proxy := httputil.NewSingleHostReverseProxy(must(url.Parse(backend.URL)))
	server := &http.Server{Handler: fullDuplex(proxy)}
	return inBackground(func() error { return server.Serve(l) }, func() error {
		backend.Close()
		return server.Close()
	}, http.ErrServerClosed)
}

func useReverseProxy(t *testing.T, dial dialFunc, address string) {
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: address})
	transport := &http.Transport{DialContext: dial}
	proxy.Transport = transport
	defer transport.CloseIdleConnections()
	front := httptest.NewServer(fullDuplex(proxy))
	defer front.Close()
	postAll(t, front.Client(), front.URL, "HTTP/1.1")
}
