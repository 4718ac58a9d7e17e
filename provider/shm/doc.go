// Package shm is the SAN service provider between processes of one host:
// session.Endpoints over memory that both processes map.
//
// A process that has accepted connections to a TCP port listens under a name of that port. Two
// processes share one link per name: a unix socket for set-up, the peer's pidfd, one doorbell each
// way and a few sealed memory segments. A connection is a slot of a link: a byte ring each way,
// which carries the messages. Of a segment each end has made the half that it writes, and can but
// read the other's.
//
// Each end knows by the kernel whose process the other is, by the credentials of its messages.
// Which TCP connection an endpoint is for, and whether the peer is at the other end of that, the
// session's notes tell, above this package. Nothing that the peer can write is trusted: indexes
// are checked, lengths are copied before they are checked, and segments are mapped only when
// sealed.
//
// A process that accepts calls Listen; one that dials calls Names or Linked, and Dial for each name.
// Their errors are *session.Unavailable. All functions, and a Listener's methods, may be called
// concurrently. docs/PROTOCOL.md, "On shared memory", has what the two processes share.
//
// The package never uses TCP, knows nothing of the session protocol, and touches a file system
// only to read what the kernel shows there and for names in a directory (Config.Dir).
// Package san calls it on Linux; on other systems it has its name, and no mechanism.
//
// It is exported to the library's other parts: versions keep nothing of it for programs
// (docs/COMPATIBILITY.md).
//
//	dial_linux.go, listen_linux.go         connecting
//	name_linux.go, peer_linux.go           the names of a port; whose process it is
//	directory_linux.go                     names in a directory, for other network namespaces
//	linkcache_linux.go                     one link per name
//	link_linux.go, handshake_linux.go      a link and its parts; how it begins
//	lifetime_linux.go                      who uses it, and when it ends
//	control_*.go                           its control socket and the messages there
//	limits_linux.go, closers_linux.go      what peers can hold; closing what they have passed
//	doorbell_linux.go, bell_linux.go       how the processes wake each other, and for what
//	waiters_linux.go                       who waits at the doorbell
//	slots_linux.go                         places for connections
//	segment_linux.go, extend_linux.go      shared memory, and more of it
//	layout_linux.go                        what is where in it
//	reclaim_linux.go, budget_linux.go      memory that is given back; how much there may be
//	kept_linux.go                          … and that peers keep
//	endpoint_linux.go, messages_linux.go   a connection; its messages
//	internal/ring                          a ring, without all of this
//	mechanisms_*.go                        what the kernel permits, for diagnosis
package shm

import (
	"cmp"
	"errors"
	"time"
)

// Name is the provider's name in session.Limits.
const Name = "shm"

// MostNames is how many processes of one port and user a process has links with, and asks in a
// search: one that makes ever new names has it hold no more.
const MostNames = 64

// ErrDirectory: Config.Dir is not there, cannot be opened now, or others than its owner and its group
// could put names into it. What wraps it says which.
var ErrDirectory = errors.New("shm: the directory for other network namespaces")

// Config tunes the provider. The zero value suits most callers.
type Config struct {
	// Dir is a directory in which the names are, rather than in the network namespace: an
	// absolute path. It has to be root's or this process's user's, and nobody but its owner
	// and its group may write to it. The peer may be any user's, and what it is allowed to
	// is up to the caller.
	Dir string

	// timeout bounds an attempt to connect. The default is 500 ms.
	timeout time.Duration

	// ringMax is the size in bytes up to which a ring may grow, for each direction of each
	// connection: at least minRingMax, at most maxRingMax, which is the default.
	ringMax int
}

const (
	defaultTimeout = 500 * time.Millisecond
	minRingMax     = 256 << 10
	maxRingMax     = 4 << 20 // streams are a tenth faster than with 1 MiB, and those than with 512 KiB
)

func (c Config) withDefaults() Config {
	c.timeout = cmp.Or(c.timeout, defaultTimeout)
	c.ringMax = min(max(cmp.Or(c.ringMax, maxRingMax), minRingMax), maxRingMax) &^ 4095
	return c
}
