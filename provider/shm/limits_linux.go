package shm

import (
	"math"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/provider/shm/internal/quota"
)

// limits are how much of this process the processes can hold that it has links with, all
// together; those of one user can hold half of it at most, and no more than the others have
// left free (package quota). Beyond it, dialers are told that there is no room.
type limits struct {
	// connections accepted and not closed yet; in a directory, slots that had one.
	// It is RLIMIT_NOFILE, which bounds those of TCP, and at most 2^20.
	connections int64

	// descriptors is half of RLIMIT_NOFILE, at most 8192. Each link counts as eight of
	// them: it has four, and for moments as many that its peer has passed. One that this process
	// has dialed does, too, as a peer that never reads keeps it, unless that is its own user's.
	// A final half (newHalf) counts as one.
	descriptors int64

	// addressSpace, in bytes, is half of RLIMIT_AS, at most 16 TiB; 2 GiB where addresses
	// have 32 bits. What this process maps to dial counts, too.
	addressSpace int64

	// mappings is the number of halves of segments that are mapped: a quarter of what the kernel
	// allows a process by default (vm.max_map_count), at whose end its next allocation
	// fails. What this process maps to dial counts, too.
	mappings int64
}

const (
	mostConnections = 1 << 20
	mostDescriptors = 8 << 10
	mostMappings    = 16 << 10
	mostSpace64     = 16 << 40 // of 47 bits
	mostSpace32     = 2 << 30

	// linkDescriptors is what a link counts for. It has its socket, two doorbells and a
	// pidfd; during the handshake also the other end of its doorbell, two that are made of a
	// half, and the peer's; and later the two descriptors that a message can bring.
	linkDescriptors = 8
)

// startLimits are the limits of this process, by its resource limits at the start.
var startLimits = limitsFor(rlimit(unix.RLIMIT_NOFILE), rlimit(unix.RLIMIT_AS))

// limitsFor derives the limits from RLIMIT_NOFILE and RLIMIT_AS.
func limitsFor(files, space uint64) limits {
	mostSpace := uint64(mostSpace64)
	if math.MaxInt == math.MaxInt32 {
		mostSpace = mostSpace32
	}
	return limits{
		connections:  int64(min(files, mostConnections)),
		descriptors:  int64(min(files/2, mostDescriptors)),
		addressSpace: int64(min(space/2, mostSpace)),
		mappings:     mostMappings,
	}
}

// rlimit returns a resource limit; the largest number if there is none.
func rlimit(resource int) uint64 {
	var lim unix.Rlimit
	if unix.Getrlimit(resource, &lim) != nil {
		return math.MaxUint64
	}
	return lim.Cur
}

// holdings is who holds what of this process.
type holdings struct {
	connections, descriptors, space, mappings *quota.Pool
	closers                                   closers
}

func newHoldings(l limits) *holdings {
	return &holdings{
		connections: quota.New(l.connections),
		descriptors: quota.New(l.descriptors),
		space:       quota.New(l.addressSpace),
		mappings:    quota.New(l.mappings),
		closers:     closers{users: make(map[quota.Holder]*userClosers)},
	}
}

// held is what is held of this process. Tests replace it.
var held = newHoldings(startLimits)

// An account is whom something is charged to: a user whose processes connect to this one,
// or this process itself for what it needs to dial.
type account struct {
	*holdings
	user quota.Holder
}

func accountOf(user uint32) account { return account{held, quota.Holder(user)} }

func ownAccount() account { return account{held, quota.Own} }
