package interop

import (
	"context"
	"errors"
	"io"
	"net"
	"testing"

	"storj.io/drpc"
	"storj.io/drpc/drpcconn"
	"storj.io/drpc/drpcserver"
)

// plainBytes is an encoding for drpc, of messages that are bytes.
type plainBytes struct{}

func (plainBytes) Marshal(m drpc.Message) ([]byte, error) { return *m.(*[]byte), nil }
func (plainBytes) Unmarshal(b []byte, m drpc.Message) error {
	*m.(*[]byte) = append([]byte(nil), b...)
	return nil
}

type drpcEcho struct{}

func (drpcEcho) HandleRPC(stream drpc.Stream, _ string) error {
	for {
		var message []byte
		err := stream.MsgRecv(&message, plainBytes{})
		if errors.Is(err, io.EOF) {
			return stream.CloseSend()
		}
		if err != nil {
			return err
		}
		if err := stream.MsgSend(&message, plainBytes{}); err != nil {
			return err
		}
	}
}

func serveDRPC(l net.Listener) func() error {
	ctx, cancel := context.WithCancel(context.Background())
	server := drpcserver.New(drpcEcho{})
	return inBackground(func() error { return server.Serve(ctx, l) }, func() error {
		cancel()
		return nil
	}, nil)
}

func useDRPC(t *testing.T, dial dialFunc, address string) {
	conn := mustDial(t, dial, address)
	client := drpcconn.New(conn)
	defer client.Close()
	for _, size := range []int{0, 1, 64 << 10, amount(3<<20 + 1)} {
		in := randomBytes(size)
		var out []byte
		if err := client.Invoke(t.Context(), "echo", plainBytes{}, &in, &out); err != nil {
			t.Fatal(err)
		}
		wantBytes(t, out, in)
	}
	stream, err := client.NewStream(t.Context(), "echo", plainBytes{})
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	for range 50 {
		in := randomBytes(amount(50_000))
		if err := stream.MsgSend(&in, plainBytes{}); err != nil {
			t.Fatal(err)
		}
		var out []byte
		if err := stream.MsgRecv(&out, plainBytes{}); err != nil {
			t.Fatal(err)
		}
		wantBytes(t, out, in)
	}
}
