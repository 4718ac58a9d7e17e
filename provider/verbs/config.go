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

// Config tunes listeners and connections. The zero value is what most callers
// want. The two ends of a connection need to agree only on IWARPOffset and WithoutCM.
type Config struct {
	// buffers is the number of receive buffers of a connection, bufferSize the size of each in
	// bytes, sendBuffer that of the memory that messages are sent from. Where RLIMIT_MEMLOCK is
	// low, all are reduced (memlock.go).
	buffers, bufferSize, sendBuffer int

	// Threshold is the size in bytes from which the peer reads a Write's own memory, if that
	// pays (session.Limits); negative: never. Default: 1 MiB.
	Threshold int

	// SharedDomain puts all connections of a device into one protection domain, so
	// that they share cached registrations. Where memory windows are used, once a probe of
	// the device has shown that they keep other peers out, exposed memory is still
	// accessible only to its own connection's peer; elsewhere any peer of the device could
	// access it by guessing keys (rule R2). Default: only the connections that use windows
	// from their beginning share one.
	SharedDomain bool

	// V6Only makes a listener's unspecified address "::" stand for IPv6 alone, as on
	// a socket with IPV6_V6ONLY.
	V6Only bool

	// These are as san.RDMA has them, with its units and defaults.
	IWARPOffset  int
	WithoutCM    bool
	TrafficClass uint8
	ServiceLevel uint8
	AckTimeout   uint8

	// Device is the RDMA device that a dial has to leave by, "": any. rdma_cm goes by the
	// local address alone; what else decides a socket's route (Route) it does not know.
	Device string

	// Subnets are the peers' addresses to connect to and to accept from. Default: all.
	// The host's packet filter does not see RDMA traffic.
	Subnets []netip.Prefix

	// Claim is the TCP connection that a dialed connection is to carry.
	Claim Claim

	// Admit decides about a request before anything is made for it, by the ends that its TCP
	// connection would have here, without zones: nil, ErrUnknown or ErrOther. It is called
	// concurrently, and must not block. Default: all are admitted.
	Admit func(local, remote netip.AddrPort, proof uint16) error

	// Disable switches features off. This package heeds FeatureRegCache, FeatureWindows,
	// FeatureRelaxed, FeatureRDMARead and FeatureRDMAWrite.
	Disable session.Feature

	// control provides the buffers for messages. Default: the process's
	// controlArena; tests use others.
	control *regcache.Arena
}

const (
	// restBytes is what messages may take of a connection that rests.
	restBytes = 64 << 10

	defaultBuffers     = 40
	defaultBufferSize  = 1 << 10
	defaultSendBuffer  = restBytes - defaultBuffers*defaultBufferSize - controlSlots*session.MaxControl - 2*maxInline
	defaultIWARPOffset = 10000

	// defaultThreshold: the line is idle in an offer's two round trips. On the simulated device
	// (2 µs, 50 GB/s) Writes of 512 KiB move 20 to 24 GB/s by offers and 33 by the send buffer, where
	// that copies at as much. From here on it is for the host's own copies to decide (costs.go).
	defaultThreshold = 1 << 20

	// repostBatch receive buffers are posted again together, as posting costs a system call
	// on some devices. They come on top of the window, so that the session's credits are always
	// covered: all but one of them may wait to be posted, and one was dropped since the last Poll.
	repostBatch = 6
	// ownMessages is how many of the provider's own messages may be under way besides
	// the session's: iWARP's first and the disconnect message.
	ownMessages = 2

	minBuffers = session.MinWindow + repostBatch + ownMessages
	maxBuffers = 1 << 14

	// maxReads and maxWrites bound what an endpoint has posted: enough to cover the
	// latency, with the session's chunks of 256 KiB and with the short pieces of a send buffer
	// that there is credit for; few enough that cancelling is quick.
	maxReads  = 8
	maxWrites = 16
	// maxWindows bounds an endpoint's memory windows. A session has at most three exposures:
	// its inbox, one that is being revoked, an offer.
	maxWindows = 4
	// maxSends bounds the messages that are posted at a time: all that there is credit
	// for, and those that have left but are not known to have (signalEvery). With it the
	// queues of mlx5 fill their powers of two (lockedByQueues).
	maxSends = 36
	// inboxFrom is the size in bytes of a Write from which it goes through the peer's
	// inbox: three messages cost more than an RDMA write with its Fill.
	inboxFrom = 2 << 10
	// inboxAfter: opening an inbox costs about as much as sending that many bytes in
	// messages.
	inboxAfter = 32 << 10
	// maxRDMA bounds one Read or Write in bytes, beside the device: what is posted cannot be
	// recalled, so this bounds how long a cancelled transfer goes on.
	maxRDMA = 1 << 20
	// maxExpose bounds one exposure in bytes: registering it and asking the peer cost little
	// in comparison, and it fits an RLIMIT_MEMLOCK that is not tiny (exposeLimit).
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

// iwarpPort is the RDMA port that belongs to a TCP port on iWARP, 0 if iWARP is
// not used. Every TCP port from 1024 on has its own.
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

// admits returns why a request is refused that came to an address of a listener's TCP port.
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

// How long a connection bears a network that delivers nothing. The figures are those of
// InfiniBand (IBTA 9.7.6.1.3) and RoCE; on iWARP TCP retransmits.

// Variables, as tests are to find the dead at once, and receives that are missing.
var (
	// defaultAckTimeout is 4.096 µs × 2¹⁹ = 2.1 s to an acknowledgement; a device may take up to
	// four times as long. With retryCount, a connection outlives 17 to 70 s without a path,
	// which is what a subnet manager or a bond takes to find another. TCP waits for minutes.
	// A peer that is dead while nothing is under way is found by the session's keepalive.
	defaultAckTimeout uint8 = 19

	// rnrRetry is how often a message is sent again for which no receive was posted. By the
	// session's credits one always is; but a device may be late to see what was posted.
	rnrRetry uint8 = 6
)

const (
	// rnrTimer is the code of the time between such attempts, 0.64 ms (IBTA 9.7.5.2.8):
	// rdma_cm leaves it at 0, which means 655 ms.
	rnrTimer = 12

	// The most that the fields take.
	retryCount      = 7
	maxAckTimeout   = 31
	maxServiceLevel = 15
)
