package san

import (
	"context"
	"errors"
	"io"
	"maps"
	"net"
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/sanconn/san/internal/moving"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/sanconn"
)

func TestListenErrorsAreThoseOfNet(t *testing.T) {
	useFake(t)
	taken := plainListen(t, "127.0.0.1:0").Addr().String()
	for _, c := range []struct{ name, network, address string }{
		{"unknown network", "tcp5", "127.0.0.1:0"},
		{"bad address", "tcp", "127.0.0.1"},
		{"bad port", "tcp", "127.0.0.1:http2000"},
		{"port in use", "tcp", taken},
		{"not an address of this host", "tcp", "192.0.2.1:0"},
		{"family without address", "tcp6", "127.0.0.1:0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, want := net.Listen(c.network, c.address)
			_, got := Listen(c.network, c.address)
			if want == nil || got == nil || got.Error() != want.Error() {
				t.Errorf("got  %v\nwant %v", got, want)
			}
		})
	}
	lc := &ListenConfig{Providers: []string{"warp"}}
	if _, err := lc.Listen(context.Background(), "tcp", "127.0.0.1:0"); err == nil {
		t.Error("an unknown provider is no error")
	}
}

func TestListenRequireNeedsAProvider(t *testing.T) {
	useProviders(t)
	lc := &ListenConfig{Policy: Require}
	addr := freePort(t)
	_, err := lc.Listen(context.Background(), "tcp", addr)
	var why *Unavailable
	if !errors.As(err, &why) || why.Reason != ReasonNoProvider {
		t.Errorf("error %v", err)
	}
	wantOpError(t, err, "listen", why)
	plainListen(t, addr) // the port is free again
}

func TestAcceptTakesBothKindsAndTellsThemApart(t *testing.T) {
	useFake(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	for range 5 {
		c := mustDial(t, atOnce(), l.Addr().String())
		s := mustAccept(t, l)
		wantMoved(t, c, fakeName)
		wantMoved(t, s, fakeName)
		send(t, s, c, "over the SAN")

		p := mustDial(t, &Dialer{Policy: Never}, l.Addr().String())
		ps := mustAccept(t, l)
		send(t, p, ps, "over TCP")
		wantFallback(t, ps, ReasonPeerPlain)
	}
}

// A connection that Accept returns from a listener with Require has moved before a byte was sent. Its
// dialer waits for the move, but not for a call of Accept.
func TestListenerRequireTakesWhatHasMoved(t *testing.T) {
	useFake(t)
	l := mustListen(t, &ListenConfig{Policy: Require}, "tcp", "127.0.0.1:0")
	c := mustDial(t, &Dialer{Policy: Require}, l.Addr().String())
	if _, err := io.WriteString(c, "early"); err != nil {
		t.Fatal(err)
	}
	c.Close()
	s := mustAccept(t, l)
	wantProvider(t, s, fakeName)
	got, err := io.ReadAll(s)
	if string(got) != "early" || err != nil {
		t.Errorf("read %q, %v", got, err)
	}
	if info := InfoOf(s); info.TCPBytes != 0 || info.SANBytes != 5 {
		t.Errorf("%+v", info)
	}
}

// A connection that Accept has returned no longer occupies a place in the backlog. One that still waits
// there at Close is reset.
func TestListenerRequireGivesPlacesBack(t *testing.T) {
	useFake(t)
	l := mustListen(t, &ListenConfig{Policy: Require, Backlog: 1}, "tcp", "127.0.0.1:0")
	for range 3 {
		c := mustDial(t, &Dialer{Policy: Require}, l.Addr().String())
		mustAccept(t, l).Close()
		c.Close()
	}
	c := mustDial(t, &Dialer{Policy: Require}, l.Addr().String())
	testenv.Eventually(t, testTimeout, func() error {
		if len(l.required.ready) == 0 {
			return errors.New("it has not moved")
		}
		return nil
	})
	l.Close()
	c.SetDeadline(time.Now().Add(testTimeout))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a client that waited for Accept read %v, want a reset", err)
	}
}

// A connection that stays on TCP is reset, also at Close.
func TestListenerRequireResetsPlainTCP(t *testing.T) {
	useFake(t)
	l := mustListen(t, &ListenConfig{Policy: Require}, "tcp", "127.0.0.1:0")
	p, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	mustDial(t, &Dialer{Policy: Require}, l.Addr().String())
	wantProvider(t, mustAccept(t, l), fakeName) // the plain connection was accepted, too, but is not returned
	l.Close()
	p.SetDeadline(time.Now().Add(testTimeout))
	if _, err = p.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a plain client read %v, want a reset", err)
	}
	_, err = l.Accept()
	wantOpError(t, err, "accept", net.ErrClosed)
}

// If all places are taken, a new connection replaces the oldest one whose client has sent nothing: that
// one is reset, and no other.
func TestListenerRequireOldestSilentGivesWay(t *testing.T) {
	onlyShm(t)
	before := Stats()
	l := mustListen(t, &ListenConfig{Policy: Require, Backlog: 2}, "tcp", "127.0.0.1:0")
	var clients []net.Conn
	for range 2 {
		p, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		clients = append(clients, p)
		waitFor(t, "it has a place", func() bool { return l.required.silentFor(0) == len(clients) })
	}
	l.required.silentFor(-testTimeout) // makes them older, so that the test need not wait
	if l.required.makeRoom() <= patience {
		t.Error("one gives way that has just come")
	}
	l.required.silentFor(testTimeout + patience)
	l.required.mu.Lock()
	newer := l.required.silent[1]
	newer.giveWay = func(error) { t.Error("the newer one gives way") }
	l.required.mu.Unlock()
	c := mustDial(t, &Dialer{Policy: Require, Options: sanconn.Options{AttemptTimeout: testTimeout}}, l.Addr().String())
	wantProvider(t, c, "shm")
	wantProvider(t, mustAccept(t, l), "shm")
	clients[0].SetDeadline(time.Now().Add(testTimeout))
	if _, err := clients[0].Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the oldest read %v, want a reset", err)
	}
	if after := Stats(); after.Refused == before.Refused || after.Fallbacks[ReasonResources] != before.Fallbacks[ReasonResources]+1 {
		t.Errorf("%d are refused, for %v", after.Refused-before.Refused, after.Fallbacks)
	}
}

// silentFor returns how many connections have a place and are not ready, and makes them older by d.
func (r *required) silentFor(d time.Duration) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.silent {
		s.since = s.since.Add(-d)
	}
	return len(r.silent)
}

// A connection whose dialer has proposed to move it keeps its place while the condition decides, but not
// after the condition has refused it.
func TestListenerRequireProposedGivesNoWay(t *testing.T) {
	onlyShm(t)
	for _, refusal := range []error{nil, errStranger} {
		before := Stats()
		b := blocking{let: make(chan struct{}), err: refusal}
		l := mustListen(t, &ListenConfig{Policy: Require, Backlog: 1, Condition: b.decide}, "tcp", "127.0.0.1:0")
		dialed := make(chan error, 1)
		go func() {
			c, err := (&Dialer{Policy: Require, Options: sanconn.Options{AttemptTimeout: testTimeout}}).Dial("tcp", l.Addr().String())
			if err == nil {
				t.Cleanup(func() { c.Close() })
			}
			dialed <- err
		}()
		waitFor(t, "the condition is asked", func() bool { return b.calls.Load() > 0 })
		l.required.silentFor(patience)
		l.required.makeRoom()
		close(b.let)
		if err := <-dialed; (err == nil) != (refusal == nil) || err != nil && reasonOf(err) != ReasonRefused {
			t.Fatalf("Dial: %v", err)
		}
		if refusal == nil {
			wantProvider(t, mustAccept(t, l), "shm")
			continue
		}
		l.required.makeRoom()
		waitFor(t, "it is reset", func() bool { return Stats().Refused > before.Refused })
		if after := Stats(); after.Fallbacks[ReasonResources] == before.Fallbacks[ReasonResources] {
			t.Errorf("it counts as %v", after.Fallbacks)
		}
	}
}

// A deadline of Accept works as net's, with each policy.
func TestListenerDeadline(t *testing.T) {
	useFake(t)
	for _, policy := range []Policy{Prefer, Require, Never} {
		t.Run(policy.String(), func(t *testing.T) {
			l := mustListen(t, &ListenConfig{Policy: policy}, "tcp", "127.0.0.1:0")
			late := time.AfterFunc(testTimeout, func() { l.Close() })
			want := plainListen(t, "127.0.0.1:0")
			for _, at := range []time.Duration{-time.Hour, time.Millisecond} {
				l.SetDeadline(time.Now().Add(at))
				want.SetDeadline(time.Now().Add(at))
				_, err := l.Accept()
				_, werr := want.Accept()
				wantOpError(t, err, "accept", os.ErrDeadlineExceeded)
				if !sameOpError(err, werr) {
					t.Errorf("%#v, want %#v", err, werr)
				}
			}
			l.SetDeadline(time.Time{})
			time.AfterFunc(10*time.Millisecond, func() { l.SetDeadline(time.Unix(1, 0)) }) // during the call of Accept
			_, err := l.Accept()
			wantOpError(t, err, "accept", os.ErrDeadlineExceeded)
			l.SetDeadline(time.Time{})
			mustDial(t, &Dialer{Policy: policy}, l.Addr().String())
			if c, err := l.Accept(); err != nil {
				t.Errorf("without a deadline: %v", err)
			} else {
				c.Close()
			}
			late.Stop()
			l.Close()
			want.Close()
			for name, call := range map[string]func(net.Listener) error{
				"Accept": func(l net.Listener) error { _, err := l.Accept(); return err },
				"Close":  func(l net.Listener) error { return l.Close() },
				"SetDeadline": func(l net.Listener) error {
					return l.(interface{ SetDeadline(time.Time) error }).SetDeadline(time.Now())
				},
			} {
				if err, werr := call(l), call(want); !sameOpError(err, werr) {
					t.Errorf("%s after Close: %#v, want %#v", name, err, werr)
				}
			}
		})
	}
}

// sameOpError compares two errors without their addresses. Either both errors have an address or
// neither.
func sameOpError(a, b error) bool {
	var x, y *net.OpError
	if !errors.As(a, &x) || !errors.As(b, &y) {
		return a == b || a != nil && b != nil && a.Error() == b.Error()
	}
	return x.Op == y.Op && x.Net == y.Net && x.Err.Error() == y.Err.Error() &&
		(x.Addr == nil) == (y.Addr == nil) && (x.Source == nil) == (y.Source == nil)
}

// A connection that was accepted, and forgotten by the program before it has moved, leaves nothing
// behind, as with net: the process has no name for the port any more.
func TestForgottenAfterAccept(t *testing.T) {
	onlyShm(t)
	forget := func() {
		l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := l.Accept(); err != nil {
			t.Fatal(err)
		}
		l.Close()
	}
	idle(t)
	before := resources(t)
	for range 20 {
		forget()
	}
	wantResources(t, before)
}

func TestListenerFileAndSyscallConn(t *testing.T) {
	useFake(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	file, err := l.File()
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	child, err := net.FileListener(file)
	if err != nil {
		t.Fatal(err)
	}
	defer child.Close()
	// The listener that never called Accept takes no connection from the other.
	for _, d := range []*Dialer{{Policy: Never}, {}} {
		p := mustDial(t, d, l.Addr().String())
		send(t, p, mustAccept(t, child), "to the heir")
	}
	raw, err := l.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := raw.Control(func(fd uintptr) {
		if ok, err := isListening(fd); !ok || err != nil {
			t.Errorf("the socket does not listen: %v", err)
		}
	}); err != nil {
		t.Error(err)
	}
}

// A provider may call Stats while a listener asks it what it lacks: the listener holds no lock of the
// counters meanwhile, so this does not deadlock.
func TestListenersAreAskedBeforeTheyAreCounted(t *testing.T) {
	useProviders(t, counting{new(fake)})
	l := mustListen(t, new(ListenConfig), "tcp", "127.0.0.1:0")
	if why := l.Unavailable()[fakeName]; why == nil || why.Reason != ReasonResources {
		t.Errorf("it lacks %v", why)
	}
}

// counting is a provider whose acceptors call Stats.
type counting struct{ *fake }

func (counting) Listen(*net.TCPListener, moving.Settings) (moving.Acceptor, error) {
	return countingAcceptor{}, nil
}

type countingAcceptor struct{ fakeAcceptor }

func (countingAcceptor) Lacks() (why error, all bool) {
	Stats()
	return &Unavailable{Reason: ReasonResources}, true
}

// With Require, a connection that has had bytes on TCP before it moves is refused. Both ends find that
// at once, and not only when the time for the dial is up.
func TestRequireWantsAllBytes(t *testing.T) {
	onlyShm(t)
	for _, requires := range []string{"dialer", "listener"} {
		t.Run(requires, func(t *testing.T) {
			written := make(chan struct{})
			lc := &ListenConfig{Condition: func(MoveProposal) error { <-written; return nil }}
			d := atOnce()
			if requires == "listener" {
				lc.Policy = Require
			} else {
				d.Policy = Require
			}
			before := Stats()
			l := mustListen(t, lc, "tcp", "127.0.0.1:0")
			began := time.Now()
			var err error
			switch requires {
			case "listener":
				c := mustDial(t, d, l.Addr().String())
				send := func() { defer close(written); c.Write([]byte("hello")) }
				send()
				_, err = c.Read(make([]byte, 1))
				if !errors.Is(err, syscall.ECONNRESET) {
					t.Errorf("Read: %v", err)
				}
				waitFor(t, "it counts as refused", func() bool { return Stats().Refused > before.Refused })
				if after := Stats(); after.Fallbacks[ReasonStays] == before.Fallbacks[ReasonStays] {
					t.Errorf("it counts as %v", after.Fallbacks)
				}
			case "dialer":
				go func() {
					defer close(written)
					if c, err := l.Accept(); err == nil {
						c.Write([]byte("hello"))
						t.Cleanup(func() { c.Close() })
					}
				}()
				_, err = d.Dial("tcp", l.Addr().String())
				if reasonOf(err) != ReasonStays {
					t.Errorf("Dial: %v", err)
				}
			}
			if took := time.Since(began); took > requireTimeout/2 {
				t.Errorf("it took %v", took)
			}
		})
	}
}

// A listener uses the providers that can serve it, and reports the others. Without any, the reason is that of
// a provider that has failed, if one has, and otherwise that there is no such SAN. Where there is a SAN, only
// failures are counted.
func TestWhatAListenerLacks(t *testing.T) {
	absent, fails := &Unavailable{Reason: ReasonNotServed}, &Unavailable{Reason: ReasonResources}
	for name, of := range map[string]struct {
		refuse  [2]error // by the two providers
		has     []string
		reason  Reason // of connections
		counted map[Reason]uint64
	}{
		"neither":                   {[2]error{nil, nil}, []string{"first", "second"}, ReasonNone, nil},
		"the first":                 {[2]error{absent, nil}, []string{"second"}, ReasonNone, nil},
		"the second, by fault":      {[2]error{nil, fails}, []string{"first"}, ReasonNone, map[Reason]uint64{ReasonResources: 1}},
		"both":                      {[2]error{absent, absent}, nil, ReasonNotServed, map[Reason]uint64{ReasonNotServed: 1}},
		"both, the second by fault": {[2]error{absent, fails}, nil, ReasonResources, map[Reason]uint64{ReasonResources: 1}},
		"both, the first by fault":  {[2]error{fails, absent}, nil, ReasonResources, map[Reason]uint64{ReasonResources: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			useProviders(t, &fake{called: "first", refuse: of.refuse[0]}, &fake{called: "second", refuse: of.refuse[1]})
			before := Stats().Listeners
			l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
			counted := Stats().Listeners
			maps.DeleteFunc(counted, func(r Reason, n uint64) bool { return n == before[r] })
			for r := range counted {
				counted[r] -= before[r]
			}
			if !maps.Equal(counted, of.counted) {
				t.Errorf("%v are counted", counted)
			}
			if has := l.Providers(); !slices.Equal(has, of.has) || len(l.Unavailable()) != 2-len(has) {
				t.Errorf("it has %v, and lacks %v", has, l.Unavailable())
			}
			d, err := net.Dial("tcp", l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer d.Close()
			c, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if _, may := c.(*sanconn.Conn); may != (of.has != nil) || !may && InfoOf(c).Fallback != of.reason {
				t.Errorf("a %T, %v", c, InfoOf(c).Fallback)
			}
		})
	}
}
