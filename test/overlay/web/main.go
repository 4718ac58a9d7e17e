// Web is a server of net/http. It has the page that client_golang exports at /metrics, the counters at
// /debug/vars, and 1 KiB on all other pages.
package main

import (
	_ "expvar"
	"fmt"
	"log"
	"net"
	"net/http"

	"github.com/prometheus/client_golang/prometheus/promhttp"
)

func main() {
	log.SetFlags(0)
	http.Handle("/metrics", promhttp.Handler())
	body := make([]byte, 1<<10)
	http.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) { w.Write(body) })
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(l.Addr())
	log.Fatal(http.Serve(l, nil))
}
