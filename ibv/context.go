package ibv

import "sync"

// Context is an open device.
type Context struct {
	Device
	CompVectors int // completion vectors to spread queues over, at least 1

	h       cObject
	asyncFD int
	ofCM    bool // it belongs to librdmacm, and is not closed here
}

// Open opens the named device. ENODEV: there is none of that name.
func Open(name string) (*Context, error) {
	if err := Available(); err != nil {
		return nil, err
	}
	h, errno := sysOpen(name)
	if errno != 0 {
		return nil, verbError("ibv_open_device", name, errno)
	}
	return newContext(h), nil
}

func newContext(h cObject) *Context {
	c := &Context{h: h}
	c.Device, c.asyncFD, c.CompVectors = sysContext(h)
	return c
}

// cmContexts are the contexts that librdmacm has opened, one per device. librdmacm keeps them open; but
// once it has found that a device was replaced, it closes the old device's context with the last [ID]
// on it.
var cmContexts = struct {
	mu sync.Mutex
	m  map[cObject]*Context // guarded by mu
}{m: make(map[cObject]*Context)}

func cmContext(h cObject) *Context {
	if h == 0 {
		return nil
	}
	fresh := newContext(h)
	fresh.ofCM = true
	cmContexts.mu.Lock()
	defer cmContexts.mu.Unlock()
	// A device that has come back may have the address of the old one.
	if c := cmContexts.m[h]; c != nil && c.Device == fresh.Device && c.asyncFD == fresh.asyncFD {
		return c
	}
	cmContexts.m[h] = fresh
	return fresh
}

// Close closes the device. Everything made from it must be closed before. A
// context of [ID.Context] belongs to librdmacm and stays open.
func (c *Context) Close() error {
	if c.ofCM {
		return nil
	}
	return c.h.close("ibv_close_device", c.Name, sysClose)
}

// Caps are the limits that a device reports (struct ibv_device_attr). Some
// devices report more than they can do.
type Caps struct {
	Firmware           string
	MaxMRSize          uint64 // bytes
	VendorID           uint32
	Flags              CapFlags
	MaxQP              int
	MaxQPWR            int // work requests in a send or receive queue
	MaxSGE             int
	MaxSGERead         int // scatter elements of an RDMA read; 1 on iWARP
	MaxCQE             int
	MaxMR              int
	MaxQPReadAtomic    int // RDMA reads and atomics that a QP serves at a time
	MaxQPInitiatorRead int // RDMA reads and atomics that a QP issues at a time
	MaxMW              int // 0: no memory windows
	Ports              int
}

// CapFlags is enum ibv_device_cap_flags.
type CapFlags uint32

const (
	CapMemWindow   CapFlags = 1 << 17
	CapMemWindow2A CapFlags = 1 << 23
	CapMemWindow2B CapFlags = 1 << 24
)

// Caps queries the device (ibv_query_device).
func (c *Context) Caps() (Caps, error) {
	caps, errno := sysQueryDevice(c.h)
	return caps, verbError("ibv_query_device", c.Name, errno)
}
