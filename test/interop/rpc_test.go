package interop

import (
	"errors"
	"net"
	"net/rpc"
	"testing"
)

// Echo is a service of net/rpc.
type Echo struct{}

func (Echo) Call(in []byte, out *[]byte) error {
	*out = in
	return nil
}

func (Echo) Fail(in []byte, out *[]byte) error { return errors.New("as expected") }

func serveRPC(l net.Listener) func() error {
	server := rpc.NewServer()
	server.Register(Echo{})
	return inBackground(func() error {
		server.Accept(l)
		return nil
	}, l.Close, nil)
}

func useRPC(t *testing.T, dial dialFunc, address string) {
	conn := mustDial(t, dial, address)
	client := rpc.NewClient(conn)
	defer client.Close()
	together(4, func() {
		for _, size := range []int{0, 1, 10_000, amount(3<<20 + 1)} {
			in := randomBytes(size)
			var out []byte
			if err := client.Call("Echo.Call", in, &out); err != nil {
				t.Error(err)
			}
			wantBytes(t, out, in)
		}
	})
	if err := client.Call("Echo.Fail", []byte{}, new([]byte)); err == nil || err.Error() != "as expected" {
		t.Error("a call that fails: ", err)
	}
}
