package interop

import (
	"context"
	"net"
	"testing"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/test/hwsim"
)

// dialFunc is the type of the dialing hook that most clients have.
type dialFunc = func(ctx context.Context, network, address string) (net.Conn, error)

// A program is a server and its client. Neither has code that depends on how they are connected.
type program struct {
	name string
	// serve serves l in the background until stop, which closes l and returns the first error.
	serve func(l net.Listener) (stop func() error)
	// use is the client. address is that of serve's listener.
	use func(t *testing.T, dial dialFunc, address string)
	// backend is the server to which serve forwards connections, if any.
	backend *backend
	// short: its connections may end before they have moved.
	short bool
	// exposes: it uses TCP's descriptor for a moment when a connection begins, which takes a connection
	// that has moved back to TCP.
	exposes bool
	// quick: it is fast enough for the emulated guest (test/guest).
	quick bool
}

var programs = []program{
	{name: "net/http, HTTP 1.1", serve: serveHTTP, use: useHTTP, quick: true},
	{name: "net/http, HTTP 2", serve: serveHTTP2, use: useHTTP2, quick: true},
	{name: "net/http, HTTP 2 without TLS", serve: serveH2C, use: useH2C},
	{name: "net/http, ReverseProxy", serve: serveReverseProxy, use: useReverseProxy},
	{name: "net/http, FileServer", serve: serveFiles, use: useFiles},
	{name: "net/http, server-sent events", serve: serveEvents, use: useEvents},
	{name: "net/http, Hijack", serve: serveHijack, use: useHijack, short: true},
	{name: "net/http, Shutdown", serve: serveShutdown, use: useShutdown, short: true},
	{name: "gorilla/websocket", serve: serveGorilla, use: useGorilla, quick: true},
	{name: "coder/websocket", serve: serveCoder, use: useCoder},
	{name: "fasthttp", serve: serveFastHTTP, use: useFastHTTP},
	{name: "gRPC", serve: serveGRPC, use: useGRPC, exposes: true},
	{name: "gRPC, keepalive", serve: serveKeepalive, use: useKeepalive, exposes: true, short: true},
	{name: "connect", serve: serveConnect, use: useConnect},
	{name: "drpc", serve: serveDRPC, use: useDRPC},
	{name: "net/rpc", serve: serveRPC, use: useRPC, quick: true},
	{name: "crypto/tls", serve: serveTLS, use: useTLS, quick: true},
	{name: "ssh", serve: serveSSH, use: useSSH},
	{name: "yamux", serve: serveYamux, use: useYamux, quick: true},
	{name: "smux", serve: serveSmux, use: useSmux},
	{name: "hashicorp/raft", serve: serveRaft, use: useRaft},
	{name: "redcon, go-redis", serve: serveRedcon, use: useGoRedis},
	{name: "redcon, redigo", serve: serveRedcon, use: useRedigo},
	{name: "nats-server, nats.go", serve: serveNATS, use: useNATS},
	{name: "cmux", serve: serveCMux, use: useCMux},
	{name: "go-proxyproto", serve: serveProxyProto, use: useProxyProto, short: true},
	{name: "PostgreSQL, pgx", backend: postgres, serve: postgres.serve, use: usePGX},
	{name: "MariaDB, go-sql-driver/mysql", backend: mariadb, serve: mariadb.serve, use: useMySQL},
}

func TestPrograms(t *testing.T) {
	for _, p := range programs {
		if d := testenv.Device(); d != "" && d != hwsim.Lane && !p.quick {
			continue
		}
		t.Run(p.name, func(t *testing.T) {
			if p.backend != nil {
				p.backend.start(t)
			}
			for _, w := range ways {
				t.Run(w.name, func(t *testing.T) { w.run(t, p) })
			}
		})
	}
}
