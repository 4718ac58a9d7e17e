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

// Positions returns how many bytes have been written to a connection and read from it so far, by any
// process. It is for a descriptor that another process has passed. Nobody may read or write meanwhile,
// except the peer. Unread urgent data makes the count of bytes read too large. After a reset the error
// is ErrNotConnected.
func Positions(c *net.TCPConn) (written, read uint64, err error) {
	p, err := control(c, positions)
	return p.written, p.read, err
}

type position struct{ written, read uint64 }

func positions(fd int) (p position, err error) {
	if isMPTCP(fd) {
		return p, ErrMPTCP
	}
	// One look takes about a microsecond, and counts only if no packet came meanwhile.
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

// IsOpen reports whether both directions of a connection are open: no process has shut either of them
// here, and the other end has not shut its own for writing.
func IsOpen(c *net.TCPConn) (bool, error) { return control(c, isOpen) }

func isOpen(fd int) (bool, error) {
	info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil || info.State != stateEstablished { // a FIN was sent or has come
		return false, wrap("TCP_INFO", err)
	}
	// A direction that was shut for reading here does not change the state.
	for {
		p := [...]unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		_, err := unix.Poll(p[:], 0)
		if err != unix.EINTR { // POLLERR is always reported, also for the error queue
			return p[0].Revents&unix.POLLRDHUP == 0, wrap("poll", err)
		}
	}
}

// Sends reports whether a connection still takes bytes to send: it has not ended, and is not shut here
// for writing.
func Sends(c *net.TCPConn) (bool, error) { return control(c, sends) }

func sends(fd int) (bool, error) {
	info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return false, wrap("TCP_INFO", err)
	}
	return info.State == stateEstablished || info.State == stateCloseWait, nil
}

// tcpCounts are the fields of TCP_INFO from which positions are calculated.
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

// position subtracts what is no byte of the application. A FIN counts as one byte, among those
// received, acknowledged or not yet acknowledged. At the dialer the SYN counts as one, too.
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
	p.written = c.acked + unacked - finSent // one too many at the dialer, for the SYN

	// The bytes sent do not include the SYN, which shows whether the connection was dialed. The kernel
	// also counts a packet that this host has dropped itself (a full queue, a filter). The dialer's
	// positions are wrong if all such packets of the connection's life held one byte together.
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
