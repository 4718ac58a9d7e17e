package san

import (
	"fmt"
	"net"
	"syscall"
)

// MoveOffer is what ListenConfig.Condition decides about: that a connection, which TCP has
// accepted, moves to a SAN.
type MoveOffer struct {
	LocalAddr, RemoteAddr *net.TCPAddr // the connection's, as at this end, without zones
	Provider              string       // "shm", "verbs"

	// UID is the user of the process at the other end, as the kernel tells: of a process of
	// this network namespace, by shm. Otherwise it is -1.
	UID int64
}

// condition returns why an offer is refused, nil: it is not. The offer is known to be from the
// connection's other end.
func (t *taker) condition(l *life) error {
	if l.condition == nil {
		return nil
	}
	o := MoveOffer{
		LocalAddr:  net.TCPAddrFromAddrPort(l.ends.Local),
		RemoteAddr: net.TCPAddrFromAddrPort(l.ends.Remote),
		Provider:   t.provider,
		UID:        -1,
	}
	if t.user != nil {
		o.UID = int64(*t.user)
	}
	err := l.condition(o)
	if err != nil {
		l.failed(&Unavailable{Reason: ReasonRefused, Err: err})
	}
	return err
}

// errRefused is what the dialer gets. The reason stays with the listener.
var errRefused = fmt.Errorf("the listener's condition: %w", syscall.ECONNREFUSED)
