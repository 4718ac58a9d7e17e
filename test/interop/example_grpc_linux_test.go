package interop

import (
	"context"
	"fmt"
	"log"
	"net"
	"time"

	"github.com/sanconn/san"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	pb "google.golang.org/grpc/health/grpc_health_v1"
)

// With gRPC, the server gets another listener, and the client a hook for dialing.
func Example_gRPC() {
	l, err := san.Listen("tcp", "localhost:0") // was net.Listen
	if err != nil {
		log.Fatal(err)
	}
	server := grpc.NewServer()
	pb.RegisterHealthServer(server, health.NewServer())
	go server.Serve(l)
	defer server.Stop()

	// passthrough: the hook gets the address as it is, and resolves it.
	conn, err := grpc.NewClient("passthrough:///"+l.Addr().String(),
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			c, err := new(san.Dialer).DialContext(ctx, "tcp", address)
			if err == nil {
				fmt.Println("it begins on", san.InfoOf(c).Provider)
			}
			return c, err
		}),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	answer, err := pb.NewHealthClient(conn).Check(ctx, &pb.HealthCheckRequest{})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("the server is", answer.Status)
	// Output:
	// it begins on tcp
	// the server is SERVING
}
