// Client fetches a URL, several times if a flag says so, and writes the last body to standard output.
// Its connection moves to a SAN, if there is one, once it has been used enough. The only difference from
// an ordinary net/http client is the Transport's DialContext.
package main

import (
	"context"
	"errors"
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
	requests := flag.Int("n", 1, "`number` of requests, one after the other")
	flag.Parse()
	if flag.NArg() != 1 {
		log.Fatal("usage: client [-d text] [-n number] URL")
	}

	var dialer san.Dialer
	client := http.Client{Transport: &http.Transport{
		DialContext: dialer.DialContext, // instead of a net.Dialer's
	}}

	var by string // only to show what carried the last request; a client does not need it
	trace := &httptrace.ClientTrace{GotConn: func(got httptrace.GotConnInfo) {
		by = san.InfoOf(got.Conn).Provider
	}}
	ctx := httptrace.WithClientTrace(context.Background(), trace)
	for n := range *requests {
		to := io.Discard
		if n == *requests-1 {
			to = os.Stdout
		}
		if err := ask(ctx, &client, flag.Arg(0), *data, to); err != nil {
			log.Fatal(err)
		}
	}
	fmt.Fprintf(os.Stderr, "by %s\n", by)
}

// ask posts data, or sends a GET if there is none, and writes the answer's body.
func ask(ctx context.Context, client *http.Client, url, data string, to io.Writer) error {
	method, body := http.MethodGet, io.Reader(nil)
	if data != "" {
		method, body = http.MethodPost, strings.NewReader(data)
	}
	req, err := http.NewRequestWithContext(ctx, method, url, body)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(to, resp.Body); err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	return nil
}
