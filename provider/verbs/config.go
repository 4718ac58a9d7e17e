package verbs

import (
	"cmp"
	"errors"
	"net/netip"
	"slices"

	"github.com/sanconn/san/regcache"
	"github.com/sanconn/san/session"
)

// Name is the provider's name.
const Name = "verbs"

// Config tunes listeners and connections. The zero value suits most callers. The two ends of a
// connection must agree on IWARPOffset and WithoutCM only.
type Config struct {
	// buffers is the number of a connection's receive buffers, bufferSize the size of each in bytes,
	// and sendBuffer the size in bytes of the memory that messages are sent from. All are reduced if
	// RLIMIT_MEMLOCK is low (memlock.go).
	buffers, bufferSize, sendBuffer int

	// Threshold is the size in bytes from which the peer reads a Write's own memory, if that pays
	// (session.Limits); negative: never. Default: 1 MiB.
	Threshold int

	// SharedDomain puts all connections of a device into one protection domain, so that they share
	// cached registrations. Where a probe has shown that the device's memory windows keep other peers
	// out, exposed memory is still accessible only to the peer of its own connection; elsewhere any peer
	// of the device could access it by guessing keys (rule R2). Default: only connections that use
	// windows from their beginning share a domain.
	SharedDomain bool

	// V6Only makes a listener's unspecified address "::" stand for IPv6 only, like IPV6_V6ONLY on a
	// socket.
	V6Only bool

	// The fields of san.RDMA with the same names, which has their units and defaults.
	IWARPOffset  int
	WithoutCM    bool
	TrafficClass uint8
	ServiceLevel uint8
	AckTimeout   uint8

	// Device is the RDMA device by which a dial has to leave; "": any. rdma_cm decides by the local
	// address only, and does not know what else decides a socket's route (Route).
	Device string

	// Subnets are the addresses of peers to connect to and to accept from. Default: all. The host's
	// packet filter does not see RDMA traffic.
	Subnets []netip.Prefix

	// Claim is the TCP connection that is to move to the dialed connection.
	Claim Claim

	// Admit decides about a request before any resource is made for it, by the ends of the request's
	// TCP connection at this host, without zones. It returns nil, ErrUnknown or ErrOther. It is called
	// concurrently, and must not block. Default: all are admitted.
	Admit func(local, remote netip.AddrPort, proof uint16) error

	// Disable switches features off. This package uses FeatureRegCache, FeatureWindows, FeatureRelaxed,
	// FeatureRDMARead and FeatureRDMAWrite.
	Disable session.Feature

	// control provides the buffers for messages. Default: the process's controlArena; tests use others.
	control *regcache.Arena
}

const (
	// restBytes is how much memory the messages of an idle connection may take.
	restBytes = 64 << 10

	defaultBuffers     = 40
	defaultBufferSize  = 1 << 10
	defaultSendBuffer  = restBytes - defaultBuffers*defaultBufferSize - controlSlots*session.MaxControl - 2*maxInline
	defaultIWARPOffset = 10000

	// defaultThreshold: the line is idle during an offer's two round trips. On the simulated device (2
	// µs, 50 GB/s) Writes of 512 KiB reach 20 to 24 GB/s by offers and 33 by the send buffer, if the
	// host copies as fast. From this size on the speed of the host's copies decides (costs.go).
	defaultThreshold = 1 << 20

	// repostBatch receive buffers are posted again together, because posting costs a system call on
	// some devices. They come on top of the window, so that receives for the session's credits are
	// always posted: at most repostBatch-1 buffers wait to be posted, and one was dropped since the
	// last Poll.
	repostBatch = 6
	// ownMessages is how many messages of the provider's own may be in flight beside the session's:
	// iWARP's first message and the disconnect message.
	ownMessages = 2

	minBuffers = session.MinWindow + repostBatch + ownMessages
	maxBuffers = 1 << 14

	// maxReads and maxWrites bound the posted transfers of an endpoint: enough to cover the latency,
	// with the session's chunks of 256 KiB and with the short pieces of a send buffer for which there
	// is credit; few enough for a fast cancel.
	maxReads  = 8
	maxWrites = 16
	// maxWindows bounds an endpoint's memory windows. A session has at most three exposures: its inbox,
	// one that is being revoked, and an offer.
	maxWindows = 4
	// maxSends bounds the posted messages: all for which there is credit, and those that have left
	// without a completion that shows it (signalEvery). With this number mlx5's queues fill their
	// powers of two (lockedByQueues).
	maxSends = 36
	// inboxFrom is the size in bytes from which a Write goes through the peer's inbox: three messages
	// cost more than an RDMA write with its Fill.
	inboxFrom = 2 << 10
	// inboxAfter: opening an inbox costs about as much as sending that many bytes in messages.
	inboxAfter = 32 << 10
	// maxRDMA bounds one Read or Write in bytes, beside the device's own bound. A posted transfer
	// cannot be recalled, so this bounds how long a cancelled one goes on.
	maxRDMA = 1 << 20
	// maxExpose bounds one exposure in bytes. Registering so much and notifying the peer cost little in
	// comparison, and it fits an RLIMIT_MEMLOCK that is not tiny (exposeLimit).
	maxExpose = 16 << 20
)

func (c Config) withDefaults() Config {
	c.buffers = min(max(cmp.Or(c.buffers, defaultBuffers), minBuffers), maxBuffers)
	c.bufferSize = max(cmp.Or(c.bufferSize, defaultBufferSize), session.MaxControl)
	c.sendBuffer = max(cmp.Or(c.sendBuffer, defaultSendBuffer), 4*c.bufferSize) &^ (cacheLine - 1)
	c.Threshold = cmp.Or(c.Threshold, defaultThreshold)
	c.IWARPOffset = cmp.Or(c.IWARPOffset, defaultIWARPOffset)
	c.AckTimeout = min(cmp.Or(c.AckTimeout, defaultAckTimeout), maxAckTimeout)
	c.ServiceLevel = min(c.ServiceLevel, maxServiceLevel)
	if c.control == nil {
		c.control = controlArena()
	}
	return c
}

// iwarpPort returns the RDMA port that belongs to a TCP port on iWARP, or 0 if iWARP is not used. Each
// TCP port from 1024 on has a port of its own.
func (c Config) iwarpPort(port uint16) uint16 {
	const low, span = 1024, 1<<16 - 1024
	if c.IWARPOffset < 0 || port == 0 {
		return 0
	}
	at := (int(port) - low + c.IWARPOffset) % span
	if at < 0 {
		at += span
	}
	return uint16(low + at)
}

// admits returns why a request to one of a listener's addresses is refused, or nil.
func (c Config) admits(p privateData, local, remote netip.Addr, port uint16) error {
	switch {
	case p.Version != protocolVersion:
		return p.err()
	case !c.allows(remote):
		return errForeignAddress
	case c.Admit == nil:
		return nil
	}
	plain := func(a netip.Addr) netip.Addr { return a.Unmap().WithZone("") }
	return c.Admit(netip.AddrPortFrom(plain(local), port), netip.AddrPortFrom(plain(remote), p.Claim.Port), p.Claim.Proof)
}

var errForeignAddress = errors.New("verbs: the request is from, or names, an address that is not served")

// allows reports whether a peer's address is within Subnets.
func (c Config) allows(a netip.Addr) bool {
	a = a.Unmap().WithZone("")
	return len(c.Subnets) == 0 || slices.ContainsFunc(c.Subnets, func(p netip.Prefix) bool { return p.Contains(a) })
}

// How long a connection survives on a network that delivers nothing. The numbers are those of
// InfiniBand (IBTA 9.7.6.1.3) and RoCE; on iWARP TCP retransmits.

// They are variables, so that tests find dead peers and missing receives at once.
var (
	// defaultAckTimeout is 4.096 µs × 2¹⁹ = 2.1 s until an acknowledgement; a device may take up to
	// four times as long. With retryCount, a connection survives 17 to 70 s without a path, the time in
	// which a subnet manager or a bond finds another one. TCP waits for minutes. The session's
	// keepalive finds a peer that dies while nothing is in flight.
	defaultAckTimeout uint8 = 19

	// rnrRetry is how often a message is sent again for which no receive was posted. The session's
	// credits ensure that one is posted, but a device may see it late.
	rnrRetry uint8 = 6
)

const (
	// rnrTimer is the code for the time between these attempts, 0.64 ms (IBTA 9.7.5.2.8). rdma_cm
	// leaves it at 0, which means 655 ms.
	rnrTimer = 12

	// The largest values of these fields.
	retryCount      = 7
	maxAckTimeout   = 31
	maxServiceLevel = 15
)
