package interop

import (
	"context"
	"fmt"
	"maps"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sanconn/san"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/sanconn"
	"github.com/sanconn/san/test/hwsim"
)

// patience is how long a test waits for something that must happen: longer than anything takes on a busy
// machine with the race detector.
const patience = 2 * time.Minute

// A way is how a program's two ends are connected.
type way struct {
	name     string
	separate bool     // the server is in a process of its own
	env      []string // environment of that process
	listen   func() (net.Listener, error)
	dial     dialFunc
	// What carries each connection, by InfoOf, at either end. For TCP it includes the reason.
	dialed, accepted string
	moves            bool // only connections that live long enough; others stay on TCP
}

var ways = func() []way {
	switch device := testenv.Device(); device {
	case "":
	case hwsim.Lane:
		w := overVerbs(device)
		if os.Getenv(wayVar) == overVerbsApart {
			w.name, w.separate = overVerbsApart, true
		}
		return []way{w}
	default:
		return []way{overVerbs(device)}
	}
	const here = "127.0.0.1:0"
	bySAN := func() (net.Listener, error) {
		return (&san.ListenConfig{Policy: san.Require}).Listen(context.Background(), "tcp", here)
	}
	byAny := func() (net.Listener, error) { return san.Listen("tcp", here) }
	return []way{
		{
			name: "shm, two processes", separate: true,
			listen: bySAN, dial: (&san.Dialer{Policy: san.Require}).DialContext,
			dialed: "shm", accepted: "shm",
		},
		{
			name:   "shm, one process",
			listen: bySAN, dial: (&san.Dialer{Policy: san.Require}).DialContext,
			dialed: "shm", accepted: "shm",
		},
		{
			name: "from tcp to shm, two processes", separate: true,
			listen: byAny, dial: (&san.Dialer{Options: sanconn.Options{MoveAtOnce: true, AttemptTimeout: patience}}).DialContext,
			dialed: moved, accepted: moved, moves: true,
		},
		{
			name: "tcp, SAN switched off at the server", separate: true,
			env:    []string{"SAN_PROVIDERS=none"},
			listen: byAny, dial: new(san.Dialer).DialContext,
			dialed: byTCP(san.ReasonUnused), accepted: byTCP(san.ReasonDisabled),
		},
		{
			name:   "tcp, plain client",
			listen: byAny, dial: new(net.Dialer).DialContext,
			dialed: byTCP(san.ReasonNone), accepted: byTCP(san.ReasonPeerPlain),
		},
	}
}()

const overVerbsApart = "verbs, two processes"

// overVerbs connects one end of the guest's cable with the other, or uses the simulated device.
func overVerbs(device string) way {
	host := map[string]string{"rxe": "10.8.0.2", "siw": "10.8.1.2", hwsim.Lane: "127.0.0.1"}[device]
	options := sanconn.Options{AttemptTimeout: patience} // the guest is slow
	providers := []string{"verbs"}                       // because both ends are on one host, where shm would be preferred
	lc := &san.ListenConfig{Policy: san.Require, Providers: providers, Options: options}
	d := &san.Dialer{Policy: san.Require, Providers: providers, Options: options}
	return way{
		name:   "verbs",
		listen: func() (net.Listener, error) { return lc.Listen(context.Background(), "tcp", host+":0") },
		dial:   d.DialContext,
		dialed: "verbs", accepted: "verbs",
	}
}

// run runs the program this way.
func (w way) run(t *testing.T, p program) {
	late := time.AfterFunc(patience, func() { panic(t.Name() + ": takes too long") }) // a panic prints the stacks of all goroutines
	defer late.Stop()
	var address string
	var stop func() (accepted []string, err error)
	if w.separate {
		address, stop = w.serveElsewhere(t, p)
	} else {
		address, stop = w.serveHere(t, p)
	}
	var dialed record
	p.use(t, dialed.dialer(w.dial), address)
	accepted, err := stop()
	if err != nil {
		t.Errorf("the server: %v", err)
	}
	if w.moves && p.short {
		return
	}
	if p.exposes && (w.dialed == "shm" || w.dialed == "verbs") {
		wantSome(t, "accepted", accepted, mingled, moved)
		wanted := []string{mingled, moved}
		if p.short { // such a connection may have gone back to TCP, and ended, before the record looks
			wanted = append(wanted, byTCP(san.ReasonUnused))
		}
		wantSome(t, "dialed", dialed.carriers(), wanted...)
		return
	}
	w.want(t, "dialed", dialed.carriers(), w.dialed)
	w.want(t, "accepted", accepted, w.accepted)
}

// want checks that there were connections, and what has carried them: all of them, or some if
// connections move. These may have moved before the record looks for the first time.
func (w way) want(t *testing.T, which string, carriers []string, want string) {
	t.Helper()
	if w.moves {
		wantSome(t, which, carriers, want, "shm", mingled)
		return
	}
	wantCarriers(t, which, carriers, want)
}

// wantCarriers checks that connections were carried by all that want names, and by nothing else.
func wantCarriers(t *testing.T, which string, carriers []string, want ...string) {
	t.Helper()
	if !slices.Equal(carriers, want) {
		t.Errorf("%s connections by %q, want %q", which, carriers, want)
	}
}

// wantSome checks that some connections were carried by one of those that want names. Others may have
// ended before they moved, or have moved again.
func wantSome(t *testing.T, which string, carriers []string, want ...string) {
	t.Helper()
	if !slices.ContainsFunc(carriers, func(c string) bool { return slices.Contains(want, c) }) {
		t.Errorf("%s connections by %q, want one of %q among them", which, carriers, want)
	}
}

func (w way) serveHere(t *testing.T, p program) (address string, stop func() ([]string, error)) {
	l, err := w.listen()
	if err != nil {
		t.Fatal(err)
	}
	accepted := &record{}
	end := p.serve(accepted.listener(l))
	return l.Addr().String(), func() ([]string, error) {
		err := end()
		return accepted.carriers(), err
	}
}

// record has a program's connections, and what carried each when it was new.
type record struct {
	mu    sync.Mutex
	conns map[net.Conn]string
}

// How a record names connections that have changed their carrier.
const (
	moved   = "tcp, then a SAN"
	mingled = "a SAN, and tcp"
)

// byTCP is how a record names TCP with a reason.
func byTCP(why san.Reason) string { return fmt.Sprintf("tcp: %v", why) }

func (r *record) add(c net.Conn) {
	info := san.InfoOf(c)
	carrier := info.Provider
	if carrier == "tcp" {
		carrier = byTCP(info.Fallback)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.conns == nil {
		r.conns = make(map[net.Conn]string)
	}
	r.conns[c] = carrier
}

// carriers returns what has carried the connections, seen from their end.
func (r *record) carriers() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	seen := make(map[string]bool)
	for c, carrier := range r.conns {
		info := san.InfoOf(c)
		switch began := strings.HasPrefix(carrier, "tcp"); {
		case began && info.SANBytes > 0:
			carrier = moved
		case !began && info.TCPBytes > 0:
			carrier = mingled
		}
		seen[carrier] = true
	}
	return slices.Sorted(maps.Keys(seen))
}

// dialer returns a dial function whose connections are recorded.
func (r *record) dialer(dial dialFunc) dialFunc {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := dial(ctx, network, address)
		if err == nil {
			r.add(c)
		}
		return c, err
	}
}

// listener returns a listener whose connections are recorded. They are l's own connections, not wrapped.
func (r *record) listener(l net.Listener) net.Listener { return watched{l, r} }

type watched struct {
	net.Listener
	record *record
}

func (w watched) Accept() (net.Conn, error) {
	c, err := w.Listener.Accept()
	if err == nil {
		w.record.add(c)
	}
	return c, err
}
