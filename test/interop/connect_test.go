package interop

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

type bytesValue = wrapperspb.BytesValue

func serveConnect(l net.Listener) func() error {
	mux := http.NewServeMux()
	mux.Handle("/echo.Echo/One", connect.NewUnaryHandler("/echo.Echo/One",
		func(_ context.Context, r *connect.Request[bytesValue]) (*connect.Response[bytesValue], error) {
			return connect.NewResponse(r.Msg), nil
		}))
	mux.Handle("/echo.Echo/Stream", connect.NewBidiStreamHandler("/echo.Echo/Stream",
		func(_ context.Context, stream *connect.BidiStream[bytesValue, bytesValue]) error {
			for {
				message, err := stream.Receive()
				if errors.Is(err, io.EOF) {
					return nil
				}
				if err != nil {
					return err
				}
				if err := stream.Send(message); err != nil {
					return err
				}
			}
		}))
	server := &http.Server{Handler: mux, Protocols: h2c()}
	return inBackground(func() error { return server.Serve(l) }, server.Close, http.ErrServerClosed)
}

func useConnect(t *testing.T, dial dialFunc, address string) {
	client := &http.Client{Transport: &http.Transport{DialContext: dial, Protocols: h2c()}}
	defer client.CloseIdleConnections()
	url := "http://" + address + "/echo.Echo/"
	for _, protocol := range []connect.ClientOption{connect.WithClientOptions(), connect.WithGRPC(), connect.WithGRPCWeb()} {
		one := connect.NewClient[bytesValue, bytesValue](client, url+"One", protocol)
		together(4, func() {
			in := randomBytes(amount(1<<20 + 1))
			out, err := one.CallUnary(t.Context(), connect.NewRequest(wrapperspb.Bytes(in)))
			if err != nil {
				t.Error(err)
				return
			}
			wantBytes(t, out.Msg.Value, in)
		})
		stream := connect.NewClient[bytesValue, bytesValue](client, url+"Stream", protocol).CallBidiStream(t.Context())
		for range 20 {
			in := randomBytes(amount(100_000))
			if err := stream.Send(wrapperspb.Bytes(in)); err != nil {
				t.Fatal(err)
			}
			out, err := stream.Receive()
			if err != nil {
				t.Fatal(err)
			}
			wantBytes(t, out.Value, in)
		}
		if err := errors.Join(stream.CloseRequest(), stream.CloseResponse()); err != nil {
			t.Error(err)
		}
	}
}
