// Server answers HTTP over a SAN and over TCP on one port. The only difference from an ordinary net/http
// server is the listener.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"time"

	"github.com/sanconn/san"
)

type connKey struct{}

func main() {
	address := flag.String("l", "127.0.0.1:8080", "`address` to listen on")
	flag.Parse()

	l, err := san.Listen("tcp", *address) // instead of net.Listen
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("http://%v/\n", l.Addr())

	http.HandleFunc("GET /", hello)
	http.HandleFunc("POST /echo", echo)
	server := http.Server{
		ReadHeaderTimeout: 10 * time.Second,
		// Only to tell each client what carries its connection; a server does not need it.
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, connKey{}, c)
		},
	}
	log.Fatal(server.Serve(l))
}

func hello(w http.ResponseWriter, r *http.Request) {
	c := r.Context().Value(connKey{}).(net.Conn)
	fmt.Fprintf(w, "hello, you came by %s\n", san.InfoOf(c).Provider)
}

func echo(w http.ResponseWriter, r *http.Request) {
	// By default, with HTTP/1, the rest of the request's body cannot be read after the first byte of the
	// answer.
	if err := http.NewResponseController(w).EnableFullDuplex(); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	if _, err := io.Copy(w, r.Body); err != nil {
		panic(http.ErrAbortHandler) // so that the client does not take the part for the whole
	}
}
