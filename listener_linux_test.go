package san

import (
	"context"
	"errors"
	"io"
	"net"
	"syscall"
	"testing"
	"time"
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
	_, err := lc.Listen(context.Background(), "tcp", "127.0.0.1:0")
	var why *Unavailable
	if !errors.As(err, &why) || why.Reason != ReasonNoProvider {
		t.Errorf("error %v", err)
	}
	wantOpError(t, err, "listen", why)
}

func TestAcceptTakesBothKindsAndTellsThemApart(t *testing.T) {
	useFake(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	for range 5 {
		c := mustDial(t, &Dialer{}, l.Addr().String())
		wantProvider(t, c, fakeName)
		s := mustAccept(t, l)
		wantProvider(t, s, fakeName)
		send(t, s, c, "over the SAN")

		p := mustDial(t, &Dialer{Policy: Never}, l.Addr().String())
		ps := mustAccept(t, l)
		wantFallback(t, ps, ReasonPeerPlain)
		send(t, p, ps, "over TCP")
	}
}

// A plain client of a server that writes first, or second, sees no byte that is
// not the application's.
func TestPlainClientSeesTheApplicationAlone(t *testing.T) {
	useFake(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	p, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	s := mustAccept(t, l)
	send(t, s, p, "220 ready\r\n")
	send(t, p, s, "EHLO\r\n")
	s.Close()
	if rest, err := io.ReadAll(p); len(rest) != 0 || err != nil {
		t.Errorf("%d more bytes: %q, %v", len(rest), rest, err)
	}
}

// A dial succeeds before anybody calls Accept, and what it writes is kept until then.
func TestDialDoesNotWaitForAccept(t *testing.T) {
	useFake(t)
	l := mustListen(t, &ListenConfig{}, "tcp", "127.0.0.1:0")
	c := mustDial(t, &Dialer{Policy: Require}, l.Addr().String())
	if _, err := io.WriteString(c, "early"); err != nil {
		t.Fatal(err)
	}
	c.Close()
	got, err := io.ReadAll(mustAccept(t, l))
	if string(got) != "early" || err != nil {
		t.Errorf("read %q, %v", got, err)
	}
}

func TestListenerRequireResetsPlainTCP(t *testing.T) {
	useFake(t)
	l := mustListen(t, &ListenConfig{Policy: Require}, "tcp", "127.0.0.1:0")
	accepted := make(chan net.Conn)
	go func() {
		c, _ := l.Accept()
		accepted <- c
	}()
	p, err := net.Dial("tcp", l.Addr().String())
	if err == nil { // else the reset was faster than the dialer
		defer p.Close()
		p.SetDeadline(time.Now().Add(testTimeout))
		_, err = p.Read(make([]byte, 1))
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a plain client read %v, want a reset", err)
	}
	mustDial(t, &Dialer{Policy: Require}, l.Addr().String())
	c := <-accepted
	wantProvider(t, c, fakeName)
	c.Close()
}
