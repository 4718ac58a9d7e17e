package interop

import (
	"context"
	"net"
	"net/http"
	"testing"
	"time"

	coder "github.com/coder/websocket"
	gorilla "github.com/gorilla/websocket"
)

// messageSizes are the sizes of the messages that are echoed.
func messageSizes() []int { return []int{0, 1, 125, 126, 65536, amount(4<<20 + 1)} }

func serveHandler(l net.Listener, handler http.HandlerFunc) func() error {
	server := &http.Server{Handler: handler}
	return inBackground(func() error { return server.Serve(l) }, server.Close, http.ErrServerClosed)
}

func serveGorilla(l net.Listener) func() error {
	upgrader := gorilla.Upgrader{EnableCompression: true}
	return serveHandler(l, func(w http.ResponseWriter, r *http.Request) {
		c, err := upgrader.Upgrade(w, r, nil)
		if err != nil {
			return // the client reports the error
		}
		defer c.Close()
		answer := func(kind int, data []byte) error { // the default handler has a timeout of a second
			return c.WriteControl(kind, data, time.Now().Add(patience))
		}
		c.SetPingHandler(func(text string) error { return answer(gorilla.PongMessage, []byte(text)) })
		c.SetCloseHandler(func(code int, _ string) error {
			return answer(gorilla.CloseMessage, gorilla.FormatCloseMessage(code, ""))
		})
		for {
			kind, message, err := c.ReadMessage() // also answers pings and the close message
			if err != nil {
				return
			}
			c.EnableWriteCompression(len(message)%2 == 1)
			if err := c.WriteMessage(kind, message); err != nil {
				return
			}
		}
	})
}

func useGorilla(t *testing.T, dial dialFunc, address string) {
	dialer := &gorilla.Dialer{NetDialContext: dial, EnableCompression: true}
	c, _, err := dialer.DialContext(t.Context(), "ws://"+address, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	pong := ""
	c.SetPongHandler(func(text string) error {
		pong = text
		return nil
	})
	if err := c.WriteMessage(gorilla.PingMessage, []byte("ping")); err != nil {
		t.Fatal(err)
	}
	for _, size := range messageSizes() {
		message := randomBytes(size)
		if err := c.WriteMessage(gorilla.BinaryMessage, message); err != nil {
			t.Fatal(err)
		}
		kind, got, err := c.ReadMessage()
		if err != nil || kind != gorilla.BinaryMessage {
			t.Fatal(kind, err)
		}
		wantBytes(t, got, message)
	}
	if pong != "ping" {
		t.Errorf("pong %q", pong)
	}
	end := gorilla.FormatCloseMessage(gorilla.CloseNormalClosure, "done")
	if err := c.WriteMessage(gorilla.CloseMessage, end); err != nil {
		t.Fatal(err)
	}
	if _, _, err := c.ReadMessage(); !gorilla.IsCloseError(err, gorilla.CloseNormalClosure) {
		t.Errorf("the closing handshake: %v", err)
	}
}

func serveCoder(l net.Listener) func() error {
	return serveHandler(l, func(w http.ResponseWriter, r *http.Request) {
		c, err := coder.Accept(w, r, &coder.AcceptOptions{CompressionMode: coder.CompressionContextTakeover})
		if err != nil {
			return
		}
		defer c.CloseNow()
		c.SetReadLimit(-1)
		for {
			kind, message, err := c.Read(context.Background())
			if err != nil {
				return
			}
			if err := c.Write(context.Background(), kind, message); err != nil {
				return
			}
		}
	})
}

func useCoder(t *testing.T, dial dialFunc, address string) {
	client := &http.Client{Transport: &http.Transport{DialContext: dial}}
	options := &coder.DialOptions{HTTPClient: client, CompressionMode: coder.CompressionContextTakeover}
	c, _, err := coder.Dial(t.Context(), "ws://"+address, options)
	if err != nil {
		t.Fatal(err)
	}
	defer c.CloseNow()
	c.SetReadLimit(-1)
	for _, size := range messageSizes() {
		message := randomBytes(size)
		if err := c.Write(t.Context(), coder.MessageBinary, message); err != nil {
			t.Fatal(err)
		}
		kind, got, err := c.Read(t.Context())
		if err != nil || kind != coder.MessageBinary {
			t.Fatal(kind, err)
		}
		wantBytes(t, got, message)
	}
	if err := c.Close(coder.StatusNormalClosure, "done"); err != nil { // waits for the peer's close message
		t.Errorf("the closing handshake: %v", err)
	}
}
