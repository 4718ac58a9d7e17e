//go:build linux && cgo

package hwsim_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/test/hwsim"
)

// patience bounds each wait. A device that was removed is used again within half a minute.
const patience = time.Minute

// fastCopies is set if a process should assume a host that copies fast.
const fastCopies = "SAN_TEST_FAST_COPIES"

func TestMain(m *testing.M) {
	hwsim.Use()
	if testenv.SlowCopies(); os.Getenv(fastCopies) != "" {
		testenv.FastCopies()
	}
	os.Exit(m.Run())
}

// TestPackageSAN runs tests of package san, through its public API, on the simulated device.
func TestPackageSAN(t *testing.T) {
	if testenv.Device() != "" {
		return // this is such a process, or the lane of real drivers
	}
	for _, settings := range []string{"seed=41,jitter_us=8", "seed=42,jitter_us=8,profile=bnxt_re", "seed=43,jitter_us=8,profile=irdma-iwarp", "latency_ns=2000"} {
		t.Run(settings, func(t *testing.T) {
			f := hwsim.New(t, settings)
			runOn(t, f, "TestListenAndDial|TestHTTP|TestCondition|TestDeviceReset", 4, nil)
		})
	}
}

// Connections between link-local addresses of IPv6, whose zone names the interface.
func TestPackageSANByLinkLocal(t *testing.T) {
	if testenv.Device() != "" {
		return // this is such a process, or the lane of real drivers
	}
	testenv.NeedRoot(t)
	for _, env := range []string{"SAN_RDMACM=", "SAN_RDMACM=off"} {
		t.Run(env, func(t *testing.T) {
			const network = `ip link set lo up && ip addr add fe80::5/64 dev lo nodad && exec "$@"`
			child := exec.Command("unshare", "--net", "sh", "-c", network, "sh", os.Args[0])
			runBy(t, child, hwsim.New(t, "seed=45,jitter_us=8"), "TestLinkLocal", 1, []string{env})
		})
	}
}

func TestLinkLocal(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // TestPackageSANByLinkLocal runs it in a process of its own
	}
	const host = "fe80::5%lo"
	for _, on := range []string{host, "::"} {
		var e echo
		_, port, _ := net.SplitHostPort(listenOn(t, on, e.serve).Addr().String())
		c, err := dialTo(t, net.JoinHostPort(host, port))
		if err == nil {
			err = roundTrip(c, random(1<<20))
		}
		if err != nil {
			t.Errorf("listening on %s: %v", on, err)
		}
	}
}

// runOn runs tests of this program, of which there must be n, in a process that has the fabric's device,
// and returns its output.
func runOn(t testing.TB, f hwsim.Fabric, tests string, n int, env []string, args ...string) []byte {
	t.Helper()
	return runBy(t, exec.Command(os.Args[0]), f, tests, n, env, args...)
}

// runBy does what runOn does, with a command that runs this program, to which it appends arguments.
func runBy(t testing.TB, child *exec.Cmd, f hwsim.Fabric, tests string, n int, env []string, args ...string) []byte {
	t.Helper()
	child.Args = append(append(child.Args, "-test.run=^("+tests+")$", "-test.timeout=3m", "-test.v"), args...)
	child.Env = append(append(f.Env(), "SAN_PROVIDERS=verbs"), env...) // on one host, shm would be preferred
	out, err := child.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if ran := bytes.Count(out, []byte("\n--- PASS")); ran != n {
		t.Fatalf("%d of %d tests ran\n%s", ran, n, out)
	}
	f.Check(t)
	return out
}

// listen returns a listener of package san, and passes its connections to serve.
func listen(t *testing.T, serve func(net.Conn)) *san.Listener {
	t.Helper()
	return listenOn(t, "127.0.0.1", serve)
}

func listenOn(t *testing.T, host string, serve func(net.Conn)) *san.Listener {
	t.Helper()
	l, err := new(san.ListenConfig).Listen(t.Context(), "tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		t.Fatal(err)
	}
	if lacks := l.(*san.Listener).Unavailable(); len(lacks) > 0 {
		t.Fatalf("the listener does without %v", lacks)
	}
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				defer c.Close()
				serve(c)
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		serving.Wait()
	})
	return l.(*san.Listener)
}

// echo echoes, and keeps the last connection's error.
type echo struct {
	mu  sync.Mutex
	by  string // provider; guarded by mu
	err error  // guarded by mu
}

func (e *echo) serve(c net.Conn) {
	b := make([]byte, 1<<20)
	for {
		n, err := c.Read(b)
		if err == nil {
			_, err = c.Write(b[:n])
		}
		e.mu.Lock()
		e.by, e.err = san.InfoOf(c).Provider, err
		e.mu.Unlock()
		if err != nil {
			return
		}
	}
}

func (e *echo) ended() (by string, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.by, e.err
}

// dial returns a connection that has moved.
func dial(t *testing.T, l net.Listener) (*sanconn.Conn, error) {
	t.Helper()
	return dialTo(t, l.Addr().String())
}

func dialTo(t *testing.T, address string) (*sanconn.Conn, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := (&san.Dialer{Policy: san.Require, Options: sanconn.Options{AttemptTimeout: patience}}).DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { c.Close() })
	if by := san.InfoOf(c).Provider; by != "verbs" {
		t.Fatalf("it went by %q", by)
	}
	return c.(*sanconn.Conn), nil
}

// roundTrip sends bytes, and expects the same back.
func roundTrip(c net.Conn, b []byte) error {
	c.SetDeadline(time.Now().Add(patience))
	wrote := make(chan error, 1)
	go func() {
		_, err := c.Write(b)
		wrote <- err
	}()
	got := make([]byte, len(b))
	_, err := io.ReadFull(c, got)
	if err == nil && !bytes.Equal(got, b) {
		err = errors.New("other bytes came back")
	}
	return errors.Join(err, <-wrote)
}

func random(n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{1}).Read(b)
	return b
}

// Connections of san.Dial and san.Listen move to verbs, which carries each size in its way: small Writes
// in messages, larger ones by RDMA.
func TestListenAndDial(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // TestPackageSAN runs it in a process of its own
	}
	var e echo
	l := listen(t, e.serve)
	c, err := dial(t, l)
	if err != nil {
		t.Fatal(err)
	}
	before := c.Stats()
	b := random(4 << 20)
	for _, n := range []int{1, 100, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 4 << 20} {
		if err := roundTrip(c, b[:n]); err != nil {
			t.Fatalf("%d bytes: %v", n, err)
		}
	}
	st := c.Stats()
	if by, _ := e.ended(); by != "verbs" || st.TCPBytesSent != before.TCPBytesSent || st.TCPBytesReceived != before.TCPBytesReceived {
		t.Errorf("%q at the listener; %d and %d bytes by TCP", by, st.TCPBytesSent, st.TCPBytesReceived)
	}
	if st.MessagesSent == 0 || st.OfferedBytesSent < 8<<20 {
		t.Errorf("%d messages, %d bytes by RDMA, of %d", st.MessagesSent, st.OfferedBytesSent, st.BytesSent)
	}
}

// net/http sends requests and answers over connections of package san, which begin on TCP.
func TestHTTP(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // TestPackageSAN runs it in a process of its own
	}
	l, err := san.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		w.Write(body)
	})}
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	t.Cleanup(func() {
		server.Close()
		<-served
	})
	var c net.Conn // the connection that all requests share
	transport := &http.Transport{MaxConnsPerHost: 1, DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
		var err error
		c, err = new(san.Dialer).DialContext(ctx, network, address)
		return c, err
	}}
	t.Cleanup(transport.CloseIdleConnections)
	client := &http.Client{Transport: transport, Timeout: patience}
	post := func(n int) error {
		body := random(n)
		resp, err := client.Post("http://"+l.Addr().String(), "", bytes.NewReader(body))
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if got, err := io.ReadAll(resp.Body); err != nil || !bytes.Equal(got, body) {
			return fmt.Errorf("%d of %d bytes came back: %v", len(got), n, err)
		}
		return nil
	}
	testenv.Eventually(t, patience, func() error {
		if err := post(256 << 10); err != nil {
			t.Fatal(err)
		}
		if by := san.InfoOf(c).Provider; by != "verbs" {
			return fmt.Errorf("after %d bytes it is on %q", san.InfoOf(c).TCPBytes, by)
		}
		return nil
	})
	before := san.InfoOf(c)
	for _, n := range []int{0, 1, 4 << 10, 1 << 20, 5 << 20} {
		if err := post(n); err != nil {
			t.Errorf("%d bytes: %v", n, err)
		}
	}
	if after := san.InfoOf(c); after.Provider != "verbs" || after.SANBytes-before.SANBytes < 12<<20 {
		t.Errorf("%+v", after)
	}
}

// A device that is reset or removed ends its connections, at both ends, and new ones use it once
// it is back (HARDWARE.md).
func TestDeviceReset(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // TestPackageSAN runs it in a process of its own
	}
	var e echo
	l := listen(t, e.serve)
	c, err := dial(t, l)
	if err != nil {
		t.Fatal(err)
	}
	if err := roundTrip(c, random(1<<20)); err != nil {
		t.Fatal(err)
	}
	hwsim.Reset(t)
	c.SetDeadline(time.Now().Add(patience))
	if n, err := c.Read(make([]byte, 1)); n > 0 || !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("Read: %d, %v", n, err)
	}
	if n, err := c.Write(make([]byte, 1)); !errors.Is(err, syscall.EPIPE) { // as on TCP, if Read has returned the reset
		t.Errorf("Write: %d, %v", n, err)
	}
	testenv.Eventually(t, patience, func() error {
		if _, err := e.ended(); !errors.Is(err, syscall.ECONNRESET) {
			return fmt.Errorf("at the listener: %v", err)
		}
		return nil
	})
	testenv.Eventually(t, patience, func() error {
		again, err := dial(t, l)
		if err == nil {
			err = roundTrip(again, random(1<<20))
		}
		return err
	})
}

// For a proposal over a device, a listener's condition gets the host's address, and no user.
func TestCondition(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // TestPackageSAN runs it in a process of its own
	}
	proposals := make(chan san.MoveProposal, 1)
	lc := &san.ListenConfig{Condition: func(o san.MoveProposal) error {
		proposals <- o
		return errors.New("refused")
	}}
	l, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	accepted := make(chan net.Conn, 1)
	go func() {
		defer close(accepted)
		if c, err := l.Accept(); err == nil {
			accepted <- c
		}
	}()
	defer func() {
		l.Close()
		if c := <-accepted; c != nil {
			c.Close()
		}
	}()
	if _, err := dial(t, l); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("%v", err)
	}
	if o := <-proposals; o.Provider != "verbs" || o.UID != -1 {
		t.Errorf("%+v", o)
	}
}
