// Handed is a server whose listener comes from a descriptor: from an older process of itself, by
// tableflip; from its parent, or made by itself with SO_REUSEPORT, by fasthttp's prefork; or from
// systemd. It is also the client that asks which process it has reached.
package main

import (
	"bufio"
	"encoding/json"
	"expvar"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"

	"github.com/cloudflare/tableflip"
	"github.com/coreos/go-systemd/v22/activation"
	"github.com/valyala/fasthttp"
	"github.com/valyala/fasthttp/fasthttpadaptor"
	"github.com/valyala/fasthttp/prefork"
)

func main() {
	log.SetFlags(0)
	ways := map[string]func(address string) error{
		"tableflip": flip, "prefork": fork, "reuseport": fork, "systemd": systemd, "client": client,
	}
	if err := ways[os.Args[1]](os.Args[2]); err != nil {
		log.Fatal(err)
	}
}

// answer is what a server reports about itself.
type answer struct {
	PID      int
	Accepted json.RawMessage
	Dialed   json.RawMessage `json:",omitempty"` // set by the client
}

func tell(w http.ResponseWriter, _ *http.Request) {
	a := answer{PID: os.Getpid(), Accepted: counters("Accepted")}
	json.NewEncoder(w).Encode(a)
}

// counters returns the counters of this process.
func counters(what string) json.RawMessage {
	var all map[string]json.RawMessage
	if v := expvar.Get("sanbuild"); v != nil {
		json.Unmarshal([]byte(v.String()), &all)
	}
	return all[what]
}

// flip is upgraded when a page is requested. A process whose successor is ready serves the connections
// that it has accepted, until standard input ends.
func flip(address string) error {
	u, err := tableflip.New(tableflip.Options{})
	if err != nil {
		return err
	}
	l, err := u.Listen("tcp", address)
	if err != nil {
		return err
	}
	http.HandleFunc("/", tell)
	http.HandleFunc("/upgrade", func(w http.ResponseWriter, r *http.Request) {
		if err := u.Upgrade(); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		l.Close()
		tell(w, r)
	})
	go http.Serve(l, nil)
	if err := u.Ready(); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// fork serves by child processes.
func fork(address string) error {
	p := prefork.New(&fasthttp.Server{Handler: fasthttpadaptor.NewFastHTTPHandlerFunc(tell)})
	p.Reuseport = os.Args[1] == "reuseport"
	p.OnMasterDeath = func() { os.Exit(1) }
	return p.ListenAndServe(address)
}

func systemd(string) error {
	all, err := activation.Listeners()
	if err != nil {
		return err
	}
	return http.Serve(all[0], http.HandlerFunc(tell))
}

// client has a connection for each name. For each line, "name page", it requests the page on that
// connection.
func client(address string) error {
	connections := make(map[string]*http.Client)
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		var name, page string
		if _, err := fmt.Sscan(lines.Text(), &name, &page); err != nil {
			return err
		}
		if connections[name] == nil {
			connections[name] = &http.Client{Transport: new(http.Transport)}
		}
		r, err := connections[name].Get("http://" + address + page)
		if err != nil {
			return err
		}
		var a answer
		err = json.NewDecoder(r.Body).Decode(&a)
		r.Body.Close() // reads the rest, a newline, so that the connection is kept
		if err != nil {
			return err
		}
		a.Dialed = counters("Dialed")
		if err := json.NewEncoder(os.Stdout).Encode(a); err != nil {
			return err
		}
	}
	return nil
}
