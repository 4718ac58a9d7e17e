package sanproxy

import (
	"context"
	"errors"
	"io"
	"log"
	"net"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san"
	"github.com/sanconn/san/internal/testenv"
)

// testTimeout bounds each wait of a test. It is long because the guest is slow.
const testTimeout = 30 * time.Second

// scaled returns n, or a tenth of it in the guest.
func scaled(n int) int {
	if testenv.Device() != "" {
		return n / 10
	}
	return n
}

// route is how two Proxies are connected: sockets outside, package san between them.
type route struct {
	name     string
	provider string // of the connection between the Proxies; "": it begins on TCP, and may move
	policy   san.Policy
	host     string // where the second Proxy listens
	outside  string // the network of client and server: "tcp" or "unix"
}

func routes() []route {
	if dev := testenv.Device(); dev != "" {
		host := map[string]string{"rxe": "10.8.0.2", "siw": "10.8.1.2"}[dev]
		return []route{{"tcp-verbs-tcp", "verbs", san.Require, host, "tcp"}}
	}
	return []route{
		{"tcp-shm-tcp", "shm", san.Require, "127.0.0.1", "tcp"},
		{"unix-shm-unix", "shm", san.Require, "127.0.0.1", "unix"},
		{"tcp-moving-tcp", "", san.Prefer, "127.0.0.1", "tcp"},
		{"unix-moving-unix", "", san.Prefer, "127.0.0.1", "unix"},
		{"tcp-tcp-tcp", "tcp", san.Never, "127.0.0.1", "tcp"},
		{"unix-tcp-unix", "tcp", san.Never, "127.0.0.1", "unix"},
	}
}

// providers returns the providers that may be used. In the guest both ends are on one host, where shared
// memory would be preferred to verbs.
func (r route) providers() []string {
	if r.provider == "verbs" {
		return []string{r.provider}
	}
	return nil
}

func eachRoute(t *testing.T, test func(t *testing.T, r route)) {
	for _, r := range routes() {
		t.Run(r.name, func(t *testing.T) { test(t, r) })
	}
}

// chain is client – first – second – server.
type chain struct {
	route
	first, second *Proxy
	clients       string          // address of first
	refusing      <-chan struct{} // closed when first accepts no more
	servers       net.Listener    // the listener that second dials

	dialed chan net.Conn // connections that first has dialed
}

// chain starts both Proxies and a server's listener. The functions of set may change the Proxies'
// settings.
func (r route) chain(t *testing.T, set ...func(first, second *Proxy)) *chain {
	t.Helper()
	c := &chain{route: r, dialed: make(chan net.Conn, 1000)}
	c.servers = r.listen(t)
	addr := c.servers.Addr()
	lc := san.ListenConfig{Policy: r.policy, Providers: r.providers()}
	middle, err := lc.Listen(context.Background(), "tcp", net.JoinHostPort(r.host, "0"))
	if err != nil {
		t.Fatal(err)
	}
	c.second = &Proxy{DialTimeout: testTimeout, Dial: func(ctx context.Context, _ net.Conn) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, addr.Network(), addr.String())
	}}
	c.first = &Proxy{DialTimeout: testTimeout, Dial: func(ctx context.Context, _ net.Conn) (net.Conn, error) {
		d := san.Dialer{Policy: r.policy, Providers: r.providers()}
		d.Options.AttemptTimeout = testTimeout
		conn, err := d.DialContext(ctx, "tcp", middle.Addr().String())
		if err == nil {
			c.dialed <- conn
		}
		return conn, err
	}}
	for _, f := range set {
		f(c.first, c.second)
	}
	front := r.listen(t)
	c.clients = front.Addr().String()
	serve(t, c.second, middle)
	c.refusing = serve(t, c.first, front)
	return c
}

// serve runs Serve in the background until the end of the test, which closes the Proxy. It returns a
// channel that is closed when Serve has returned.
func serve(t *testing.T, p *Proxy, l net.Listener) <-chan struct{} {
	if p.ErrorLog == nil {
		p.ErrorLog = log.New(io.Discard, "", 0)
	}
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		err = p.Serve(l)
	}()
	t.Cleanup(func() {
		p.Close()
		if <-done; err != nil {
			t.Errorf("Serve: %v", err)
		}
		if n := p.Stats().Open; n != 0 {
			t.Errorf("%d connections are open after Close", n)
		}
	})
	return done
}

func (r route) listen(t *testing.T) net.Listener {
	t.Helper()
	address := "127.0.0.1:0"
	if r.outside == "unix" {
		address = filepath.Join(t.TempDir(), "s")
	}
	l, err := net.Listen(r.outside, address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// conn is a client's or a server's socket.
type conn interface {
	net.Conn
	CloseWrite() error
}

// dial returns the client's end of a new connection, and accept the server's end.
func (c *chain) dial(t *testing.T) conn {
	t.Helper()
	conn, err := net.DialTimeout(c.outside, c.clients, testTimeout)
	if err != nil {
		t.Fatal(err)
	}
	return prepared(t, conn)
}

func (c *chain) accept(t *testing.T) conn {
	t.Helper()
	c.servers.(interface{ SetDeadline(time.Time) error }).SetDeadline(time.Now().Add(testTimeout))
	conn, err := c.servers.Accept()
	if err != nil {
		t.Fatal(err)
	}
	return prepared(t, conn)
}

func prepared(t *testing.T, c net.Conn) conn {
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(testTimeout))
	return c.(conn)
}

// pair returns both ends of a connection through the chain.
func (c *chain) pair(t *testing.T) (client, server conn) {
	t.Helper()
	client, server, _ = c.whole(t)
	return client, server
}

// whole returns what pair does, and the connection between the Proxies.
func (c *chain) whole(t *testing.T) (client, server conn, middle net.Conn) {
	t.Helper()
	client = c.dial(t)
	server = c.accept(t)
	middle = <-c.dialed // it exists, because the server was reached
	if got := san.InfoOf(middle).Provider; got != c.provider && c.provider != "" {
		t.Fatalf("provider %q, want %q", got, c.provider)
	}
	return client, server, middle
}

func mustWrite(t *testing.T, c net.Conn, text string) {
	t.Helper()
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
}

// wantAll checks what c receives until its end.
func wantAll(t *testing.T, c net.Conn, want string) {
	t.Helper()
	got, err := io.ReadAll(c)
	if string(got) != want || err != nil {
		t.Fatalf("read %q, %v; want %q", got, err, want)
	}
}

// wantNext checks what c receives next.
func wantNext(t *testing.T, c net.Conn, want string) {
	t.Helper()
	got := make([]byte, len(want))
	if _, err := io.ReadFull(c, got); string(got) != want || err != nil {
		t.Fatalf("read %q, %v; want %q", got, err, want)
	}
}

// wantReset checks that c's stream ends by a reset. The reset may also be the error of a Write that ran
// at the same time, which beside reports. A socket reports its reset only once, to the first caller, and
// as EPIPE if its stream had ended in order before.
func wantReset(t *testing.T, c net.Conn, beside ...<-chan error) {
	t.Helper()
	n, err := io.Copy(io.Discard, c)
	for _, b := range beside {
		err = errors.Join(err, <-b)
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("after %d bytes: %v, want a reset", n, err)
	}
}

// wantTurnedAway checks that a new client is reset, or on a unix socket finds the end of the stream.
func (c *chain) wantTurnedAway(t *testing.T) {
	t.Helper()
	client, err := net.DialTimeout(c.outside, c.clients, testTimeout)
	if err == nil { // otherwise the reset came before Dial returned
		_, err = io.Copy(io.Discard, prepared(t, client))
	}
	if !errors.Is(err, syscall.ECONNRESET) && (c.outside == "tcp" || err != nil) {
		t.Errorf("a new client got %v, want a reset", err)
	}
}

// flood writes to c until a Write fails.
func flood(c net.Conn) <-chan error {
	failed := make(chan error, 1)
	go func() {
		_, err := io.Copy(struct{ io.Writer }{c}, zeros{})
		failed <- err
	}()
	return failed
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

// wantStats waits until the counters are as wanted: a connection that has ended is counted in the
// background.
func wantStats(t *testing.T, p *Proxy, ok func(Stats) bool) {
	t.Helper()
	testenv.Eventually(t, testTimeout, func() error {
		if s := p.Stats(); !ok(s) {
			return errors.New("counters are not as expected")
		}
		return nil
	})
}
