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

// lane is a way to carry bytes. The same tests run on each.
type lane struct {
	name      string
	provider  string // by which all bytes go, but in the moving lane
	policy    Policy
	providers []string
	options   sanconn.Options
	host      string // listened on; "": 127.0.0.1

	// moving connections begin on TCP, and move to provider in the middle of their use.
	moving bool

	// spare: what it has of its own, the provider's tests have, too. A short run goes without.
	spare bool
}

// here is an address to listen on.
func (l lane) here() string { return net.JoinHostPort(cmp.Or(l.host, "127.0.0.1"), "0") }

var lanes = append(systemLanes[:len(systemLanes):len(systemLanes)], tcpLanes()...)

// tcpLanes are those on which nothing moves. In a guest they show nothing that they do not
// show elsewhere.
func tcpLanes() []lane {
	if testenv.Device() != "" {
		return nil
	}
	return []lane{tcpInConn, plainTCP}
}

// plainTCP has to pass as well: otherwise a test demands more than TCP gives.
var plainTCP = lane{name: "tcp", provider: providerTCP, policy: Never}

// tcpInConn are connections of this package that have not moved yet: no test uses one as much
// as it takes.
var tcpInConn = lane{name: "tcp in a Conn", provider: providerTCP, policy: Prefer}

// eachLane runs a test on every lane.
func eachLane(t *testing.T, test func(t *testing.T, l lane)) {
	for _, l := range lanes {
		if l.skipped() {
			continue
		}
		t.Run(l.name, func(t *testing.T) { test(t, l) })
	}
}

// skipped reports whether this run goes without the lane.
func (l lane) skipped() bool { return l.spare && testing.Short() }

func (l lane) dialer() *Dialer {
	return &Dialer{Policy: l.policy, Providers: l.providers, Options: l.options}
}

func (l lane) listen(t testing.TB, address string) *Listener {
	t.Helper()
	return mustListen(t, &ListenConfig{Policy: l.policy, Providers: l.providers, Options: l.options}, "tcp", address)
}

// begin makes a connection that was dialed what the lane says.
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

// usesOfLane are for how many bytes connections of the moving lane are used before they move:
// one, or as many as are in the middle of a large Write.
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

// carries checks by what a connection of the lane goes, as far as that is certain.
func (l lane) carries(t testing.TB, c net.Conn) {
	t.Helper()
	if !l.moving {
		wantProvider(t, c, l.provider)
	}
}

// pipe is a connection of the lane: the dialer's end and the acceptor's.
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

// sanPipe is pipe where it is known to be no connection of net's.
func (l lane) sanPipe(t testing.TB) (client, server *sanconn.Conn) {
	t.Helper()
	c, s := l.pipe(t)
	return c.(*sanconn.Conn), s.(*sanconn.Conn)
}
