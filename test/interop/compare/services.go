package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"

	"github.com/redis/go-redis/v9"
	"github.com/tidwall/redcon"
	"github.com/valyala/fasthttp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pb "google.golang.org/grpc/interop/grpc_testing"
)

const (
	answerSize = 1 << 10 // of each call, except the stream's
	streamSize = 1 << 20 // of each message of the stream
)

var answer = make([]byte, answerSize)

var measurements = []measurement{
	{"gRPC, unary, 1 KiB", "grpc", 1, connectUnary},
	{"gRPC, unary, 1 KiB", "grpc", 64, connectUnary},
	{"gRPC, stream of 1 MiB", "grpc", 1, connectStream},
	{"net/http, 1 KiB", "http", 1, connectHTTP},
	{"net/http, 1 KiB", "http", 8, connectHTTP},
	{"net/http, 1 KiB", "http", 64, connectHTTP},
	{"net/http, 1 KiB", "http", 256, connectHTTP},
	{"fasthttp, 1 KiB", "fasthttp", 1, connectFastHTTP},
	{"fasthttp, 1 KiB", "fasthttp", 50, connectFastHTTP},
	{"redcon and go-redis, GET 1 KiB", "redis", 1, connectRedis},
	{"redcon and go-redis, GET 1 KiB", "redis", 50, connectRedis},
}

// services serve a listener until the process ends.
var services = map[string]func(net.Listener){
	"http":     serveHTTP,
	"fasthttp": serveFastHTTP,
	"grpc":     serveGRPC,
	"redis":    serveRedis,
}

var errAnswer = errors.New("not the answer")

// same returns the same call for each caller.
func same(call func() error, callers int) []func() error {
	calls := make([]func() error, callers)
	for i := range calls {
		calls[i] = call
	}
	return calls
}

func serveHTTP(l net.Listener) {
	log.Fatal(http.Serve(l, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.Write(answer) })))
}

func connectHTTP(dial dialFunc, address string, callers int) ([]func() error, func(), error) {
	client := &http.Client{Transport: &http.Transport{DialContext: dial, MaxIdleConnsPerHost: callers}}
	call := func() error {
		r, err := client.Get("http://" + address)
		if err != nil {
			return err
		}
		defer r.Body.Close()
		if n, err := io.Copy(io.Discard, r.Body); n != answerSize {
			return errors.Join(errAnswer, err)
		}
		return nil
	}
	return same(call, callers), client.CloseIdleConnections, nil
}

func serveFastHTTP(l net.Listener) {
	log.Fatal(fasthttp.Serve(l, func(ctx *fasthttp.RequestCtx) { ctx.SetBody(answer) }))
}

func connectFastHTTP(dial dialFunc, address string, callers int) ([]func() error, func(), error) {
	client := &fasthttp.HostClient{
		Addr:     address,
		MaxConns: callers,
		Dial:     func(address string) (net.Conn, error) { return dial(context.Background(), "tcp", address) },
	}
	calls := make([]func() error, callers)
	for i := range calls {
		body := make([]byte, 0, answerSize)
		calls[i] = func() error {
			_, got, err := client.Get(body, "http://"+address)
			if len(got) != answerSize {
				return errors.Join(errAnswer, err)
			}
			return nil
		}
	}
	return calls, client.CloseIdleConnections, nil
}

type grpcService struct {
	pb.UnimplementedTestServiceServer
}

func (grpcService) UnaryCall(context.Context, *pb.SimpleRequest) (*pb.SimpleResponse, error) {
	return &pb.SimpleResponse{Payload: &pb.Payload{Body: answer}}, nil
}

// StreamingOutputCall sends until the client has closed the stream.
func (grpcService) StreamingOutputCall(_ *pb.StreamingOutputCallRequest, stream grpc.ServerStreamingServer[pb.StreamingOutputCallResponse]) error {
	message := &pb.StreamingOutputCallResponse{Payload: &pb.Payload{Body: make([]byte, streamSize)}}
	for {
		if err := stream.Send(message); err != nil {
			return err
		}
	}
}

func serveGRPC(l net.Listener) {
	server := grpc.NewServer()
	pb.RegisterTestServiceServer(server, grpcService{})
	log.Fatal(server.Serve(l))
}

func dialGRPC(dial dialFunc, address string) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///"+address,
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			return dial(ctx, "tcp", address)
		}),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
}

func connectUnary(dial dialFunc, address string, callers int) ([]func() error, func(), error) {
	conn, err := dialGRPC(dial, address)
	if err != nil {
		return nil, nil, err
	}
	client := pb.NewTestServiceClient(conn)
	call := func() error {
		r, err := client.UnaryCall(context.Background(), &pb.SimpleRequest{})
		if err != nil {
			return err
		}
		if len(r.Payload.Body) != answerSize {
			return errAnswer
		}
		return nil
	}
	return same(call, callers), func() { conn.Close() }, nil
}

func connectStream(dial dialFunc, address string, callers int) ([]func() error, func(), error) {
	conn, err := dialGRPC(dial, address)
	if err != nil {
		return nil, nil, err
	}
	calls := make([]func() error, callers)
	for i := range calls {
		stream, err := pb.NewTestServiceClient(conn).StreamingOutputCall(context.Background(), &pb.StreamingOutputCallRequest{})
		if err != nil {
			return nil, nil, err
		}
		calls[i] = func() error {
			r, err := stream.Recv()
			if err != nil {
				return err
			}
			if len(r.Payload.Body) != streamSize {
				return errAnswer
			}
			return nil
		}
	}
	return calls, func() { conn.Close() }, nil
}

func serveRedis(l net.Listener) {
	handler := func(c redcon.Conn, cmd redcon.Command) {
		switch string(cmd.Args[0]) {
		case "get":
			c.WriteBulk(answer)
		default:
			c.WriteError("ERR unknown command")
		}
	}
	log.Fatal(redcon.Serve(l, handler, func(redcon.Conn) bool { return true }, nil))
}

func connectRedis(dial dialFunc, address string, callers int) ([]func() error, func(), error) {
	client := redis.NewClient(&redis.Options{Addr: address, Dialer: dial, PoolSize: callers, Protocol: 2, DisableIdentity: true})
	call := func() error {
		got, err := client.Get(context.Background(), "key").Bytes()
		if err != nil {
			return err
		}
		if len(got) != answerSize {
			return fmt.Errorf("%w: %d bytes", errAnswer, len(got))
		}
		return nil
	}
	return same(call, callers), func() { client.Close() }, nil
}
