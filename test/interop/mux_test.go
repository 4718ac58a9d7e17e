package interop

import (
	"io"
	"net"
	"testing"

	"github.com/hashicorp/yamux"
	"github.com/xtaci/smux"
)

// Many streams on one connection, which together send several times as much as the connection buffers.

func yamuxConfig() *yamux.Config {
	config := yamux.DefaultConfig()
	config.LogOutput = io.Discard
	config.ConnectionWriteTimeout = patience // includes the time in which a frame waits behind those of all other streams
	return config
}

func serveYamux(l net.Listener) func() error {
	config := yamuxConfig()
	return serveEach(l, func(c net.Conn) error {
		session, err := yamux.Server(c, config)
		if err != nil {
			return err
		}
		return handleAll(session.Accept, echoBack)
	})
}

func useYamux(t *testing.T, dial dialFunc, address string) {
	conn, config := mustDial(t, dial, address), yamuxConfig()
	session := must(yamux.Client(conn, config))
	defer session.Close()
	together(amount(48), func() {
		s, err := session.Open()
		if err != nil {
			t.Error(err)
			return
		}
		expectEcho(t, s, amount(300_001)) // Close ends one direction; the rest of the echo still comes
	})
}

func serveSmux(l net.Listener) func() error {
	return serveEach(l, func(c net.Conn) error {
		session, err := smux.Server(c, smux.DefaultConfig())
		if err != nil {
			return err
		}
		return handleAll(session.AcceptStream, echoBack)
	})
}

func useSmux(t *testing.T, dial dialFunc, address string) {
	conn := mustDial(t, dial, address)
	session := must(smux.Client(conn, smux.DefaultConfig()))
	defer session.Close()
	together(amount(48), func() {
		s, err := session.OpenStream()
		if err != nil {
			t.Error(err)
			return
		}
		defer s.Close()
		expectEcho(t, s, amount(300_001))
	})
}
