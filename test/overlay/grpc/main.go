// Grpc is a server of gRPC's health checks, or a client that checks it:
//
//	grpc [-tls]
//	grpc [-tls] [-move N] ADDRESS
package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"expvar"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http/httptest"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
)

func main() {
	log.SetFlags(0)
	secure := flag.Bool("tls", false, "by TLS")
	move := flag.Int("move", 0, "how many connections move before the client ends")
	flag.Parse()
	if flag.NArg() == 0 {
		serve(*secure)
	} else {
		check(flag.Arg(0), *secure, *move)
	}
}

// serve prints its address, and its counters for each line of standard input.
func serve(secure bool) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	var options []grpc.ServerOption
	if secure {
		test := httptest.NewTLSServer(nil) // only for its certificate
		defer test.Close()
		options = append(options, grpc.Creds(credentials.NewTLS(&tls.Config{Certificates: test.TLS.Certificates})))
	}
	s := grpc.NewServer(options...)
	grpc_health_v1.RegisterHealthServer(s, health.NewServer())
	go func() { log.Fatal(s.Serve(l)) }()
	fmt.Println(l.Addr())
	fmt.Scanln()
	fmt.Println(expvar.Get("sanbuild"))
}

// moved returns how many connections that this process has dialed have moved.
func moved() int {
	var c struct{ Dialed map[string]int }
	if v := expvar.Get("sanbuild"); v == nil || json.Unmarshal([]byte(v.String()), &c) != nil {
		return 0
	}
	return c.Dialed["shm"]
}

// check makes health checks, with a keepalive, for which gRPC sets TCP_USER_TIMEOUT.
func check(address string, secure bool, move int) {
	by := insecure.NewCredentials()
	if secure {
		by = credentials.NewTLS(&tls.Config{InsecureSkipVerify: true})
	}
	c, err := grpc.NewClient("passthrough:///"+address,
		grpc.WithTransportCredentials(by),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: time.Minute, Timeout: 10 * time.Second}))
	if err != nil {
		log.Fatal(err)
	}
	client := grpc_health_v1.NewHealthClient(c)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for n := 0; n < 500 || moved() < move; n++ {
		r, err := client.Check(ctx, &grpc_health_v1.HealthCheckRequest{})
		if err != nil || r.Status != grpc_health_v1.HealthCheckResponse_SERVING {
			log.Fatalf("check %d: %v %v", n, r, err)
		}
	}
	// The service is unknown. Its name is large, to move many bytes.
	if _, err := client.Check(ctx, &grpc_health_v1.HealthCheckRequest{Service: strings.Repeat("x", 1<<20)}); err == nil {
		log.Fatal("a long name is known")
	}
	c.Close()
	fmt.Println(expvar.Get("sanbuild"))
}
