// Client fetches a URL over a SAN, or over TCP where there is none, and writes
// the body to standard output. All that differs from an ordinary net/http
// client is the Transport's DialContext.
package main

import (
	"flag"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptrace"
	"os"
	"strings"

	"github.com/sanconn/san"
)

func main() {
	log.SetFlags(0)
	data := flag.String("d", "", "`text` to post; none is a GET")
	flag.Parse()
	if flag.NArg() != 1 {
		log.Fatal("usage: client [-d text] URL")
	}

	var dialer san.Dialer
	client := http.Client{Transport: &http.Transport{
		DialContext: dialer.DialContext, // instead of a net.Dialer's
	}}

	method, body := http.MethodGet, io.Reader(nil)
	if *data != "" {
		method, body = http.MethodPost, strings.NewReader(*data)
	}
	req, err := http.NewRequest(method, flag.Arg(0), body)
	if err != nil {
		log.Fatal(err)
	}
	// Only to show what carries the request; a client needs none of it.
	req = req.WithContext(httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{
		GotConn: func(got httptrace.GotConnInfo) {
			fmt.Fprintf(os.Stderr, "by %s\n", san.InfoOf(got.Conn).Provider)
		},
	}))
	resp, err := client.Do(req)
	if err != nil {
		log.Fatal(err)
	}
	defer resp.Body.Close()
	if _, err := io.Copy(os.Stdout, resp.Body); err != nil {
		log.Fatal(err)
	}
	if resp.StatusCode != http.StatusOK {
		log.Fatal(resp.Status)
	}
}
