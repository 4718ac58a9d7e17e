package interop

import (
	"context"
	"net"
	"testing"

	"github.com/valyala/fasthttp"
)

func serveFastHTTP(l net.Listener) func() error {
	server := &fasthttp.Server{
		Handler:            func(ctx *fasthttp.RequestCtx) { ctx.SetBody(ctx.PostBody()) },
		MaxRequestBodySize: 16 << 20,
	}
	return inBackground(func() error { return server.Serve(l) }, server.Shutdown, nil)
}

func useFastHTTP(t *testing.T, dial dialFunc, address string) {
	client := &fasthttp.Client{
		Dial: func(address string) (net.Conn, error) { return dial(context.Background(), "tcp", address) },
	}
	defer client.CloseIdleConnections()
	together(4, func() {
		for _, size := range []int{0, 1, 1000, 64 << 10, amount(5<<20 + 3)} {
			body := randomBytes(size)
			request, response := fasthttp.AcquireRequest(), fasthttp.AcquireResponse()
			request.SetRequestURI("http://" + address)
			request.Header.SetMethod("POST")
			request.SetBody(body)
			if err := client.DoTimeout(request, response, patience); err != nil {
				t.Error(err)
			}
			wantBytes(t, response.Body(), body)
			fasthttp.ReleaseRequest(request)
			fasthttp.ReleaseResponse(response)
		}
	})
}
