package interop

import (
	"testing"

	"github.com/sanconn/san"
)

// What a program changes, whatever it is: docs/PROGRAMS.md begins with these lines.
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
