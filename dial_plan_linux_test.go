package san

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// servesOnly is a provider that serves one address.
type servesOnly struct {
	*fake
	to netip.Addr
}

func (p servesOnly) serves(dst netip.Addr, _ settings) error {
	if p.to == dst {
		return nil
	}
	return fmt.Errorf("it serves %v alone", p.to)
}

// With the policy Require, the error for an address that no SAN serves has the reason.
func TestRequireNamesWhatIsNotServed(t *testing.T) {
	f := useFake(t)
	one, two := netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.0.0.2")
	useProviders(t, servesOnly{f, one}, f, servesOnly{f, two})
	d := &Dialer{Policy: Require, NetDialer: net.Dialer{Timeout: testTimeout}}
	_, err := d.Dial("tcp", "192.0.2.1:80")
	var op *net.OpError
	if !errors.As(err, &op) || op.Addr == nil || op.Addr.String() != "192.0.2.1:80" || reasonOf(err) != ReasonNotServed {
		t.Errorf("%v, want the address and the reason", err)
	}
	if want := "it serves 127.0.0.1 alone; it serves loopback alone; it serves 127.0.0.2 alone"; !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %q in it", err, want)
	}
	// A provider that would serve it may be ruled out for another reason.
	d.NetDialer.LocalAddr = &net.TCPAddr{IP: net.IPv6loopback}
	if _, err = d.Dial("tcp", "127.0.0.1:80"); reasonOf(err) != ReasonNotServed {
		t.Errorf("from another family: %v", err)
	}
}

// A name is looked up once, whether a SAN serves its address or not.
func TestDialLooksUpANameOnce(t *testing.T) {
	f := useFake(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	for _, c := range []struct {
		name     string
		provider provider
		want     Reason
	}{
		{"by a SAN", f, ReasonNone},
		{"not served", servesOnly{f, netip.Addr{}}, ReasonNotServed},
	} {
		t.Run(c.name, func(t *testing.T) {
			useProviders(t, c.provider)
			var lookups atomic.Int32
			r := answering(t, map[string][]string{"one.test.": {"127.0.0.1"}})
			pipe := r.Dial
			r.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
				lookups.Add(1) // each query has a connection of its own
				return pipe(ctx, network, address)
			}
			conn, err := (&Dialer{NetDialer: net.Dialer{Resolver: r, Timeout: testTimeout}}).Dial("tcp4", net.JoinHostPort("one.test", portOf(l.Addr().String())))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if why := InfoOf(conn).Fallback; why != c.want {
				t.Errorf("reason %v, want %v", why, c.want)
			}
			if n := lookups.Load(); n != 1 {
				t.Errorf("%d lookups", n)
			}
		})
	}
}

// Addresses that LocalAddr does not reach are left out, as net does it; where the
// policy is Require, those that no SAN serves are.
func TestDialLeavesOutWhatCannotBe(t *testing.T) {
	f := useFake(t)
	var mu sync.Mutex
	var tried []netip.Addr
	f.fail = func(_ context.Context, r request) error {
		mu.Lock()
		defer mu.Unlock()
		tried = append(tried, r.remote.Addr())
		return syscall.ECONNREFUSED
	}
	r := answering(t, map[string][]string{"both.test.": {"::1", "127.0.0.1"}, "two.test.": {"127.0.0.2", "127.0.0.1"}})
	v4 := netip.MustParseAddr("127.0.0.1")

	d := &Dialer{NetDialer: net.Dialer{Resolver: r, Timeout: testTimeout, LocalAddr: &net.TCPAddr{IP: v4.AsSlice()}}}
	_, err := d.Dial("tcp", "both.test:1")
	wantOpError(t, err, "dial", syscall.ECONNREFUSED)
	if !slices.Equal(tried, []netip.Addr{v4}) {
		t.Errorf("tried %v", tried)
	}
	_, want := (&net.Dialer{LocalAddr: d.NetDialer.LocalAddr}).Dial("tcp", "[::1]:1")
	if _, err := d.Dial("tcp", "[::1]:1"); err == nil || want == nil || err.Error() != want.Error() {
		t.Errorf("got  %v\nwant %v", err, want)
	}

	useProviders(t, servesOnly{f, v4})
	f.fail = func(context.Context, request) error { return &Unavailable{Reason: ReasonVersion} }
	d = &Dialer{Policy: Require, NetDialer: net.Dialer{Resolver: r, Timeout: testTimeout}}
	if _, err := d.Dial("tcp", "two.test:1"); reasonOf(err) != ReasonVersion {
		t.Errorf("with Require: %v", err)
	}
}

// Where no SAN serves any of the addresses, net tries the families in parallel.
func TestDialLeavesTheFamiliesToNet(t *testing.T) {
	useProviders(t, servesOnly{useFake(t), netip.Addr{}})
	l := plainListen(t, "127.0.0.1:0")
	left := make(chan error, 1)
	d := bothFamilies(t, Prefer)
	d.NetDialer.FallbackDelay = time.Millisecond
	d.NetDialer.ControlContext = func(ctx context.Context, network, _ string, _ syscall.RawConn) error {
		if network == "tcp4" {
			return nil
		}
		<-ctx.Done()
		left <- ctx.Err()
		return ctx.Err()
	}
	c := mustDial(t, d, net.JoinHostPort("both.test", portOf(l.Addr().String())))
	wantFallback(t, c, ReasonNotServed)
	send(t, c, mustAccept(t, l), "by the faster")
	select {
	case err := <-left:
		if err != context.Canceled {
			t.Errorf("the attempt at the first address ended by %v, not because another one won", err)
		}
	case <-time.After(testTimeout):
		t.Error("the first address was not tried")
	}
}
