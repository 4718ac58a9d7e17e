//go:build linux && cgo

package conns

import (
	"bytes"
	"context"
	"crypto/sha256"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/nettest"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/test/hwsim"
)

// TestOnHwsim runs test suites of others on the simulated device, as several families.
func TestOnHwsim(t *testing.T) {
	if testenv.Device() != "" {
		return // this is such a process, or the lane of real drivers
	}
	for _, settings := range []string{
		"seed=31,jitter_us=8", "seed=32,jitter_us=8,profile=bnxt_re", "seed=33,jitter_us=8,profile=irdma-iwarp",
	} {
		t.Run(settings, func(t *testing.T) {
			f := hwsim.New(t, settings)
			onHwsim(t, f, "^(TestConformance|TestHTTP)$")
		})
	}
}

// TestManyOnHwsim runs TestManyMove, and checks that nothing is left on the device.
func TestManyOnHwsim(t *testing.T) {
	if testenv.Device() != "" {
		return
	}
	onHwsim(t, hwsim.New(t, "seed=34"), "^TestManyMove$")
}

func onHwsim(t *testing.T, f hwsim.Fabric, tests string) {
	t.Helper()
	child := exec.Command(os.Args[0], "-test.run="+tests, "-test.timeout=3m", "-test.v", fmt.Sprintf("-many=%d", *many))
	child.Env = f.Env()
	out, err := child.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if !bytes.Contains(out, []byte("--- PASS")) {
		t.Errorf("no test ran\n%s", out)
	}
	t.Logf("%s", out)
	f.Check(t)
}

func mustListen(t testing.TB) net.Listener {
	t.Helper()
	l, err := Listen(Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func dial(l net.Listener) (*sanconn.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return Dial(ctx, Config{}, netip.MustParseAddrPort(l.Addr().String()))
}

// TestConformance runs x/net's suite for a net.Conn.
func TestConformance(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // TestOnHwsim runs it in processes of its own
	}
	l := mustListen(t)
	nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
		dialed := make(chan error, 1)
		var a *sanconn.Conn
		go func() {
			var err error
			a, err = dial(l)
			dialed <- err
		}()
		b, err := l.Accept()
		if err == nil {
			err = <-dialed
		}
		if err != nil {
			return nil, nil, nil, err
		}
		return a, b, func() { a.Close(); b.Close() }, nil
	})
}

var many = flag.Int("many", 500, "connections that TestManyMove has at a time")

// TestManyMove dials many connections at once. As many of them move at a time as with package san. All
// of them move, and each carries bytes while the others exist.
func TestManyMove(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // TestManyOnHwsim runs it in a process of its own
	}
	const atATime = 16
	l := mustListen(t)
	var serving sync.WaitGroup
	defer serving.Wait()
	serving.Go(func() {
		for range *many {
			c, err := l.Accept()
			if err != nil {
				t.Error(err)
				return
			}
			serving.Go(func() {
				defer c.Close()
				if _, err := io.Copy(struct{ io.Writer }{c}, c); err != nil {
					t.Error(err)
				}
			})
		}
	})
	began := time.Now()
	turns := make(chan struct{}, atATime)
	all := make([]*sanconn.Conn, *many)
	var dialing sync.WaitGroup
	for i := range all {
		dialing.Go(func() {
			turns <- struct{}{}
			defer func() { <-turns }()
			c, err := dial(l)
			if err != nil {
				t.Errorf("connection %d: %v", i, err)
				return
			}
			all[i] = c
		})
	}
	dialing.Wait()
	t.Logf("%d have moved in %v", len(all), time.Since(began))
	for i, c := range all {
		if c == nil {
			l.Close() // ends an Accept that waits for a connection that does not come
			continue
		}
		defer c.Close()
		b := []byte{byte(i)}
		if _, err := c.Write(b); err != nil {
			t.Errorf("connection %d: %v", i, err)
		} else if _, err := io.ReadFull(c, b); err != nil || b[0] != byte(i) {
			t.Errorf("connection %d: %d, %v", i, b, err)
		}
		if st := c.Stats(); st.BytesReceived-st.TCPBytesReceived != 1 {
			t.Errorf("connection %d: %d bytes came by TCP", i, st.TCPBytesReceived)
		}
	}
}

// TestHTTP moves bodies of many sizes with net/http over a few connections, in both directions. The
// sizes cover each way in which bytes go.
func TestHTTP(t *testing.T) {
	if testenv.Device() != hwsim.Lane {
		return // TestOnHwsim runs it in processes of its own
	}
	l := mustListen(t)
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		w.Header().Set("Sum", fmt.Sprintf("%x", sha256.Sum256(body)))
		w.Write(body)
	})}
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	t.Cleanup(func() {
		server.Close()
		<-served
	})
	transport := &http.Transport{
		MaxConnsPerHost: 4,
		DialContext:     func(context.Context, string, string) (net.Conn, error) { return dial(l) },
	}
	t.Cleanup(transport.CloseIdleConnections)
	client := &http.Client{Transport: transport, Timeout: time.Minute}
	var all sync.WaitGroup
	for i, size := range []int{0, 1, 100, 4 << 10, 64 << 10, 300_000, 1 << 20, 5 << 20, 100, 2 << 20, 1, 64 << 10} {
		all.Go(func() {
			if err := post(client, l.Addr().String(), size, uint64(i)); err != nil {
				t.Errorf("%d bytes: %v", size, err)
			}
		})
	}
	all.Wait()
}

// post sends random bytes, and expects the same as the answer.
func post(client *http.Client, address string, size int, seed uint64) error {
	body := make([]byte, size)
	r := rand.New(rand.NewPCG(seed, 0))
	for i := range body {
		body[i] = byte(r.Uint32())
	}
	resp, err := client.Post("http://"+address+"/", "", bytes.NewReader(body))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	switch {
	case err != nil:
		return err
	case resp.Header.Get("Sum") != fmt.Sprintf("%x", sha256.Sum256(body)):
		return fmt.Errorf("other bytes arrived")
	case !bytes.Equal(got, body):
		return fmt.Errorf("other bytes came back")
	}
	return nil
}
