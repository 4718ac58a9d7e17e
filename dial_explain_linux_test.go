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

// describe returns an outcome: "ok", a reason, or the error.
func describe(o Outcome) string {
	result := "ok"
	if why := (*Unavailable)(nil); errors.As(o.Err, &why) {
		result = why.Reason.String()
	} else if errors.Is(o.Err, syscall.ECONNREFUSED) {
		result = "refused"
	} else if o.Err != nil {
		result = o.Err.Error()
	}
	if o.Chosen {
		result += ", chosen"
	}
	return o.Provider + ": " + result
}

func mustExplain(t *testing.T, d *Dialer, address string) []Outcome {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	outcomes, err := d.Explain(ctx, "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	return outcomes
}

func TestExplainReportsEachWay(t *testing.T) {
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
		{name: "the program wants none", dialer: Dialer{Providers: []string{}}, want: standardWays + "fake: disabled|tcp: ok, chosen"},
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
			wantOutcomes(t, &c.dialer, address, c.want)
		})
	}
}

// wantOutcomes checks the outcomes of Explain, and that a dial gets the one that is chosen.
func wantOutcomes(t *testing.T, d *Dialer, address, want string) {
	t.Helper()
	var got []string
	chosen := ""
	for _, o := range mustExplain(t, d, address) {
		got = append(got, describe(o))
		if o.Address.String() != address {
			t.Errorf("%s at %v, want %s", describe(o), o.Address, address)
		}
		if (o.Local == nil) != (o.Err != nil) {
			t.Errorf("%s from %v", describe(o), o.Local)
		}
		if o.Chosen {
			chosen = o.Provider
		}
	}
	if diff := cmp.Diff(strings.Split(want, "|"), got); diff != "" {
		t.Errorf("outcomes (-want +got):\n%s", diff)
	}

	conn, err := d.Dial("tcp", address)
	switch {
	case err != nil && chosen != "":
		t.Errorf("a dial fails with %v, but %s was chosen", err, chosen)
	case err == nil:
		defer conn.Close()
		wantProvider(t, conn, chosen)
	}
}

func TestExplainLeavesNoConnectionBehind(t *testing.T) {
	useFake(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	before := Stats()
	mustExplain(t, &Dialer{}, l.Addr().String())
	for range 2 { // by the provider and by TCP
		c := mustAccept(t, l)
		c.SetDeadline(time.Now().Add(testTimeout))
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
	if got := describe(mustExplain(t, d, address)[0]); got != "fake: timeout" {
		t.Errorf("an attempt without an answer: %s", got)
	}
	if got := describe(mustExplain(t, d, address)[0]); got != "fake: remembered failure" {
		t.Errorf("the next one: %s", got)
	}

	resetBackoff()
	d.Options.AttemptTimeout = testTimeout
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
			t.Errorf("%s beyond the context's deadline", describe(o))
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
			t.Errorf("%s", describe(o))
		}
		if o.Provider == providerTCP {
			tcp = o.Err
		}
	}
	if tcp == nil || !strings.Contains(tcp.Error(), "no suitable address") {
		t.Errorf("TCP: %v", tcp)
	}
}

// The real providers give a reason for an address that they do not serve.
func TestExplainNotServed(t *testing.T) {
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
			t.Errorf("%s: %v, want an error with details", o.Provider, why)
		}
	}
}
