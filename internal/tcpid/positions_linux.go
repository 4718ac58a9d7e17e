package tcpid

import (
	"errors"
	"net"

	"golang.org/x/sys/unix"
)

// include/net/tcp_states.h
const (
	stateEstablished = 1
	stateFinWait1    = 4
	stateFinWait2    = 5
	stateTimeWait    = 6
	stateCloseWait   = 8
	stateLastAck     = 9
	stateListen      = 10
	stateClosing     = 11
)

var (
	errMoving = errors.New("tcpid: the kernel's counts of bytes do not hold still")
	errDiffer = errors.New("tcpid: the kernel's counts of bytes contradict each other")
)

// Positions returns how many bytes have been written to a connection and read from it so
// far, by whichever processes had it: for a descriptor that has come from another one.
// Nobody may read or write meanwhile; the peer may. Urgent data that is yet to be read makes
// the count of bytes read too large. The error is ErrNotConnected behind a reset.
func Positions(c *net.TCPConn) (written, read uint64, err error) {
	p, err := control(c, positions)
	return p.written, p.read, err
}

type position struct{ written, read uint64 }

func positions(fd int) (p position, err error) {
	if isMPTCP(fd) {
		return p, ErrMPTCP
	}
	// A look takes about a microsecond, and has to fall between two packets.
	const looks = 1000
	before, err := countsOf(fd)
	if err != nil {
		return p, err
	}
	for range looks {
		unread, err1 := unix.IoctlGetInt(fd, unix.SIOCINQ)
		unacked, err2 := unix.IoctlGetInt(fd, unix.SIOCOUTQ)
		after, err3 := countsOf(fd)
		if err := errors.Join(err1, err2, err3); err != nil {
			return p, wrap("counts", err)
		}
		if after == before {
			return after.position(uint64(unread), uint64(unacked))
		}
		before = after
	}
	return p, errMoving
}

// IsOpen reports whether neither direction of a connection has been shut here, by whichever process,
// and the other end has not shut its own for writing.
func IsOpen(c *net.TCPConn) (bool, error) { return control(c, isOpen) }

func isOpen(fd int) (bool, error) {
	info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil || info.State != stateEstablished { // a FIN has gone or come
		return false, wrap("TCP_INFO", err)
	}
	// What was shut here for reading shows in no state.
	for {
		p := [...]unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		_, err := unix.Poll(p[:], 0)
		if err != unix.EINTR { // POLLERR comes unasked, of the error queue as well
			return p[0].Revents&unix.POLLRDHUP == 0, wrap("poll", err)
		}
	}
}

// Sends reports whether a connection still takes bytes to send: it has not ended, and was not shut here.
func Sends(c *net.TCPConn) (bool, error) { return control(c, sends) }

func sends(fd int) (bool, error) {
	info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return false, wrap("TCP_INFO", err)
	}
	return info.State == stateEstablished || info.State == stateCloseWait, nil
}

// tcpCounts are those of TCP_INFO that positions depend on.
type tcpCounts struct {
	state                            uint8
	acked, received, sent, sentAgain uint64
	unsent                           uint32
}

func countsOf(fd int) (tcpCounts, error) {
	i, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return tcpCounts{}, wrap("TCP_INFO", err)
	}
	return tcpCounts{i.State, i.Bytes_acked, i.Bytes_received, i.Bytes_sent, i.Bytes_retrans, i.Notsent_bytes}, nil
}

// position takes away what is no byte of the application: a FIN counts as one of those
// received, acknowledged or not acknowledged, and so does, at the dialer, the SYN.
func (c tcpCounts) position(unread, unacked uint64) (p position, err error) {
	var finSent, finReceived uint64
	switch c.state {
	case stateEstablished:
	case stateFinWait1, stateFinWait2:
		finSent = 1
	case stateCloseWait:
		finReceived = 1
	case stateClosing, stateLastAck, stateTimeWait:
		finSent, finReceived = 1, 1
	default:
		return p, ErrNotConnected
	}
	if unread+finReceived > c.received {
		return p, errDiffer // a connection that was restored (TCP_REPAIR)
	}
	p.read = c.received - finReceived - unread
	p.written = c.acked + unacked - finSent // and the SYN

	// Whether it was dialed shows in what was sent, which has no SYN. A packet that the
	// host itself has dropped (a full queue, a filter) was counted and is not there; the
	// dialer's positions are wrong if all such packets in its life held one byte together.
	unsent := uint64(c.unsent)
	if finSent == 1 && unsent > 0 {
		unsent-- // the FIN
	}
	switch p.written - (c.sent - c.sentAgain + unsent) {
	case 0:
	case 1:
		p.written--
	default:
		return position{}, errDiffer
	}
	return p, nil
}
