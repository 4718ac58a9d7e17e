package san

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// said describes an outcome: "ok", a reason, or the error.
func said(o Outcome) string {
	word := "ok"
	if why := (*Unavailable)(nil); errors.As(o.Err, &why) {
		word = why.Reason.String()
	} else if errors.Is(o.Err, syscall.ECONNREFUSED) {
		word = "refused"
	} else if o.Err != nil {
		word = o.Err.Error()
	}
	if o.Chosen {
		word += ", chosen"
	}
	return o.Provider + ": " + word
}

func mustExplain(t *testing.T, d *Dialer, address string) []Outcome {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	outcomes, err := d.Explain(ctx, "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	return outcomes
}

func TestExplainSaysOfEachWayWhatADialWouldMeet(t *testing.T) {
	answers := func(err error) func(context.Context, request) error {
		return func(context.Context, request) error { return err }
	}
	const standardWays = "shm: no provider|verbs: no provider|" // the tests' registry has neither
	for _, c := range []struct {
		name   string
		dialer Dialer
		plain  bool // the listener is TCP's alone
		nobody bool // there is none
		fail   func(context.Context, request) error
		want   string
	}{
		{name: "a SAN listener", want: "fake: ok, chosen|" + standardWays + "tcp: ok"},
		{name: "a plain listener", plain: true, want: "fake: no SAN listener|" + standardWays + "tcp: ok, chosen"},
		{name: "nobody", nobody: true, fail: answers(syscall.ECONNREFUSED), want: "fake: refused|" + standardWays + "tcp: refused"},
		{name: "the SAN is out of order", fail: answers(syscall.ENOMEM), want: "fake: resources|" + standardWays + "tcp: ok, chosen"},
		{name: "a final answer leaves TCP unchosen", fail: answers(syscall.ECONNREFUSED), want: "fake: refused|" + standardWays + "tcp: ok"},
		{name: "policy Never", dialer: Dialer{Policy: Never}, want: "fake: policy|shm: policy|verbs: policy|tcp: ok, chosen"},
		{name: "policy Require", dialer: Dialer{Policy: Require}, plain: true, want: "fake: no SAN listener|" + standardWays + "tcp: policy"},
		{name: "the program says none", dialer: Dialer{Providers: []string{}}, want: standardWays + "fake: disabled|tcp: ok, chosen"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := useFake(t)
			f.fail = c.fail
			var address string
			switch {
			case c.nobody:
				address = freePort(t)
			case c.plain:
				address = plainListen(t, "127.0.0.1:0").Addr().String()
			default:
				address = mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0").Addr().String()
			}
			outcomes := mustExplain(t, &c.dialer, address)
			var got []string
			chosen := ""
			for _, o := range outcomes {
				got = append(got, said(o))
				if o.Address.String() != address {
					t.Errorf("%s at %v, want %s", said(o), o.Address, address)
				}
				if (o.Local == nil) != (o.Err != nil) {
					t.Errorf("%s from %v", said(o), o.Local)
				}
				if o.Chosen {
					chosen = o.Provider
				}
			}
			if diff := cmp.Diff(strings.Split(c.want, "|"), got); diff != "" {
				t.Errorf("outcomes (-want +got):\n%s", diff)
			}

			conn, err := c.dialer.Dial("tcp", address)
			switch {
			case err != nil && chosen != "":
				t.Errorf("a dial fails with %v, but %s was chosen", err, chosen)
			case err == nil:
				defer conn.Close()
				wantProvider(t, conn, chosen)
			}
		})
	}
}

func TestExplainLeavesNoConnectionBehind(t *testing.T) {
	useFake(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	before := Stats()
	mustExplain(t, &Dialer{}, l.Addr().String())
	for range 2 { // by the provider and by TCP
		c := mustAccept(t, l)
		c.SetDeadline(time.Now().Add(patience))
		if n, err := c.Read(make([]byte, 1)); n != 0 || err != io.EOF {
			t.Errorf("the listener reads %d bytes, %v by %s, want EOF", n, err, InfoOf(c).Provider)
		}
		c.Close()
	}
	waitFor(t, "the connections are closed", func() bool { return Stats().Open[fakeName] == before.Open[fakeName] })
	if diff := cmp.Diff(before.Dialed, Stats().Dialed); diff != "" {
		t.Errorf("dials counted (-before +after):\n%s", diff)
	}
}

func TestExplainIsBoundedAsADialIs(t *testing.T) {
	f := useFake(t)
	f.fail = func(ctx context.Context, _ request) error { <-ctx.Done(); return ctx.Err() }
	address := plainListen(t, "127.0.0.1:0").Addr().String()
	d := &Dialer{}
	d.Options.AttemptTimeout = minSilence
	if got := said(mustExplain(t, d, address)[0]); got != "fake: timeout" {
		t.Errorf("an attempt without an answer: %s", got)
	}
	if got := said(mustExplain(t, d, address)[0]); got != "fake: remembered failure" {
		t.Errorf("the next one: %s", got)
	}

	resetBackoff()
	d.Options.AttemptTimeout = patience
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	// An attempt has half of that; this one does not give up before the end.
	f.fail = func(context.Context, request) error { <-ctx.Done(); return ctx.Err() }
	outcomes, err := d.Explain(ctx, "tcp", address)
	if err != nil || len(outcomes) == 0 {
		t.Fatalf("%d outcomes, %v", len(outcomes), err)
	}
	for _, o := range outcomes {
		if o.Chosen || (o.Provider == fakeName || o.Provider == "tcp") && !errors.Is(o.Err, context.DeadlineExceeded) && !isTimeout(o.Err) {
			t.Errorf("%s beyond the context's deadline", said(o))
		}
	}
}

func isTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}

func TestExplainSeveralAddressesChoosesOnce(t *testing.T) {
	f := useFake(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	port := portOf(l.Addr().String())
	dead := netip.MustParseAddrPort("127.0.0.2:" + port)
	f.fail = func(_ context.Context, r request) error {
		if r.remote == dead {
			return syscall.ECONNREFUSED
		}
		return nil
	}
	d := &Dialer{Providers: []string{fakeName}}
	d.NetDialer.Resolver = answering(t, map[string][]string{"two.test.": {"127.0.0.2", "127.0.0.1"}})
	var chosen []string
	for _, o := range mustExplain(t, d, net.JoinHostPort("two.test", port)) {
		if o.Chosen {
			chosen = append(chosen, fmt.Sprint(o.Provider, " ", o.Address))
		}
	}
	if diff := cmp.Diff([]string{"fake " + l.Addr().String()}, chosen); diff != "" {
		t.Errorf("chosen (-want +got):\n%s", diff)
	}
}

func TestExplainRefusesWhatADialWould(t *testing.T) {
	useFake(t)
	for _, c := range []struct {
		name, network, address, want string
		dialer                       Dialer
	}{
		{name: "another network", network: "unix", address: "/x", want: "not one of tcp"},
		{name: "no port", network: "tcp", address: "127.0.0.1", want: "missing port"},
		{name: "unknown provider", network: "tcp", address: "127.0.0.1:1", dialer: Dialer{Providers: []string{"warp"}}, want: `unknown provider "warp"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			outcomes, err := c.dialer.Explain(t.Context(), c.network, c.address)
			if err == nil || !strings.Contains(err.Error(), c.want) || outcomes != nil {
				t.Errorf("%v, %v; want an error with %q", outcomes, err, c.want)
			}
		})
	}
}

// A destination that LocalAddr does not reach is reported, too.
func TestExplainOfAnotherFamily(t *testing.T) {
	useFake(t)
	d := &Dialer{NetDialer: net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}}}
	outcomes := mustExplain(t, d, "[::1]:9")
	var tcp error
	for _, o := range outcomes {
		if o.Chosen || o.Err == nil {
			t.Errorf("%s", said(o))
		}
		if o.Provider == providerTCP {
			tcp = o.Err
		}
	}
	if tcp == nil || !strings.Contains(tcp.Error(), "no suitable address") {
		t.Errorf("TCP: %v", tcp)
	}
}

// The real providers say why they do not serve an address.
func TestExplainSaysWhyAnAddressIsNotServed(t *testing.T) {
	resetBackoff()
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond) // TCP has nothing to find there
	defer cancel()
	outcomes, err := new(Dialer).Explain(ctx, "tcp", "192.0.2.1:9") // TEST-NET-1
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range outcomes {
		if o.Provider == providerTCP {
			continue
		}
		why := (*Unavailable)(nil)
		switch {
		case !errors.As(o.Err, &why):
			t.Errorf("%s: %v", o.Provider, o.Err)
		case why.Reason != ReasonNoProvider && why.Reason != ReasonDisabled && (why.Reason != ReasonNotServed || why.Err == nil):
			t.Errorf("%s: %v, want the reason in words", o.Provider, why)
		}
	}
}
