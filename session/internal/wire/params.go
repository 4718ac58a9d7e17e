package wire

import (
	"errors"
	"fmt"
)

// Params are what the two ends exchange once, in the body of Negotiate:
//
//	 0  magic    u32
//	 4  version  u16  raised when an old end would not understand a new one
//	 6  zero     u16  ignored
//	 8  credits  u32  messages other than Credit that the peer may send at first; 0: no limit
//	12  maxMsg   u32  largest message that fits a buffer at this end
//	16  caps     u32  bits; unknown ones are ignored
//	20  zero     20 bytes, room for later; ignored
type Params struct {
	Version    uint16
	Credits    uint32
	MaxMessage uint32
	Caps       uint32
}

const (
	magic = 'S' | 'A'<<8 | 'N'<<16 | 'c'<<24

	// Version is session.Version.
	Version = 9

	CapRead  = 1 << 0 // offered memory can be read by RDMA
	CapInbox = 1 << 1 // memory can be exposed as an inbox

	// NegotiateLen is the length of Negotiate in bytes.
	NegotiateLen = HeaderLen + 40
)

// ErrVersion means that the peer has another version of the protocol.
var ErrVersion = errors.New("another version of the protocol")

// Put writes a Negotiate message to b.
func (p Params) Put(b []byte) {
	clear(b[:NegotiateLen])
	Header{Type: typeNegotiate}.Put(b)
	b = b[HeaderLen:]
	le.PutUint32(b, magic)
	le.PutUint16(b[4:], p.Version)
	le.PutUint32(b[8:], p.Credits)
	le.PutUint32(b[12:], p.MaxMessage)
	le.PutUint32(b[16:], p.Caps)
}

// ParseParams reads a Negotiate message. The error wraps ErrVersion if the message is a Negotiate of
// another version.
func ParseParams(m []byte) (Params, error) {
	if len(m) < NegotiateLen || Type(m[0]) != typeNegotiate || le.Uint32(m[HeaderLen:]) != magic {
		return Params{}, fmt.Errorf("a first message of %d bytes that is no negotiation", len(m))
	}
	b := m[HeaderLen:]
	p := Params{
		Version:    le.Uint16(b[4:]),
		Credits:    le.Uint32(b[8:]),
		MaxMessage: le.Uint32(b[12:]),
		Caps:       le.Uint32(b[16:]),
	}
	if p.Version != Version {
		return p, fmt.Errorf("%w: the peer's is %d, this end's %d", ErrVersion, p.Version, Version)
	}
	return p, nil
}
