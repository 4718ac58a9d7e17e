// Grpc is a server of gRPC's health checks, or a client that checks it.
package main

import (
	"context"
	"expvar"
	"fmt"
	"log"
	"net"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
)

func main() {
	log.SetFlags(0)
	if len(os.Args) == 1 {
		serve()
	} else {
		check(os.Args[1])
	}
}

// serve prints its address, and its counters when a line comes in.
func serve() {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	s := grpc.NewServer()
	grpc_health_v1.RegisterHealthServer(s, health.NewServer())
	go func() { log.Fatal(s.Serve(l)) }()
	fmt.Println(l.Addr())
	fmt.Scanln()
	fmt.Println(expvar.Get("sanbuild"))
}

// check makes health checks, with the keepalive for which gRPC sets TCP_USER_TIMEOUT.
func check(address string) {
	c, err := grpc.NewClient("passthrough:///"+address,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: time.Minute, Timeout: 10 * time.Second}))
	if err != nil {
		log.Fatal(err)
	}
	client := grpc_health_v1.NewHealthClient(c)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for n := range 500 {
		r, err := client.Check(ctx, &grpc_health_v1.HealthCheckRequest{})
		if err != nil || r.Status != grpc_health_v1.HealthCheckResponse_SERVING {
			log.Fatalf("check %d: %v %v", n, r, err)
		}
	}
	// A service of no name is unknown, in whose name much goes.
	if _, err := client.Check(ctx, &grpc_health_v1.HealthCheckRequest{Service: strings.Repeat("x", 1<<20)}); err == nil {
		log.Fatal("a long name is known")
	}
	c.Close()
	fmt.Println(expvar.Get("sanbuild"))
}
