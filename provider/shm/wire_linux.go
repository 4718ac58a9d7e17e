package shm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
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
	msgHello   = iota + 1 // dialer: version, number of slots; segment 0 and perhaps an eventfd
	msgWelcome            // acceptor: code, version; perhaps an eventfd
	msgSegment            // dialer: number of slots; a segment
	msgConnect            // dialer: number of the slot, dialed address; its TCP socket
	msgResult             // acceptor: number of the slot, code
	msgBell               // either side: look at the bell
	msgMapped             // acceptor: code, for the last segment offered
)

// Codes of msgWelcome, msgResult and msgMapped.
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

// send sends a message and descriptors, bounded by the socket's deadline.
func send(c *net.UnixConn, m *message, fds ...int) error {
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	_, _, err := c.WriteMsgUnix(m.encode(), oob, nil)
	return err
}

// mostFDs is how many descriptors a message may carry; the kernel drops the rest.
const mostFDs = 2

// errCut: descriptors were lost, most likely because this process is at its limit.
var errCut = fmt.Errorf("shm: descriptors were lost on the way: %w", unix.EMFILE)

// receive receives the next message and its descriptors, which the caller has to close
// even if there is an error.
func receive(c *net.UnixConn, m *message) (fds []int, err error) {
	var b [messageSize + 1]byte
	var oob [64]byte // a little more than mostFDs need
	n, oobn, flags, _, err := c.ReadMsgUnix(b[:], oob[:unix.CmsgSpace(mostFDs*4)])
	if err != nil {
		return nil, err
	}
	if oobn > 0 {
		msgs, err := unix.ParseSocketControlMessage(oob[:oobn])
		if err != nil {
			return nil, err
		}
		for i := range msgs {
			if got, err := unix.ParseUnixRights(&msgs[i]); err == nil {
				fds = append(fds, got...)
			}
		}
	}
	if n == 0 {
		return fds, errPeerGone
	}
	if err := m.decode(b[:n]); err != nil {
		return fds, err
	}
	if flags&unix.MSG_CTRUNC != 0 {
		return fds, errCut
	}
	return fds, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}
