package main

// A suite is the tests of some packages of other people.
type suite struct {
	name     string
	module   string // none: a package of Go itself
	mod      string // files to use in place of its go.mod and go.sum, without the extensions
	packages []string
	except   map[string]string // tests that pass only with plain go, and why
}

var suites = []suite{
	{name: "net", packages: []string{"net"}, except: map[string]string{
		"TestBuffers_WriteTo":       "counts calls of writev: what has moved makes none",
		"TestDialerDualStackFDLeak": "counts net's sockets right behind its listeners' Close, and may find the one of the library by which they were found",
		"TestSendfile":              "wants to see sendfile, if its connection has moved by then: that has no use for it",
		"TestSplice":                "wants to see splice: what has moved has no use for it",
	}},
	{name: "net/http", packages: []string{"net/http", "net/http/httptest", "net/http/httputil"}},
	{name: "crypto/tls", packages: []string{"crypto/tls"}},
	{name: "net/rpc, net/smtp", packages: []string{"net/rpc", "net/smtp"}},
	{name: "yamux", module: "github.com/hashicorp/yamux@v0.1.2", packages: here},
	{name: "gorilla/websocket", module: "github.com/gorilla/websocket@v1.5.3", packages: here},
	{name: "go-proxyproto", module: "github.com/pires/go-proxyproto@v0.15.0", packages: all},
	{name: "x/crypto/ssh", module: "golang.org/x/crypto@v0.59.0", packages: []string{"./ssh/..."}},
	{name: "x/net/http2", module: "golang.org/x/net@v0.62.0", packages: []string{"./http2/..."}},
	{name: "go-smtp", module: "github.com/emersion/go-smtp@v0.26.0", packages: all},
	{name: "miekg/dns", module: "github.com/miekg/dns@v1.1.73", packages: all},
	{name: "goproxy", module: "github.com/elazarl/goproxy@v1.9.4", packages: all},
	{name: "jlaffaye/ftp", module: "github.com/jlaffaye/ftp@v0.2.4", packages: here},
	{name: "miniredis", module: "github.com/alicebob/miniredis/v2@v2.40.0", packages: []string{".", "./server"}},
	{name: "fasthttp", module: "github.com/valyala/fasthttp@v1.78.0", packages: all, except: map[string]string{
		"TestAllocationClient": "counts allocations of the process while its connection moves",
	}},
	{name: "grpc-go's transport", module: "google.golang.org/grpc@v1.85.0", packages: []string{"./internal/transport/..."}, except: map[string]string{
		"Test/HTTPConnectWithServerHello": "leaves its listener open, for which the library has a goroutine, and ends with a look for goroutines",
	}},
	{name: "nats.go", module: "github.com/nats-io/nats.go@v1.55.0", mod: "go_test", packages: []string{".", "./test"}, except: map[string]string{
		"TestCustomFlusherTimeout": "makes its socket's buffer small, and wants Writes to fill it soon: what has moved takes 4 MiB",
		"TestJetStreamOrderedConsumerSlowConsumer/HeartbeatRecovery/SubscribeSync": "is a matter of time: with plain go, it failed 2 times of 6",
	}},
}

var (
	here = []string{"."}
	all  = []string{"./..."}
)
