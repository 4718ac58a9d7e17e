package rawshm

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"
)

// Kinds of notes, which the two ends of a TCP connection send each other on a session. The kind is the
// first byte.
const (
	proposal = 1
	answer   = 2
	begin    = 3
)

// Codes of answers.
const (
	Moves   = 0
	Unknown = 1
)

// TCP is what a dialer knows about its TCP connection.
type TCP struct {
	Local, Remote      netip.AddrPort
	Cookie, PeerCookie uint64
}

func (t TCP) proposal() []byte {
	b := []byte{proposal, 1, 0}
	for _, a := range []netip.AddrPort{t.Local, t.Remote} {
		ip := a.Addr().As16()
		b = binary.LittleEndian.AppendUint16(append(b, ip[:]...), a.Port())
	}
	b = binary.LittleEndian.AppendUint64(b, t.Cookie)
	b = binary.LittleEndian.AppendUint64(b, t.PeerCookie)
	return binary.LittleEndian.AppendUint16(b, 0)
}

// Move proposes to move a TCP connection on which sent bytes were sent and none received, and returns
// the answer's code. If that is Moves, both directions have moved.
func (c *Conn) Move(t TCP, sent uint64, limit time.Duration) (code byte, err error) {
	c.Put(SessionMessage(Note, string(t.proposal())))
	c.Publish()
	m, err := c.note(answer, limit)
	if err != nil || m[1] != Moves {
		return m[1], err
	}
	c.Put(SessionMessage(Note, string(binary.LittleEndian.AppendUint64([]byte{begin}, sent))))
	c.Publish()
	_, err = c.note(begin, limit)
	return Moves, err
}

// note waits for a note of a kind.
func (c *Conn) note(kind byte, limit time.Duration) ([]byte, error) {
	m, err := c.Get(limit)
	if err == nil && (len(m) < 8+2 || m[0] != Note || m[8] != kind) {
		err = fmt.Errorf("% x instead of note %d", m, kind)
	}
	if err != nil {
		return make([]byte, 2), err
	}
	return m[8:], nil
}
