package shm

import (
	"encoding/binary"
	"errors"

	"github.com/sanconn/san/session"
)

// message is a message on a link's socket. All have the same size and form. A packet of another size or
// without the magic number is a violation, which ends the link.
//
//	0  magic u32    4 kind u8   5 code u8   6 zero u16
//	8  version u32  12 number u32
type message struct {
	kind    uint8
	code    uint8
	version uint32
	number  uint32 // a slot, or a number of slots

	// user is the sender, as the kernel reports it. (A privileged program that writes data of its
	// caller to sockets cannot be misused to send a message as its own user: the messages whose user
	// counts carry descriptors.)
	user uint32
}

const (
	messageSize = 16
	magic       = 0x4d6e6153 // "SanM"; in the processor's byte order, as are the words in shared memory

	// version is also part of the names, so processes of different versions do not meet.
	version = session.Version
)

const (
	msgLink         = iota + 1 // dialer: version, number of slots; its half of segment 0, a doorbell
	msgLinkReply               // acceptor: code, version; its half, a doorbell
	msgSegment                 // dialer: number of slots; its half
	msgSegmentReply            // acceptor: code; its half
	msgConnect                 // dialer: number of the slot
	msgRefuse                  // acceptor: number of a slot that it does not accept, code
)

// Codes of the replies.
const (
	codeOK = iota
	codeVersion
	codeClosed    // the listener is closed
	codeResources // the acceptor has no room
	codeUser      // the acceptor does not know the dialer's user
)

var errMessage = errors.New("shm: not a message of this protocol")

func (m *message) encode() []byte {
	b := make([]byte, messageSize)
	binary.NativeEndian.PutUint32(b[0:], magic)
	b[4], b[5] = m.kind, m.code
	binary.LittleEndian.PutUint32(b[8:], m.version)
	binary.LittleEndian.PutUint32(b[12:], m.number)
	return b
}

func (m *message) decode(b []byte) error {
	if len(b) != messageSize || binary.NativeEndian.Uint32(b) != magic || b[6]|b[7] != 0 {
		return errMessage
	}
	m.kind, m.code = b[4], b[5]
	m.version = binary.LittleEndian.Uint32(b[8:])
	m.number = binary.LittleEndian.Uint32(b[12:])
	return nil
}
