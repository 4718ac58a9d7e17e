// Pair is an HTTP server, or its client. It does not use package san, only expvar.
package main

import (
	"encoding/json"
	"expvar"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"time"
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
		io.Copy(io.Discard, os.Stdin) // until the parent closes it
		return
	}
	url, moves := os.Args[1], os.Args[2] == "moves"
	for range 50 {
		post(url)
	}
	for end := time.Now().Add(20 * time.Second); ; post(url) {
		client, server := "<nil>", get(url+"/debug/vars")
		if v := expvar.Get("sanbuild"); v != nil {
			client = v.String()
		}
		if !moves || dialed(client) && accepted(server) || time.Now().After(end) {
			fmt.Printf("client %s\nserver %s\n", client, server)
			return
		}
	}
}

// post posts a body, and expects the same body as the answer.
func post(url string) {
	sent := strings.Repeat("0123456789", 1000)
	r, err := http.Post(url, "text/plain", strings.NewReader(sent))
	if err != nil {
		panic(err)
	}
	got, err := io.ReadAll(r.Body)
	r.Body.Close()
	if err != nil || string(got) != sent {
		panic(fmt.Sprint(len(got), " bytes: ", err))
	}
}

func get(url string) string {
	r, err := http.Get(url)
	if err != nil {
		panic(err)
	}
	got, err := io.ReadAll(r.Body)
	r.Body.Close()
	if err != nil {
		panic(err)
	}
	return string(got)
}

type counters struct{ Dialed, Accepted map[string]int }

// dialed and accepted report whether the client's connection has moved, and the server's.
func dialed(client string) bool {
	var c counters
	return json.Unmarshal([]byte(client), &c) == nil && c.Dialed["shm"] > 0
}

func accepted(server string) bool {
	var vars struct{ Sanbuild counters }
	return json.Unmarshal([]byte(server), &vars) == nil && vars.Sanbuild.Accepted["shm"] > 0
}
