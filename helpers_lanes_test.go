package san

import (
	"cmp"
	"math/rand/v2"
	"net"
	"sync"
	"testing"

	"github.com/sanconn/san/internal/newconn"
	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/sanconn"
)

// lane is a way to carry bytes. The same tests run on each lane.
type lane struct {
	name      string
	provider  string // what carries all bytes, except in the moving lane
	policy    Policy
	providers []string
	options   sanconn.Options
	host      string // where tests listen; "": 127.0.0.1

	// moving connections begin on TCP, and move to provider in the middle of their use.
	moving bool

	// spare: the provider's tests cover what is special about the lane, so a short run leaves it out.
	spare bool
}

// here returns an address to listen on.
func (l lane) here() string { return net.JoinHostPort(cmp.Or(l.host, "127.0.0.1"), "0") }

var lanes = append(systemLanes[:len(systemLanes):len(systemLanes)], tcpLanes()...)

// tcpLanes are the lanes on which nothing moves. They are not run in a guest, where they would show
// nothing new.
func tcpLanes() []lane {
	if testenv.Device() != "" {
		return nil
	}
	return []lane{tcpInConn, plainTCP}
}

// plainTCP is net's own TCP. A test that fails on it demands more than TCP gives.
var plainTCP = lane{name: "tcp", provider: providerTCP, policy: Never}

// tcpInConn are connections of this package that have not moved. No test uses one so much that it would.
var tcpInConn = lane{name: "tcp in a Conn", provider: providerTCP, policy: Prefer}

// eachLane runs a test on each lane.
func eachLane(t *testing.T, test func(t *testing.T, l lane)) {
	for _, l := range lanes {
		if l.skipped() {
			continue
		}
		t.Run(l.name, func(t *testing.T) { test(t, l) })
	}
}

// skipped reports whether this run leaves the lane out.
func (l lane) skipped() bool { return l.spare && testing.Short() }

func (l lane) dialer() *Dialer {
	return &Dialer{Policy: l.policy, Providers: l.providers, Options: l.options}
}

func (l lane) listen(t testing.TB, address string) *Listener {
	t.Helper()
	return mustListen(t, &ListenConfig{Policy: l.policy, Providers: l.providers, Options: l.options}, "tcp", address)
}

// begin sets after how much use a dialed connection moves: on the moving lane soon, on tcpInConn never.
func (l lane) begin(c net.Conn) {
	sc, ok := c.(*sanconn.Conn)
	switch {
	case !ok:
	case l.moving:
		newconn.HandleOf(sc).CallUse(usesOfLane.next())
	case l.policy == Prefer:
		newconn.HandleOf(sc).CallUse(newconn.Never)
	}
}

// usesOfLane are the numbers of bytes after which connections of the moving lane move: from one byte to
// so many that it happens in the middle of a large Write.
var usesOfLane = uses{rnd: rand.New(rand.NewPCG(1, 1))}

type uses struct {
	mu  sync.Mutex // guards rnd
	rnd *rand.Rand
}

func (u *uses) next() int64 {
	u.mu.Lock()
	defer u.mu.Unlock()
	return 1 << u.rnd.IntN(20)
}

// carries checks what carries a connection of the lane, if that is certain.
func (l lane) carries(t testing.TB, c net.Conn) {
	t.Helper()
	if !l.moving {
		wantProvider(t, c, l.provider)
	}
}

// pipe returns the dialer's and the acceptor's end of a new connection of the lane.
func (l lane) pipe(t testing.TB) (client, server net.Conn) {
	t.Helper()
	ln := l.listen(t, l.here())
	client = mustDial(t, l.dialer(), ln.Addr().String())
	server = mustAccept(t, ln)
	l.carries(t, client)
	l.carries(t, server)
	l.begin(client)
	return client, server
}

// sanPipe is pipe for lanes whose connections are never net's own.
func (l lane) sanPipe(t testing.TB) (client, server *sanconn.Conn) {
	t.Helper()
	c, s := l.pipe(t)
	return c.(*sanconn.Conn), s.(*sanconn.Conn)
}
