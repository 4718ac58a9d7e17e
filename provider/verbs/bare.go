package verbs

import (
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/sanconn/san/ibv"
	"github.com/sanconn/san/session"
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
	name, at := bare.name, bare.at
	bare.mu.Unlock()
	if !at.IsZero() && time.Since(at) <= bareAge {
		return name
	}
	name = findBare() // without mu: another may look as well
	bare.mu.Lock()
	defer bare.mu.Unlock()
	bare.name, bare.at = name, time.Now()
	return name
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
		if a, err := portOf(d.Name); err == nil {
			a.dev.release()
			return d.Name
		}
	}
	return ""
}

// portOf finds an active port of InfiniBand, used in its first partition.
func portOf(name string) (attachment, error) {
	dev, err := exchangeDevice(name)
	if err != nil {
		return attachment{}, err
	}
	a, err := dev.at(func(p ibv.Port, g ibv.GIDEntry) bool { return p.LinkLayer == ibv.LinkInfiniBand && g.Index == 0 })
	if err == nil && a.gids == nil {
		err = unavailable(session.ReasonUnreachable, fmt.Errorf("verbs: %s has no active port of InfiniBand", name))
	}
	if err != nil {
		dev.release()
	}
	return a, callError(err)
}
