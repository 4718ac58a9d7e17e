package sanproxy_test

import (
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"

	"github.com/sanconn/san"
	"github.com/sanconn/san/sanproxy"
)

// A server that makes its own listener, as httptest's does, gets clients that use package san.
func ExampleProxy() {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintln(w, "hello")
	}))
	defer server.Close()
	address := server.Listener.Addr().String()

	l, err := san.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	p := &sanproxy.Proxy{Dial: func(ctx context.Context, _ net.Conn) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", address)
	}}
	go p.Serve(l)
	defer p.Close()

	client := http.Client{Transport: &http.Transport{DialContext: new(san.Dialer).DialContext}}
	resp, err := client.Get("http://" + l.Addr().String())
	if err != nil {
		log.Fatal(err)
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	fmt.Print(string(body))
	// Output: hello
}
