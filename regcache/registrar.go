package regcache

// Access is the set of rights of a registration. The device that it is registered with may always read.
type Access uint8

const (
	// LocalWrite lets that device write: for receives, and for the memory that an RDMA read goes to.
	LocalWrite Access = 1 << iota
	// RemoteRead and RemoteWrite let a peer read or write. A registration
	// with either is never shared and never cached: see Cache.Acquire.
	RemoteRead
	RemoteWrite
	// BindWindow allows memory windows to be bound to the registration. By itself it gives no peer
	// access.
	BindWindow
)

// LocalRead is the empty set: only the device that the memory is registered with may read.
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
	LKey uint32 // the key in the device's own work requests
	RKey uint32 // the key in a peer's work requests
	Ref  any    // the provider's own object, which the cache does not interpret
}

// A Registrar registers memory in one protection domain of one device. Its methods are called
// concurrently, and never with a lock held.
type Registrar interface {
	// Register pins [addr, addr+n) and lets the device use it with the rights of access. The memory
	// stays reachable and mapped during the call. After an error that matches syscall.ENOMEM the cache
	// deregisters what it does not use, and calls Register once more.
	Register(addr uintptr, n int, access Access) (MR, error)

	// Deregister ends a registration. After it has returned, even with an error, the cache does not use
	// mr any more.
	Deregister(mr MR) error
}
