package ibv

import (
	"fmt"
	"strconv"
	"sync"
)

// Available returns nil if the libraries are loaded and can be used, and otherwise an error that wraps
// [ErrNotAvailable] and gives the reason. It does not tell whether there are devices: see [Devices].
// The result does not change, except that an [Error] for lack of a descriptor is not kept.
func Available() error {
	l := &libraries
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.looked {
		why, errno := sysLoad()
		if errno != 0 {
			return verbError("dlopen", "", errno)
		}
		if l.looked = true; why != "" {
			l.err = fmt.Errorf("%w: %s", ErrNotAvailable, why)
		}
	}
	return l.err
}

var libraries struct {
	mu     sync.Mutex // guards the fields below
	looked bool
	err    error // why the libraries cannot be used
}

// ForkSafe reports whether the device and this process keep sharing the pages of registered memory when
// the process forks, because the kernel copies them for the child at once (Linux 5.12). Otherwise,
// after a fork, this process's next write to a page gives it a new page, and the device keeps the old
// one, unless the child does not get the pages (MADV_DONTFORK). It returns false if that is not known:
// if the libraries are older than rdma-core 35, or cannot be used. The result does not change.
func ForkSafe() bool { return Available() == nil && forkSafe() }

var forkSafe = sync.OnceValue(sysForkSafe)

// Transport is the protocol of a device. The values are those of enum ibv_transport_type.
type Transport int32

const (
	TransportIB    Transport = 0 // InfiniBand and RoCE
	TransportIWARP Transport = 1
)

func (t Transport) String() string {
	switch t {
	case TransportIB:
		return "InfiniBand/RoCE"
	case TransportIWARP:
		return "iWARP"
	}
	return "transport " + strconv.Itoa(int(t))
}

// Device describes an RDMA device of this host.
type Device struct {
	Name      string // "rxe0", "mlx5_0"
	Sysfs     string // its folder in sysfs: /sys/class/infiniband/NAME
	GUID      uint64
	Transport Transport
	Index     int // the kernel's index of the device; -1 if this rdma-core does not report it
}

// deviceListMax bounds the list of Devices; a host with all its virtual functions stays well below.
const deviceListMax = 1024

// Devices lists the devices. A device in the list need not open: in containers sysfs shows devices that
// are not there.
func Devices() ([]Device, error) {
	if err := Available(); err != nil {
		return nil, err
	}
	list, errno := sysDevices(deviceListMax)
	return list, verbError("ibv_get_device_list", "", errno)
}

// name returns the name of a value, or its kind and number.
func name[T ~int32 | ~uint32 | ~uint8](v T, names map[T]string, kind string) string {
	if s, ok := names[v]; ok {
		return s
	}
	return kind + " " + strconv.FormatInt(int64(v), 10)
}
