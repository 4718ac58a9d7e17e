package regcache

// Access is the set of rights of a registration. Reading by the own device is
// always included.
type Access uint8

const (
	// LocalWrite lets the own device write: receives, and the sink of an
	// RDMA read.
	LocalWrite Access = 1 << iota
	// RemoteRead and RemoteWrite let a peer read or write. A registration
	// with either is never shared and never cached: see Cache.Acquire.
	RemoteRead
	RemoteWrite
	// BindWindow allows memory windows to be bound on top. By itself it gives
	// no peer anything.
	BindWindow
)

// LocalRead is the empty set: only the own device may read.
const LocalRead Access = 0

const remoteAccess = RemoteRead | RemoteWrite

func (a Access) String() string {
	text := "local read"
	for i, right := range [...]string{"local write", "remote read", "remote write", "bind"} {
		if a&(1<<i) != 0 {
			text += "+" + right
		}
	}
	return text
}

// MR is a device's registration of a range of memory: a memory region.
type MR struct {
	LKey uint32 // names the region in the device's own work requests
	RKey uint32 // names it in a peer's
	Ref  any    // the provider's own object; the cache only passes it on
}

// A Registrar registers memory with one protection domain of one device.
// Its methods are called concurrently, and never with a lock held.
type Registrar interface {
	// Register pins [addr, addr+n) and lets the device use it with the rights of access.
	// The memory stays reachable and mapped during the call. An error that
	// matches syscall.ENOMEM makes the cache give back what it does not use
	// and call Register once more.
	Register(addr uintptr, n int, access Access) (MR, error)

	// Deregister ends a registration. When it has returned, with an error too, the
	// cache does not use mr any more.
	Deregister(mr MR) error
}
