// Package wire encodes and decodes the messages of the session protocol, which docs/PROTOCOL.md
// describes for readers. It allocates nothing, keeps nothing, and uses no length or count that it has
// not checked against the message's own size. The session checks what a number means to it.
package wire

import (
	"encoding/binary"
	"fmt"
)

// Type is a message's type. Version 1 used the numbers 5, 6, 8 and 10.
type Type uint8

const (
	typeNegotiate  Type = 1
	TypeData       Type = 2
	TypeCredit     Type = 3
	TypeOfferRead  Type = 4
	TypeReadDone   Type = 7
	TypeCancelRead Type = 9
	TypeShutdown   Type = 11
	TypeClose      Type = 12
	TypeCloseAck   Type = 13
	TypeAbort      Type = 14
	TypePing       Type = 15
	TypePong       Type = 16
	TypeUrgent     Type = 17
	TypeRefuse     Type = 18
	TypeAskInbox   Type = 19
	TypeInbox      Type = 20
	TypeFill       Type = 21
	TypeEmptied    Type = 22
	TypeLeaveInbox Type = 23
	TypeNote       Type = 24
	TypeNearDone   Type = 25
)

// Flags. Each type has its own; unknown flags are ignored.
const (
	FlagMore = 1 << 0 // Data, Fill, OfferRead: the Write goes on after this message
	FlagGone = 1 << 1 // ReadDone: the reader has closed

	flagReturnable = 1 << 1 // OfferRead: the provider may give the access back with ReadDone
)

// More returns FlagMore if more is true.
func More(more bool) uint8 {
	if more {
		return FlagMore
	}
	return 0
}

var le = binary.LittleEndian

// Header is the beginning of each message, little endian:
//
//	0  type    u8
//	1  flags   u8
//	2  zero    u16
//	4  credit  u32  how many of the receiver's messages, without Credit, the sender has dealt
//	               with, modulo 2³²: that many receive buffers have been posted again
type Header struct {
	Type   Type
	Flags  uint8
	Credit uint32
}

// HeaderLen is the length of a header in bytes.
const HeaderLen = 8

// Put writes the header to the front of b.
func (h Header) Put(b []byte) {
	_ = b[HeaderLen-1]
	le.PutUint32(b, uint32(h.Type)|uint32(h.Flags)<<8)
	le.PutUint32(b[4:], h.Credit)
}

// ParseHeader reads the header of a message. It fails if the message is shorter than a header.
func ParseHeader(m []byte) (Header, error) {
	if len(m) < HeaderLen {
		return Header{}, fmt.Errorf("a message of %d bytes", len(m))
	}
	return HeaderOf(m), nil
}

// HeaderOf is ParseHeader for a message that is known to have a header.
func HeaderOf(m []byte) Header {
	_ = m[HeaderLen-1]
	return Header{Type: Type(m[0]), Flags: m[1], Credit: le.Uint32(m[4:])}
}

// TypeOf returns the type of a message that is known to have a header.
func TypeOf(m []byte) Type { return Type(m[0]) }

// Descriptor names exposed memory to the peer. The provider defines its content; on the wire it is
// three 64-bit words.
type Descriptor struct {
	Addr uint64
	Key  uint64
	Len  uint64

	// Returnable: the provider at the other end may give its own access back with a message
	// (session.Memory). It is a flag of the message that has the descriptor.
	Returnable bool
}

const (
	idLen         = 8  // id u32, zero u32
	descriptorLen = 24 // addr, key, len u64
	countLen      = 8
)

func (d Descriptor) put(b []byte) {
	le.PutUint64(b, d.Addr)
	le.PutUint64(b[8:], d.Key)
	le.PutUint64(b[16:], d.Len)
}

func parseDescriptor(b []byte) Descriptor {
	return Descriptor{Addr: le.Uint64(b), Key: le.Uint64(b[8:]), Len: le.Uint64(b[16:])}
}

// tooShort returns the error for a message that is shorter than its type requires.
func tooShort(m []byte) error {
	return fmt.Errorf("a message of type %d with %d bytes", m[0], len(m))
}
