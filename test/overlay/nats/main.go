// Nats makes requests through a server of NATS, each answered by another connection of its own.
package main

import (
	"bytes"
	"expvar"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/nats-io/nats.go"
)

func main() {
	log.SetFlags(0)
	answers, err := nats.Connect(os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	_, err = answers.Subscribe("echo", func(m *nats.Msg) { m.Respond(m.Data) })
	if err == nil {
		err = answers.Flush()
	}
	if err != nil {
		log.Fatal(err)
	}
	asks, err := nats.Connect(os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	sent := bytes.Repeat([]byte("0123456789"), 1000)
	for n := range 200 {
		m, err := asks.Request("echo", sent, 10*time.Second)
		if err != nil || !bytes.Equal(m.Data, sent) {
			log.Fatalf("request %d: %v", n, err)
		}
	}
	asks.Close()
	answers.Close()
	fmt.Println(expvar.Get("sanbuild"))
}
