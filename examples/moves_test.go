package examples

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sanconn/san"
	"github.com/sanconn/san/internal/testenv"
)

// Each example's connection moves, and is used on the SAN. The test itself is the other end, and delays
// the example until the connection has moved: on a busy machine, two examples could be done before that.

// moved returns an error until the connection has moved.
func moved(c net.Conn) error {
	if san.InfoOf(c).Provider != sanProvider() {
		return fmt.Errorf("it has not moved: %+v", san.InfoOf(c))
	}
	return nil
}

// listen returns a listener of the test's end.
func listen(t *testing.T, address string) net.Listener {
	t.Helper()
	l, err := san.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// dial returns a connection that has moved before anything was written on it.
func dial(t *testing.T, address string) net.Conn {
	t.Helper()
	var d san.Dialer
	d.Options.MoveAtOnce = true
	d.Options.AttemptTimeout = limit // nothing is written, so there would be no second attempt
	c, err := d.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(limit))
	testenv.Eventually(t, limit, func() error { return moved(c) })
	return c
}

// serveOne serves one connection in the background, and returns a function that waits for its end.
func serveOne(t *testing.T, l net.Listener, serve func(net.Conn) error) (wait func()) {
	var serving sync.WaitGroup
	serving.Go(func() {
		c, err := l.Accept()
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(limit))
		if err := serve(c); err != nil {
			t.Error(err)
		}
	})
	return func() { l.Close(); serving.Wait() }
}

// used is more requests than a connection needs before it moves. enough is more than it needs for a
// third attempt, if two have failed: each attempt comes after four times as much use.
const used, enough = 100, 1000

// hold delays a connection that has been used, until it has moved or a short time has passed.
func hold(c net.Conn, n int64) {
	if n >= used {
		testenv.Await(20*time.Millisecond, func() error { return moved(c) })
	}
}

func TestTheHTTPClientMoves(t *testing.T) {
	type connKey struct{}
	var requests atomic.Int64
	server := &http.Server{
		ConnContext: func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connKey{}, c) },
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			hold(r.Context().Value(connKey{}).(net.Conn), requests.Add(1))
			io.WriteString(w, "hello\n")
		}),
	}
	l := listen(t, "127.0.0.1:0")
	go server.Serve(l)
	defer server.Close()
	stdout, stderr := run(t, program(t, "./http/client"), "-n", fmt.Sprint(enough), "http://"+l.Addr().String())
	if want := "by " + sanProvider() + "\n"; stdout != "hello\n" || stderr != want || requests.Load() != enough {
		t.Errorf("the client says %q and %q behind %d requests; want %q", stdout, stderr, requests.Load(), want)
	}
}

func TestTheHTTPServersConnectionMoves(t *testing.T) {
	url, _ := serve(t, "./http/server")
	var dialer san.Dialer
	client := &http.Client{Timeout: limit, Transport: &http.Transport{DialContext: dialer.DialContext}}
	defer client.CloseIdleConnections()
	testenv.Eventually(t, limit, func() error {
		r, err := client.Get(url)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		if body, err := io.ReadAll(r.Body); err != nil || string(body) != "hello, you came by "+sanProvider()+"\n" {
			return fmt.Errorf("the server says %q, %v", body, err)
		}
		return nil
	})
}

// randomBytes returns bytes that differ from all others.
func randomBytes(size int) []byte {
	b := make([]byte, size)
	rand.NewChaCha8([32]byte{byte(size)}).Read(b)
	return b
}

func TestTheCopyClientMoves(t *testing.T) {
	content := randomBytes(64<<20 + 1)
	name := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(name, content, 0o600); err != nil {
		t.Fatal(err)
	}
	l := listen(t, "127.0.0.1:0")
	wait := serveOne(t, l, func(c net.Conn) error {
		got := bytes.NewBuffer(make([]byte, 0, len(content)+bytes.MinRead))
		var failed error
		late := testenv.Await(limit/2, func() error { // reads a little each time, or all could have come before the move
			if moved(c) == nil {
				return nil
			}
			if _, failed = io.CopyN(got, c, 64<<10); failed != nil {
				return nil
			}
			return moved(c)
		})
		if err := cmp.Or(failed, late); err != nil {
			return err
		}
		if _, err := got.ReadFrom(c); err != nil || !bytes.Equal(got.Bytes(), content) {
			return fmt.Errorf("%d bytes came, %v; right: %v", got.Len(), err, bytes.Equal(got.Bytes(), content))
		}
		_, err := c.Write(content)
		return err
	})
	defer wait()
	t.Setenv("SAN_MOVE", "now")
	stdout, _ := run(t, program(t, "./copy/client"), l.Addr().String(), name)
	if want := fmt.Sprintf(" %d bytes by %s\n", len(content), sanProvider()); !strings.HasSuffix(stdout, want) {
		t.Errorf("the client says %q; want ...%q", stdout, want)
	}
}

func TestTheCopyServersConnectionMoves(t *testing.T) {
	address, server := serve(t, "./copy/server")
	content := randomBytes(16<<20 + 1)
	c := dial(t, address)
	go func() {
		c.Write(content)
		c.(interface{ CloseWrite() error }).CloseWrite()
	}()
	if got, err := io.ReadAll(c); err != nil || !bytes.Equal(got, content) {
		t.Errorf("%d bytes came back, %v; right: %v", len(got), err, bytes.Equal(got, content))
	}
	if line, want := server.line(t), fmt.Sprintf(" %d bytes by %s", len(content), sanProvider()); !strings.HasSuffix(line, want) {
		t.Errorf("the server says %q; want ...%q", line, want)
	}
}

// echoHeld echoes each line, and delays it until the connection has moved.
func echoHeld(c net.Conn) error {
	lines := bufio.NewScanner(c)
	for n := int64(1); lines.Scan(); n++ {
		hold(c, n)
		if _, err := fmt.Fprintln(c, lines.Text()); err != nil {
			return err
		}
	}
	return lines.Err()
}
