package shm

import (
	"math"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/provider/shm/internal/quota"
)

// limits are how much of this process other processes can hold through links, all together. The
// processes of one user can hold half of it at most, and no more than is left free (package quota).
// Beyond that, dialers get codeResources.
type limits struct {
	// connections that are accepted and not closed yet; for links of a directory, slots that ever had
	// one. It is RLIMIT_NOFILE, which also bounds TCP connections, and at most 2^20.
	connections int64

	// descriptors is half of RLIMIT_NOFILE, at most 8192. Each link counts as linkDescriptors. So does
	// a link that this process has dialed, as a peer that never reads keeps it open, unless the peer is
	// of this process's user. A final half (newHalf) counts as one.
	descriptors int64

	// addressSpace is, in bytes, half of RLIMIT_AS, at most 16 TiB, or 2 GiB if addresses have 32 bits.
	// It includes what this process maps in order to dial.
	addressSpace int64

	// mappings is the number of mapped halves of segments: a quarter of what the kernel allows a
	// process by default (vm.max_map_count). At the kernel's limit the process's next allocation
	// fails. It includes what this process maps in order to dial.
	mappings int64
}

const (
	mostConnections = 1 << 20
	mostDescriptors = 8 << 10
	mostMappings    = 16 << 10
	mostSpace64     = 16 << 40 // of 47 bits
	mostSpace32     = 2 << 30

	// linkDescriptors is what a link counts as. It has a socket, two doorbells and a pidfd. During the
	// handshake it also has the other end of its own doorbell, the two descriptors by which it makes
	// its half, and the peer's half; and later the two that a message can bring.
	linkDescriptors = 8
)

// startLimits are the limits of this process, by its resource limits when it started.
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

// rlimit returns a resource limit, or the largest number if there is none.
func rlimit(resource int) uint64 {
	var lim unix.Rlimit
	if unix.Getrlimit(resource, &lim) != nil {
		return math.MaxUint64
	}
	return lim.Cur
}

// holdings is what is held of this process, and by whom.
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

// An account is the holder to whom something is charged: a user whose processes connect to this one, or
// this process itself for what it needs in order to dial.
type account struct {
	*holdings
	user quota.Holder
}

func accountOf(user uint32) account { return account{held, quota.Holder(user)} }

func ownAccount() account { return account{held, quota.Own} }
