package ibv

import (
	"fmt"
	"strconv"
	"sync"
)

// Available returns nil if the libraries are loaded and can be used, and
// otherwise an error that wraps [ErrNotAvailable] and gives the reason. Whether there
// are devices is another matter: see [Devices]. The result does not change, unless
// there was no descriptor to look for them with: then it is an [Error].
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
	mu     sync.Mutex // guards what follows
	looked bool
	err    error // why they cannot be used
}

// ForkSafe reports whether registered memory stays with this process, as the device has it,
// when the process forks: the kernel copies its pages for the child at once (Linux 5.12).
// Otherwise this process has a new page after its next write to it, and the device the old
// one, unless the child gets no such pages (MADV_DONTFORK). It is false if that is not known:
// the libraries are older (rdma-core 35), or cannot be used. The result does not change.
func ForkSafe() bool { return Available() == nil && forkSafe() }

var forkSafe = sync.OnceValue(sysForkSafe)

// Transport is what a device speaks. The values are those of enum ibv_transport_type.
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
	Index     int // the kernel's index of it, -1 if this rdma-core does not have it
}

// deviceListMax bounds the list that Devices takes; a host with all its virtual
// functions stays well below.
const deviceListMax = 1024

// Devices lists the devices. That a device is listed does not mean that it can
// be opened: in containers sysfs shows more than is there.
func Devices() ([]Device, error) {
	if err := Available(); err != nil {
		return nil, err
	}
	list, errno := sysDevices(deviceListMax)
	return list, verbError("ibv_get_device_list", "", errno)
}

// name is the name of a value, or a kind and the number.
func name[T ~int32 | ~uint32 | ~uint8](v T, names map[T]string, kind string) string {
	if s, ok := names[v]; ok {
		return s
	}
	return kind + " " + strconv.FormatInt(int64(v), 10)
}
