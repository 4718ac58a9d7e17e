package verbs

import (
	"net"
	"sync"
	"time"

	"github.com/sanconn/san/ibv"
)

// Clusters may have InfiniBand without IPoIB beside an Ethernet with all addresses. There
// rdma_cm, which goes by addresses, has nothing to connect by, and the exchange over TCP needs
// none: a device without an interface serves the addresses of interfaces without a device.

// bare remembers which device that is. Finding out opens devices.
var bare struct {
	mu   sync.Mutex
	at   time.Time // guarded by mu
	name string    // "": none. Guarded by mu
}

// bareAge is how long it is remembered.
const bareAge = 10 * time.Second

// bareDevice is the first InfiniBand device with an active port that no interface belongs to,
// "" if there is none. Whether a peer is on the same fabric shows when it is connected.
func bareDevice() string {
	bare.mu.Lock()
	defer bare.mu.Unlock()
	if now := time.Now(); now.Sub(bare.at) > bareAge {
		bare.name, bare.at = findBare(), now
	}
	return bare.name
}

func findBare() string {
	if nodesRefused() != nil {
		return ""
	}
	taken := make(map[string]bool)
	ifis, _ := net.Interfaces()
	for _, ifi := range ifis {
		taken[DeviceOf(ifi.Name)] = true
	}
	devices, _ := ibv.Devices() // an error: there are none
	for _, d := range devices {
		if taken[d.Name] {
			continue
		}
		if a, err := barePort(d.Name); err == nil {
			a.dev.release()
			return d.Name
		}
	}
	return ""
}

// barePort finds an active port of InfiniBand, used in its first partition.
func barePort(name string) (attachment, error) {
	return portOf(name, func(p ibv.Port, g ibv.GIDEntry) bool { return p.LinkLayer == ibv.LinkInfiniBand && g.Index == 0 }, "of InfiniBand")
}
