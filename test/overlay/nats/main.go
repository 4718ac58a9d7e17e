// Nats makes requests through a NATS server, each of which it answers itself on another connection, until
// N connections have moved:
//
//	nats ADDRESS N
package main

import (
	"bytes"
	"encoding/json"
	"expvar"
	"fmt"
	"log"
	"os"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
)

// moved returns how many connections that this process has dialed have moved.
func moved() int {
	var c struct{ Dialed map[string]int }
	if v := expvar.Get("sanbuild"); v == nil || json.Unmarshal([]byte(v.String()), &c) != nil {
		return 0
	}
	return c.Dialed["shm"]
}

func main() {
	log.SetFlags(0)
	move, err := strconv.Atoi(os.Args[2])
	if err != nil {
		log.Fatal(err)
	}
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
	for n, end := 0, time.Now().Add(time.Minute); n < 200 || moved() < move && time.Now().Before(end); n++ {
		m, err := asks.Request("echo", sent, 10*time.Second)
		if err != nil || !bytes.Equal(m.Data, sent) {
			log.Fatalf("request %d: %v", n, err)
		}
	}
	asks.Close()
	answers.Close()
	fmt.Println(expvar.Get("sanbuild"))
}
