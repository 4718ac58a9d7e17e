package interop

import (
	"testing"

	"github.com/sanconn/san"
)

// The lines that each program changes. docs/PROGRAMS.md begins with them.
func TestTheLinesToChange(t *testing.T) {
	address := "localhost:0"
	l, err := san.Listen("tcp", address) // was net.Listen
	if err != nil {
		t.Fatal(err)
	}
	dial := new(san.Dialer).DialContext // was new(net.Dialer).DialContext

	stop := serveRPC(l)
	useRPC(t, dial, l.Addr().String())
	if err := stop(); err != nil {
		t.Error(err)
	}
}
