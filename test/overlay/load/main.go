// Load calls a server, by clients that know nothing of the library, and measures it.
//
//	load WHAT ADDRESS CALLERS
//
// For each duration on standard input it makes calls for that long, each caller one call after the other,
// and prints the result as a line of JSON.
package main

import (
	"bufio"
	"encoding/json"
	"expvar"
	"fmt"
	"log"
	"os"
	"strconv"
	"time"

	"github.com/sanconn/san/test/turns"
)

// A result is about the calls of one duration. Dialed is about all connections that the process has
// dialed.
type result struct {
	turns.Result
	Dialed json.RawMessage
}

// A connector returns a function for each caller that makes a call.
type connector func(address string, callers int) (calls []func() error, err error)

var connectors = map[string]connector{
	"http":         connectHTTP,
	"etcd-put":     connectEtcdPut,
	"etcd-get":     connectEtcdGet,
	"nats-request": connectNATSRequest,
	"nats-publish": connectNATSPublish,
	"grpc":         connectGRPC,
	"postgres":     connectPostgres,
}

func main() {
	log.SetFlags(0)
	if len(os.Args) != 4 {
		log.Fatal("usage: load WHAT ADDRESS CALLERS")
	}
	connect, callers := connectors[os.Args[1]], 0
	callers, err := strconv.Atoi(os.Args[3])
	if connect == nil || err != nil {
		log.Fatalf("no such load: %q", os.Args[1:])
	}
	calls, err := connect(os.Args[2], callers)
	if err != nil {
		log.Fatal(err)
	}
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		length, err := time.ParseDuration(in.Text())
		if err != nil {
			log.Fatal(err)
		}
		r, err := turns.Load(calls, length)
		if err != nil {
			log.Fatal(err)
		}
		if err := json.NewEncoder(os.Stdout).Encode(result{r, dialed()}); err != nil {
			log.Fatal(err)
		}
	}
}

// dialed returns what has carried the connections, or null in a plain process.
func dialed() json.RawMessage {
	var c struct{ Dialed json.RawMessage }
	if v := expvar.Get("sanbuild"); v != nil {
		if err := json.Unmarshal([]byte(v.String()), &c); err != nil {
			log.Fatal(fmt.Errorf("expvar: %w", err))
		}
	}
	return c.Dialed
}
