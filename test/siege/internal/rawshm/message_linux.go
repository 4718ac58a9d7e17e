package rawshm

import (
	"encoding/binary"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// Version is the version of the protocol.
const Version = 9

// Kinds of messages.
const (
	Link         = 1
	LinkReply    = 2
	Segment      = 3
	SegmentReply = 4
	Connect      = 5
	Refuse       = 6
)

// Codes of replies.
const (
	OK        = 0
	Closed    = 2
	Resources = 3
)

// Message is a packet on a link's socket.
type Message struct {
	Kind, Code uint8
	Number     uint32
}

const messageSize = 16

func (m Message) encode() []byte {
	b := make([]byte, messageSize)
	copy(b, "San"+"M")
	b[4], b[5] = m.Kind, m.Code
	binary.LittleEndian.PutUint32(b[8:], Version)
	binary.LittleEndian.PutUint32(b[12:], m.Number)
	return b
}

// Send sends a message with descriptors, which stay the caller's. It does not block: the
// error is EAGAIN if the other end has not read.
func Send(socket int, m Message, fds ...int) error {
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	return unix.Sendmsg(socket, m.encode(), rights, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
}

// Receive waits for a message, but not longer than limit. The caller has to close the descriptors.
func Receive(socket int, limit time.Duration) (m Message, fds []int, err error) {
	for end := time.Now().Add(limit); ; {
		ready := []unix.PollFd{{Fd: int32(socket), Events: unix.POLLIN}}
		n, err := unix.Poll(ready, int(max(0, time.Until(end)).Milliseconds()))
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return m, nil, err
		}
		if n == 0 {
			return m, nil, unix.ETIMEDOUT
		}
		break
	}
	var b [messageSize]byte
	var oob [128]byte // room for credentials, too
	n, oobn, _, _, err := unix.Recvmsg(socket, b[:], oob[:], unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return m, nil, err
	}
	if n == 0 {
		return m, nil, unix.EPIPE
	}
	if n != messageSize || string(b[:4]) != "SanM" {
		return m, nil, fmt.Errorf("a packet % x", b[:n])
	}
	m.Kind, m.Code = b[4], b[5]
	m.Number = binary.LittleEndian.Uint32(b[12:])
	if oobn > 0 {
		msgs, err := unix.ParseSocketControlMessage(oob[:oobn])
		if err != nil {
			return m, nil, err
		}
		for i := range msgs {
			if got, err := unix.ParseUnixRights(&msgs[i]); err == nil {
				fds = append(fds, got...)
			}
		}
	}
	return m, fds, nil
}
