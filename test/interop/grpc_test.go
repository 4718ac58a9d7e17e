package interop

import (
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
)

// maxGRPC is the size of the largest message, including what is around the bytes.
const maxGRPC = 16<<20 + 64

// grpcService is the service of gRPC's own interoperability tests. It sends payloads back unchanged.
type grpcService struct {
	pb.UnimplementedTestServiceServer
	server  *grpc.Server
	drained chan struct{} // closed when GracefulStop has returned
}

func (s *grpcService) UnaryCall(_ context.Context, r *pb.SimpleRequest) (*pb.SimpleResponse, error) {
	return &pb.SimpleResponse{Payload: r.Payload}, nil
}

func (s *grpcService) FullDuplexCall(stream grpc.BidiStreamingServer[pb.StreamingOutputCallRequest, pb.StreamingOutputCallResponse]) error {
	for {
		r, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := stream.Send(&pb.StreamingOutputCallResponse{Payload: r.Payload}); err != nil {
			return err
		}
	}
}

// EmptyCall begins a graceful stop.
func (s *grpcService) EmptyCall(context.Context, *pb.Empty) (*pb.Empty, error) {
	go func() {
		s.server.GracefulStop()
		close(s.drained)
	}()
	return &pb.Empty{}, nil
}

func serveGRPC(l net.Listener) func() error {
	server := grpc.NewServer(grpc.MaxRecvMsgSize(maxGRPC),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: time.Second}))
	service := &grpcService{server: server, drained: make(chan struct{})}
	pb.RegisterTestServiceServer(server, service)
	return inBackground(func() error { return server.Serve(l) }, func() error {
		<-service.drained
		return nil
	}, nil)
}

func useGRPC(t *testing.T, dial dialFunc, address string) {
	conn, err := grpc.NewClient("passthrough:///"+address,
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			return dial(ctx, "tcp", address)
		}),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxGRPC)))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	client := pb.NewTestServiceClient(conn)

	together(4, func() {
		for _, size := range []int{0, 1, 1000, 64 << 10, 1 << 20, 16 << 20} {
			in := randomBytes(size)
			out, err := client.UnaryCall(t.Context(), &pb.SimpleRequest{Payload: &pb.Payload{Body: in}})
			if err != nil {
				t.Error(err)
				return
			}
			wantBytes(t, out.Payload.Body, in)
		}
	})
	together(4, func() { useStream(t, client) })
	expectGracefulStop(t, client)
}

// useStream keeps several messages in transit, in both directions.
func useStream(t *testing.T, client pb.TestServiceClient) {
	stream, err := client.FullDuplexCall(t.Context())
	if err != nil {
		t.Error(err)
		return
	}
	sent := make(chan []byte, 8)
	go func() {
		defer close(sent)
		for i := range 100 {
			in := randomBytes(i * 1000)
			sent <- in
			if err := stream.Send(&pb.StreamingOutputCallRequest{Payload: &pb.Payload{Body: in}}); err != nil {
				t.Error(err)
				return
			}
		}
		stream.CloseSend()
	}()
	for in := range sent {
		out, err := stream.Recv()
		if err != nil {
			t.Error(err)
			return
		}
		wantBytes(t, out.Payload.Body, in)
	}
	if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("at the end of a stream: %v", err)
	}
}

// serveKeepalive has a short keepalive, so that it soon ends the connection of a client that does not
// answer. Clients with calls of 16 MiB do not use it: with the race detector they may be late with their
// answers, also over TCP, because the processor is busy.
func serveKeepalive(l net.Listener) func() error {
	server := grpc.NewServer(grpc.KeepaliveParams(keepalive.ServerParameters{Time: time.Second, Timeout: time.Second}))
	return inBackground(func() error { return server.Serve(l) }, func() error {
		server.Stop()
		return nil
	}, nil)
}

// useKeepalive is a client that does not answer pings. The server has to end its connection.
func useKeepalive(t *testing.T, dial dialFunc, address string) {
	conn := mustDial(t, dial, address)
	if _, err := io.WriteString(conn, http2.ClientPreface); err != nil {
		t.Fatal(err)
	}
	framer := http2.NewFramer(conn, conn)
	if err := framer.WriteSettings(); err != nil {
		t.Fatal(err)
	}
	pinged := false
	for {
		frame, err := framer.ReadFrame()
		if err != nil {
			if !errors.Is(err, io.EOF) || !pinged {
				t.Errorf("keepalive: pinged: %v, %v", pinged, err)
			}
			return
		}
		if ping, ok := frame.(*http2.PingFrame); ok && !ping.IsAck() {
			pinged = true
		}
	}
}

// expectGracefulStop has a stream open when the server begins a graceful stop.
func expectGracefulStop(t *testing.T, client pb.TestServiceClient) {
	stream, err := client.FullDuplexCall(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	exchange := func() {
		if err := stream.Send(&pb.StreamingOutputCallRequest{}); err != nil {
			t.Error(err)
		}
		if _, err := stream.Recv(); err != nil {
			t.Error(err)
		}
	}
	exchange()
	if _, err := client.EmptyCall(t.Context(), &pb.Empty{}); err != nil {
		t.Fatal(err)
	}
	for { // until the server has closed its listener
		if _, err := client.UnaryCall(t.Context(), &pb.SimpleRequest{}); status.Code(err) == codes.Unavailable {
			break
		}
	}
	exchange()
	stream.CloseSend()
	if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("a stream that outlasted the server's listener: %v", err)
	}
}
