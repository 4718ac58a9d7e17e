package interop

import (
	"crypto/tls"
	"net"
	"testing"
)

func serveTLS(l net.Listener) func() error {
	config := serverTLS()
	l = tls.NewListener(l, config)
	return serveEach(l, echoBack)
}

func useTLS(t *testing.T, dial dialFunc, address string) {
	together(4, func() {
		conn, config := mustDial(t, dial, address), clientTLS()
		c := tls.Client(conn, config)
		defer c.Close()
		expectEcho(t, c, amount(5<<20+1))
	})
}
