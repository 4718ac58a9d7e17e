package verbs

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/sanconn/san/internal/testenv"
)

// The guest's pairs of interfaces (test/guest): what is sent from one end to the
// other crosses a virtual cable.
var laneAddrs = map[string][2]string{
	"rxe":  {"10.8.0.1", "10.8.0.2"},
	"siw":  {"10.8.1.1", "10.8.1.2"},
	"rxe6": {"fd08::1", "fd08::2"},
	"siw6": {"fd08:1::1", "fd08:1::2"},
}

func cable(t testing.TB) (dialer, listener netip.Addr) {
	t.Helper()
	a := laneAddrs[testenv.NeedDevice(t)]
	return netip.MustParseAddr(a[0]), netip.MustParseAddr(a[1])
}

// patience bounds every wait; it is no target.
const patience = 20 * time.Second

func patient(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// listen listens on the lane's device.
func listen(t testing.TB, cfg Config) *Listener {
	t.Helper()
	_, at := cable(t)
	l, err := Listen(netip.AddrPortFrom(at, freePort()), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

var lastPort = uint16(20000)

// freePort is a port that no test has used: the connection manager keeps them
// for a while.
func freePort() uint16 {
	lastPort++
	return lastPort
}

// connect makes a connection between the ends of the lane's cable.
func connect(l *Listener, cfg Config) (dialed, accepted *Endpoint, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	dialed, err = Dial(ctx, netip.AddrPort{}, l.Addrs()[0], cfg)
	if err != nil {
		return nil, nil, err
	}
	accepted, err = accept(l)
	if err != nil {
		dialed.discard()
		return nil, nil, err
	}
	return dialed, accepted, nil
}

// accept waits for a connection, within patience.
func accept(l *Listener) (*Endpoint, error) {
	type result struct {
		e   *Endpoint
		err error
	}
	got := make(chan result, 1)
	go func() {
		e, err := l.Accept()
		got <- result{e, err}
	}()
	select {
	case r := <-got:
		return r.e, r.err
	case <-time.After(patience):
		return nil, errors.New("the connection that was dialed is not handed out")
	}
}

// discard ends a connection and what the endpoint holds.
func (e *Endpoint) discard() {
	e.Abort()
	e.Retire()
}
