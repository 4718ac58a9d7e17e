package interop

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/sanconn/san/sanproxy"
)

// serveNATS is a server that does not listen. Each of l's connections is forwarded to one that the
// server makes within its process.
func serveNATS(l net.Listener) func() error {
	s := must(server.NewServer(&server.Options{DontListen: true, NoSigs: true, MaxPayload: 8 << 20, MaxPending: 64 << 20}))
	s.Start()
	if !s.ReadyForConnections(patience) {
		panic("the NATS server is not ready")
	}
	proxy := &sanproxy.Proxy{
		Dial: func(context.Context, net.Conn) (net.Conn, error) { return s.InProcessConn() },
	}
	return inBackground(func() error { return proxy.Serve(l) }, func() error {
		s.Shutdown()
		return proxy.Close()
	}, nil)
}

// natsDialer is the type that nats.go takes for dialing.
type natsDialer func(network, address string) (net.Conn, error)

func (d natsDialer) Dial(network, address string) (net.Conn, error) { return d(network, address) }

func useNATS(t *testing.T, dial dialFunc, address string) {
	custom := natsDialer(func(network, address string) (net.Conn, error) {
		return dial(context.Background(), network, address)
	})
	client, err := nats.Connect("nats://"+address, nats.SetCustomDialer(custom), nats.Timeout(patience))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()

	_, err = client.Subscribe("echo", func(m *nats.Msg) { m.Respond(m.Data) })
	if err != nil {
		t.Fatal(err)
	}
	together(4, func() {
		for _, size := range []int{0, 1, 1000, amount(1<<20 + 1)} {
			in := randomBytes(size)
			out, err := client.Request("echo", in, patience)
			if err != nil {
				t.Error(err)
				return
			}
			wantBytes(t, out.Data, in)
		}
	})

	many, err := client.SubscribeSync("many")
	if err != nil {
		t.Fatal(err)
	}
	const messages = 5000
	for i := range messages {
		if err := client.Publish("many", []byte{byte(i), byte(i >> 8)}); err != nil {
			t.Fatal(err)
		}
	}
	for i := range messages {
		m, err := many.NextMsg(time.Minute)
		if err != nil {
			t.Fatalf("message %d: %v", i, err)
		}
		if m.Data[0] != byte(i) || m.Data[1] != byte(i>>8) {
			t.Fatalf("message %d is %v", i, m.Data)
		}
	}
}
