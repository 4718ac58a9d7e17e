package interop

import (
	"bytes"
	"io"
	"net"
	"net/http"
	"testing"

	"github.com/pires/go-proxyproto"
	"github.com/soheilhy/cmux"
)

// Listeners that wrap another listener.

// serveCMux serves HTTP and an echo on one port.
func serveCMux(l net.Listener) func() error {
	mux := cmux.New(l)
	web := mux.Match(cmux.HTTP1Fast())
	rest := mux.Match(cmux.Any())

	server := &http.Server{Handler: echo}
	stopWeb := inBackground(func() error { return server.Serve(web) }, server.Close, http.ErrServerClosed)
	stopRest := serveEach(rest, echoBack)
	return inBackground(mux.Serve, func() error {
		err := l.Close() // closed first, as web's server closes it as well once the mux has ended
		mux.Close()
		stopWeb()
		stopRest()
		return err
	}, net.ErrClosed)
}

func useCMux(t *testing.T, dial dialFunc, address string) {
	useHTTP(t, dial, address)
	together(4, func() {
		c := mustDial(t, dial, address)
		in := append([]byte("not HTTP"), randomBytes(amount(1<<20))...)
		go c.Write(in)
		out := make([]byte, len(in))
		if _, err := io.ReadFull(c, out); err != nil {
			t.Error(err)
		}
		wantBytes(t, out, in)
		c.Close()
	})
}

// serveProxyProto answers with the client's address from the proxy's header, and then echoes.
func serveProxyProto(l net.Listener) func() error {
	l = &proxyproto.Listener{Listener: l}
	return serveEach(l, func(c net.Conn) error {
		if _, err := io.WriteString(c, c.RemoteAddr().String()+"\n"); err != nil {
			return err
		}
		_, err := io.Copy(c, c)
		return err
	})
}

func useProxyProto(t *testing.T, dial dialFunc, address string) {
	for _, version := range []byte{1, 2} {
		c := mustDial(t, dial, address)
		client := &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 4321}
		header := proxyproto.HeaderProxyFromAddrs(version, client, &net.TCPAddr{IP: net.IPv4(192, 0, 2, 2), Port: 80})
		if _, err := header.WriteTo(c); err != nil {
			t.Fatal(err)
		}
		in := randomBytes(amount(1 << 20))
		go func() {
			c.Write(in)
			closeWrite(c)
		}()
		out, err := io.ReadAll(c)
		if err != nil {
			t.Error(err)
		}
		named, rest, _ := bytes.Cut(out, []byte("\n"))
		if string(named) != client.String() {
			t.Errorf("version %d: the server takes its client for %q", version, named)
		}
		wantBytes(t, rest, in)
	}
}
