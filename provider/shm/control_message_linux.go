package shm

import (
	"encoding/binary"
	"errors"
	"net/netip"
)

// The messages on a link's socket. All have the same size and form. A packet of another
// size or without the magic is a violation, which ends the link.
//
//	0  magic u32    4 kind u8   5 code u8   6 port u16
//	8  version u32  12 number u32
//	16 address [16]
type message struct {
	kind    uint8
	code    uint8
	version uint32
	number  uint32 // a slot, or a number of slots
	addr    netip.AddrPort
}

const (
	messageSize = 32
	magic       = 0x4d6e6153 // "SanM"

	// version changes with the layout and the messages. It is also part of the
	// rendezvous name, so that different versions do not meet.
	version = 4
)

const (
	msgLink         = iota + 1 // dialer: version, number of slots; segment 0 and a doorbell
	msgLinkReply               // acceptor: code, version; a doorbell
	msgSegment                 // dialer: number of slots; a segment
	msgSegmentReply            // acceptor: code
	msgConnect                 // dialer: number of the slot, dialed address, connectQuietly; its TCP socket
	msgConnectReply            // acceptor: number of the slot, code
)

// connectQuietly is a connect's code if no reply is wanted to one that is accepted, as the
// dialer looks for that in the slot.
const connectQuietly = 1

// Codes of the replies.
const (
	codeOK = iota
	codeVersion
	codeRefused   // the backlog is full
	codeClosed    // the listener is closed
	codeResources // the acceptor has no room
	codeAddress   // the acceptor does not trust the address or the socket
)

var errMessage = errors.New("shm: not a message of this protocol")

func (m *message) encode() []byte {
	b := make([]byte, messageSize)
	binary.LittleEndian.PutUint32(b[0:], magic)
	b[4], b[5] = m.kind, m.code
	binary.LittleEndian.PutUint16(b[6:], m.addr.Port())
	binary.LittleEndian.PutUint32(b[8:], m.version)
	binary.LittleEndian.PutUint32(b[12:], m.number)
	if m.addr.IsValid() {
		a := m.addr.Addr().As16()
		copy(b[16:], a[:])
	}
	return b
}

func (m *message) decode(b []byte) error {
	if len(b) != messageSize || binary.LittleEndian.Uint32(b) != magic {
		return errMessage
	}
	m.kind, m.code = b[4], b[5]
	m.version = binary.LittleEndian.Uint32(b[8:])
	m.number = binary.LittleEndian.Uint32(b[12:])
	m.addr = netip.AddrPortFrom(netip.AddrFrom16([16]byte(b[16:32])).Unmap(), binary.LittleEndian.Uint16(b[6:]))
	return nil
}
