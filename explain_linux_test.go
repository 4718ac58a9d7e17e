package san

import (
	"errors"
	"fmt"
	"net"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/provider/shm"
	"github.com/sanconn/san/provider/verbs"
)

func TestExplain(t *testing.T) {
	onlyShm(t)
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // the collector must not close what Explain has left open
	withSAN := serve(t, &ListenConfig{}, "127.0.0.1:0", 0).Addr().String()
	plain := acceptsPlainly(t).Addr().String()
	nobody := freePort(t)
	for _, tt := range []struct {
		name    string
		d       Dialer
		address string
		shm     Reason // ReasonNone: it moves
		verbs   Reason
		tcp     bool
		chosen  string
	}{
		{"a server with it", Dialer{}, withSAN, ReasonNone, ReasonNoProvider, true, shm.Name},
		{"a plain server", Dialer{}, plain, ReasonNoListener, ReasonNoProvider, true, providerTCP},
		{"nobody", Dialer{}, nobody, ReasonUnreachable, ReasonNoProvider, false, ""},
		{"Never", Dialer{Policy: Never}, withSAN, ReasonPolicy, ReasonNoProvider, true, providerTCP},
		{"Require", Dialer{Policy: Require}, withSAN, ReasonNone, ReasonNoProvider, true, shm.Name},
		{"Require of a plain server", Dialer{Policy: Require}, plain, ReasonNoListener, ReasonNoProvider, true, ""},
		{"no providers", Dialer{Providers: []string{}}, withSAN, ReasonDisabled, ReasonNoProvider, true, providerTCP},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.d.Options.AttemptTimeout = testTimeout // see unhurried
			before := Stats().Open[shm.Name]
			outcomes, err := tt.d.Explain(t.Context(), "tcp", tt.address)
			if err != nil {
				t.Fatal(err)
			}
			got := make(map[string]Outcome)
			chosen := ""
			for _, o := range outcomes {
				if got[o.Provider] = o; o.Chosen {
					chosen += o.Provider
				}
				if o.Address.String() != tt.address {
					t.Errorf("%s: the address is %v", o.Provider, o.Address)
				}
				if (o.Local == nil) != (o.Err != nil) {
					t.Errorf("%s: from %v, %v", o.Provider, o.Local, o.Err)
				}
			}
			if len(got) != 3 || len(outcomes) != 3 {
				t.Fatalf("%+v", outcomes)
			}
			for provider, want := range map[string]Reason{shm.Name: tt.shm, verbs.Name: tt.verbs} {
				if err := got[provider].Err; reasonOf(err) != want {
					t.Errorf("%s: %v, want %v", provider, err, want)
				}
			}
			if err := got[providerTCP].Err; (err == nil) != tt.tcp {
				t.Errorf("tcp: %v", err)
			}
			if c, err := net.Dial("tcp", tt.address); err == nil {
				c.Close()
			} else if err.Error() != got[providerTCP].Err.Error() {
				t.Errorf("tcp: %v, want %v", got[providerTCP].Err, err)
			}
			if chosen != tt.chosen {
				t.Errorf("chosen is %q, want %q", chosen, tt.chosen)
			}
			testenv.Eventually(t, testTimeout, func() error { // also at the server's ends
				if n := Stats().Open[shm.Name]; n != before {
					return fmt.Errorf("%d are open, %d before", n, before)
				}
				return nil
			})
		})
	}
	for _, d := range []Dialer{{Providers: []string{"warp"}}, {}} {
		network := "tcp"
		if d.Providers == nil {
			network = "unix"
		}
		if outcomes, err := d.Explain(t.Context(), network, withSAN); err == nil {
			t.Errorf("%v of %s: %+v", d.Providers, network, outcomes)
		}
	}
}

// If no connection can be made for a provider, the provider's outcome is that error, as an *Unavailable.
func TestExplainOfADialThatFails(t *testing.T) {
	var dials atomic.Int32
	d := Dialer{NetDialer: net.Dialer{Control: func(string, string, syscall.RawConn) error {
		if dials.Add(1) > 1 {
			return syscall.EPERM
		}
		return nil
	}}}
	outcomes, err := d.Explain(t.Context(), "tcp", acceptsPlainly(t).Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	var why *Unavailable
	for _, o := range outcomes {
		if o.Provider != providerTCP && !errors.As(o.Err, &why) {
			t.Errorf("%s: %v, a %T", o.Provider, o.Err, o.Err)
		}
	}
	if why == nil || dials.Load() < 2 {
		t.Errorf("%d dials, %+v", dials.Load(), outcomes)
	}
}

// acceptsPlainly returns a listener of package net whose connections are accepted.
func acceptsPlainly(t testing.TB) *net.TCPListener {
	t.Helper()
	l := plainListen(t, "127.0.0.1:0")
	var serving sync.WaitGroup
	serving.Go(func() { reply(l, 0) })
	t.Cleanup(func() {
		l.Close()
		serving.Wait()
	})
	return l
}
