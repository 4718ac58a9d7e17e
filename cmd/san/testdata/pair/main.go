// Pair is a server of HTTP, or its client, and does not use package san: only expvar.
package main

import (
	"expvar"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
)

func main() {
	if len(os.Args) == 1 {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/debug/vars" {
				expvar.Handler().ServeHTTP(w, r)
				return
			}
			b, _ := io.ReadAll(r.Body)
			w.Write(b)
		}))
		fmt.Println(server.URL)
		io.Copy(io.Discard, os.Stdin) // until its end
		return
	}
	sent := strings.Repeat("0123456789", 1000)
	for range 50 {
		r, err := http.Post(os.Args[1], "text/plain", strings.NewReader(sent))
		if err != nil {
			panic(err)
		}
		got, err := io.ReadAll(r.Body)
		r.Body.Close()
		if err != nil || string(got) != sent {
			panic(fmt.Sprint(len(got), " bytes: ", err))
		}
	}
	r, err := http.Get(os.Args[1] + "/debug/vars")
	if err != nil {
		panic(err)
	}
	vars, _ := io.ReadAll(r.Body)
	fmt.Printf("client %v\nserver %s\n", expvar.Get("sanbuild"), vars)
}
