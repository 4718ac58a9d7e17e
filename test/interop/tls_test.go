package interop

import (
	"crypto/tls"
	"net"
	"testing"
)

func serveTLS(l net.Listener) func() error {
	l = tls.NewListener(l, serverTLS())
	return serveEach(l, echoBack)
}

func useTLS(t *testing.T, dial dialFunc, address string) {
	together(4, func() {
		conn := mustDial(t, dial, address)
		c := tls.Client(conn, clientTLS())
		defer c.Close()
		expectEcho(t, c, amount(5<<20+1))
	})
}
