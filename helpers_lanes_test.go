package san

import (
	"cmp"
	"net"
	"testing"

	"github.com/sanconn/san/sanconn"
)

// lane is a way to carry bytes. The same tests run on each.
type lane struct {
	name     string
	provider string
	policy   Policy
	options  sanconn.Options
	host     string // listened on; "": 127.0.0.1
}

// here is an address to listen on.
func (l lane) here() string { return net.JoinHostPort(cmp.Or(l.host, "127.0.0.1"), "0") }

var lanes = append(systemLanes[:len(systemLanes):len(systemLanes)], plainTCP)

// plainTCP has to pass as well: otherwise a test demands more than TCP gives.
var plainTCP = lane{name: "tcp", provider: providerTCP, policy: Never}

// eachLane runs a test on every lane.
func eachLane(t *testing.T, test func(t *testing.T, l lane)) {
	for _, l := range lanes {
		t.Run(l.name, func(t *testing.T) { test(t, l) })
	}
}

func (l lane) dialer() *Dialer {
	return &Dialer{Policy: l.policy, Options: l.options}
}

func (l lane) listen(t testing.TB, address string) *Listener {
	t.Helper()
	return mustListen(t, &ListenConfig{Policy: l.policy, Options: l.options}, "tcp", address)
}

// pipe is a connection of the lane: the dialer's end and the acceptor's.
func (l lane) pipe(t testing.TB) (client, server net.Conn) {
	t.Helper()
	ln := l.listen(t, l.here())
	client = mustDial(t, l.dialer(), ln.Addr().String())
	server = mustAccept(t, ln)
	wantProvider(t, client, l.provider)
	wantProvider(t, server, l.provider)
	return client, server
}

// sanPipe is pipe where it is known to be a SAN.
func (l lane) sanPipe(t testing.TB) (client, server *sanconn.Conn) {
	t.Helper()
	c, s := l.pipe(t)
	return c.(*sanconn.Conn), s.(*sanconn.Conn)
}
