// Package shm is the SAN service provider between processes of one host:
// session.Endpoints over memory that both processes map.
//
// A process that has accepted connections on a TCP port listens under a name for that port. Two
// processes share one link per name: a unix socket for set-up, the peer's pidfd, one doorbell each way,
// and a few sealed memory segments. A connection is a slot of a link: one byte ring each way, which
// carries the messages. Each end has made the half of a segment that it writes, and can only read the
// other half.
//
// Each end learns the peer's user from the kernel, by the credentials of the peer's messages. Which TCP
// connection an endpoint is for, and whether the peer has that connection's other end, is decided above
// this package, by notes of the session. Nothing that the peer can write is trusted: indexes are
// checked, lengths are copied before they are checked, and only sealed segments are mapped.
//
// A process that accepts calls Listen. A process that dials calls Names or Linked, and Dial for each
// name. Their errors are *session.Unavailable. All functions, and a Listener's methods, may be called
// concurrently. docs/PROTOCOL.md, "On shared memory", describes what the two processes share.
//
// The package never uses TCP, and knows nothing of the session protocol. It uses a file system only for
// /proc and for names in a directory (Config.Dir). Package san calls it on Linux; on other systems it
// has only its name, and no mechanism.
//
// It is exported for the library's other parts. Its API may change in any version
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

// MostNames is how many processes of one port and user a process has links with, and proposes to in one
// search. So a process that makes ever new names cannot cause more links.
const MostNames = 64

// ErrDirectory: Config.Dir does not exist, cannot be opened now, or may be changed by others than its
// owner and its group. The error that wraps it tells which.
var ErrDirectory = errors.New("shm: the directory for other network namespaces")

// Config tunes the provider. The zero value suits most callers.
type Config struct {
	// Dir is the absolute path of a directory for the names, in place of the network namespace. It must
	// belong to root or to this process's user, and be writable only by its owner and its group. The
	// peer's process may belong to any user; the caller decides what such a peer may do.
	Dir string

	// timeout bounds an attempt to connect. Default: 500 ms.
	timeout time.Duration

	// ringMax is the size in bytes to which each ring of a connection may grow. It is brought within
	// minRingMax and maxRingMax, the default.
	ringMax int
}

const (
	defaultTimeout = 500 * time.Millisecond
	minRingMax     = 256 << 10
	maxRingMax     = 4 << 20 // a stream is a tenth faster than with 1 MiB, and that is a tenth faster than with 512 KiB
)

func (c Config) withDefaults() Config {
	c.timeout = cmp.Or(c.timeout, defaultTimeout)
	c.ringMax = min(max(cmp.Or(c.ringMax, maxRingMax), minRingMax), maxRingMax) &^ 4095
	return c
}
