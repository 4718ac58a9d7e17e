// Package shm is the SAN service provider between processes of one host:
// session.Endpoints over memory that both processes map.
//
// Two processes share one link per listener (and per RingMax of the dialer's Config): a
// unix socket for set-up, the peer's pidfd, one doorbell each way and a few sealed memory
// segments. A connection is a slot of a link: a byte ring each way, which carries the
// messages.
//
// A dialer asks the kernel which TCP listener a connect to the same address would
// reach, and accepts an answer only from that listener's user; the listener asks the same
// before it accepts. Nothing that the peer
// can write is trusted: indexes are checked, lengths are copied before they are
// checked, and segments are mapped only when sealed.
//
// The package never speaks TCP, never touches a file system, and knows nothing
// of the session protocol. Package san calls it; on systems other than Linux
// it reports that there is no such provider.
//
// It is exported to the library's other parts: versions keep nothing of it for programs
// (docs/COMPATIBILITY.md).
//
//	dial_linux.go, listen_linux.go,
//	accept_linux.go                        connecting; the steps of either end
//	answer_linux.go                        how a dial waits
//	diag_linux.go, rendezvous_linux.go     which listener TCP would reach; its name
//	diag_shared_linux.go                   one socket to ask that by, for all dials
//	succession_linux.go                    processes that share a TCP listener
//	ends_linux.go                          one connection between two addresses
//	address_linux.go, peer_linux.go        which addresses, and whose process
//	linkcache_linux.go, links_linux.go     one link per listener; all links of the process
//	link_linux.go, handshake_linux.go      a link and its parts; how it begins
//	control_*.go                           its control socket and the messages there
//	limits_linux.go, foreign_linux.go,
//	sockname_linux.go                      what peers can hold; descriptors that they pass
//	doorbell_linux.go, bell_linux.go       how the processes wake each other, and for what
//	attend_linux.go                        who waits at the doorbell
//	slots_linux.go                         places for connections
//	segment_linux.go, offer_linux.go       shared memory, and more of it
//	layout_linux.go                        what is where in it
//	reclaim_linux.go, budget_linux.go      memory that is given back
//	endpoint_linux.go, messages_linux.go   a connection; its messages
//	internal/ring                          a ring, without all of this
//	mechanisms_*.go                        what the kernel permits, for diagnosis
package shm

import (
	"time"

	"github.com/sanconn/san/session"
)

// Name is the provider's name in session.Limits.
const Name = "shm"

// Config tunes the provider. The zero value suits most callers.
type Config struct {
	// RingMax is the size in bytes up to which a ring may grow, for each direction
	// of each connection. The default and the maximum are 4 MiB, the minimum is
	// 256 KiB.
	RingMax int

	// Backlog is the number of connections that a listener holds for Accept. The
	// dialers of further ones are told that there is no room. The default is 128.
	Backlog int

	// Timeout bounds an attempt to connect. The default is 500 ms.
	Timeout time.Duration

	// Local allows addresses of this host other than loopback. It is off by
	// default because such addresses may be redirected elsewhere (IPVS keeps its
	// cluster addresses on a local interface).
	Local bool

	// TakeOver is for a listener whose TCP listener another process may serve still: it
	// waits for that one's end, rather than fail.
	TakeOver bool

	// V6Only makes a listener refuse IPv4, as its TCP listener does.
	V6Only bool

	// Begin, if not nil, is called by Dial with the endpoint before its peer has it, so
	// that a session's first message is there when the connection is accepted. Dial calls
	// end, which has to retire the endpoint, if it is not connected; a Dial may try several.
	Begin func(session.Endpoint) (end func())
}

const (
	defaultBacklog = 128
	defaultTimeout = 500 * time.Millisecond
	defaultRingMax = 4 << 20 // streams are a tenth faster than with 1 MiB, and those than with 512 KiB
	minRingMax     = 256 << 10
	maxRingMax     = 4 << 20
)

func (c Config) withDefaults() Config {
	if c.Backlog <= 0 {
		c.Backlog = defaultBacklog
	}
	if c.Timeout <= 0 {
		c.Timeout = defaultTimeout
	}
	if c.RingMax == 0 {
		c.RingMax = defaultRingMax
	}
	c.RingMax = min(max(c.RingMax, minRingMax), maxRingMax) &^ 4095
	return c
}
