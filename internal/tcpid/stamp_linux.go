package tcpid

import (
	"encoding/binary"
	"fmt"
	"net"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// include/uapi/linux/tcp.h: tcpi_options
const (
	infoTimestamps   = 1
	infoMicroseconds = 64 // since Linux 6.7, if the route requests it
)

var (
	errNoTimestamps = fmt.Errorf("%w: the connection has none (net.ipv4.tcp_timestamps)", errNoStamp)
	errMicroseconds = fmt.Errorf("%w: microseconds leave too little to guess", errNoStamp)
	errNotRandom    = fmt.Errorf("%w: nothing random in it (net.ipv4.tcp_timestamps)", errNoStamp)
	errTooLate      = fmt.Errorf("%w: it has to be noted before anything is sent", errNoStamp)
	errInterrupted  = fmt.Errorf("%w: the clock did not hold still", errNoStamp)
	errNoSYN        = fmt.Errorf("%w: no SYN was saved, or it was read before", errNoStamp)
	errBadSYN       = fmt.Errorf("%w: the saved SYN is not understood", errNoStamp)
)

// SaveSYN makes the kernel keep the SYN of each connection that the listener accepts from now on, some
// 100 bytes, until acceptorStamp reads it or the connection is closed. A Multipath TCP listener, which
// package net makes by default, cannot keep it: the error is ErrMPTCP. See
// net.ListenConfig.SetMultipathTCP.
func SaveSYN(l *net.TCPListener) error {
	_, err := control(l, func(fd int) (struct{}, error) {
		if isMPTCP(fd) {
			return struct{}{}, ErrMPTCP
		}
		return struct{}{}, wrap("TCP_SAVE_SYN", unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_SAVE_SYN, 1))
	})
	return err
}

// IsMPTCP reports whether a connection's socket is one of Multipath TCP, even if the other end uses TCP
// alone. The cookie of such a socket is not the one of its TCP connection, of which there may be
// several.
func IsMPTCP(c *net.TCPConn) bool {
	is, err := control(c, func(fd int) (bool, error) { return isMPTCP(fd), nil })
	return is && err == nil
}

// isMPTCP reports whether a socket is one of Multipath TCP. Its options and counts are not those of its
// TCP connection.
func isMPTCP(fd int) bool {
	p, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL)
	return err == nil && p == unix.IPPROTO_MPTCP
}

// DialerStamps returns what the stamp of a dialed connection may be, the likeliest value first. It must
// be called before anything is sent, at any time after the connect.
//
// The first value is the kernel's clock of timestamps, less the time since the connection was
// established, less the time from the SYN to its acknowledgement. That last time is the first round
// trip, measured by the connection's own timestamps, so that of several SYNs it is the one that the
// acceptor has kept. On busy virtual machines a processor may be away meanwhile, and the value be off
// by far more than stampSlack: for one connection in some hundred on an emulated machine.
//
// Most SYNs leave when the dial begins: that gives the second value, if began is not zero. The third
// value is for a SYN that left up to 3·stampSlack later, because the dial looked up a name or waited
// for its processor.
func DialerStamps(c *net.TCPConn, began time.Time) ([]Stamp, error) {
	return control(c, func(fd int) ([]Stamp, error) {
		if isMPTCP(fd) {
			return nil, ErrMPTCP
		}
		const attempts = 8 // a thread may lose its processor between two of these calls
		for range attempts {
			before, err := timestampClock(fd)
			if err != nil {
				return nil, err
			}
			info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
			if err != nil {
				return nil, wrap("TCP_INFO", err)
			}
			var monotonic unix.Timespec
			if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &monotonic); err != nil {
				return nil, wrap("clock", err)
			}
			elapsed := time.Since(began)
			now, err := timestampClock(fd)
			if err != nil {
				return nil, err
			}
			const resolution = 2 // ms: the kernel leaves out the lowest bit
			random := now - Stamp(monotonic.Nano()/int64(time.Millisecond))
			switch {
			case info.Options&infoMicroseconds != 0:
				return nil, errMicroseconds
			case info.Options&infoTimestamps == 0:
				return nil, errNoTimestamps
			case info.Data_segs_out != 0:
				return nil, errTooLate // both times would be about the data instead
			case now-before > resolution:
				continue
			case random+resolution <= 2*resolution:
				return nil, errNotRandom
			}
			stamps := []Stamp{now - Stamp(info.Last_data_sent) - Stamp(info.Rtt/1000)}
			if !began.IsZero() {
				atOnce := now - Stamp(elapsed.Milliseconds())
				stamps = append(stamps, atOnce, atOnce+2*stampSlack)
			}
			return stamps, nil
		}
		return nil, errInterrupted
	})
}

func timestampClock(fd int) (Stamp, error) {
	v, err := unix.GetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_TIMESTAMP)
	return Stamp(uint32(v)), wrap("TCP_TIMESTAMP", err)
}

// acceptorStamp returns the stamp of a connection whose listener saves SYNs. The kernel gives a SYN
// once, to one process.
func acceptorStamp(c *net.TCPConn) (Stamp, error) {
	return control(c, func(fd int) (Stamp, error) {
		if isMPTCP(fd) {
			return 0, ErrMPTCP
		}
		var syn [512]byte // the headers of IP and TCP; seldom more than 60 bytes
		n, err := savedSYN(fd, syn[:])
		if err != nil {
			return 0, err
		}
		return parseSYN(syn[:n])
	})
}

// parseSYN returns the timestamp in an IPv4 or IPv6 packet with a SYN.
func parseSYN(b []byte) (Stamp, error) {
	tcp, err := tcpHeader(b)
	if err != nil {
		return 0, err
	}
	const fixed = 20 // bytes of the header before its options
	if len(tcp) < fixed {
		return 0, errBadSYN
	}
	length := int(tcp[12]>>4) * 4
	if length < fixed || length > len(tcp) {
		return 0, errBadSYN
	}
	for o := tcp[fixed:length]; len(o) > 0; {
		switch {
		case o[0] == unix.TCPOPT_EOL:
			return 0, errNoTimestamps
		case o[0] == unix.TCPOPT_NOP:
			o = o[1:]
			continue
		case len(o) < 2 || o[1] < 2 || int(o[1]) > len(o):
			return 0, errBadSYN
		case o[0] == unix.TCPOPT_TIMESTAMP && o[1] == 10:
			return Stamp(binary.BigEndian.Uint32(o[2:])), nil
		}
		o = o[o[1]:]
	}
	return 0, errNoTimestamps
}

// tcpHeader returns a packet's bytes from the TCP header on.
func tcpHeader(b []byte) ([]byte, error) {
	const fixed4, fixed6 = 20, 40
	switch {
	case len(b) >= fixed4 && b[0]>>4 == 4:
		if n := int(b[0]&15) * 4; n >= fixed4 && n <= len(b) {
			return b[n:], nil
		}
	case len(b) >= fixed6 && b[0]>>4 == 6:
		kind, b := b[6], b[fixed6:]
		for kind != unix.IPPROTO_TCP {
			if len(b) < 2 {
				return nil, errBadSYN
			}
			n := (int(b[1]) + 1) * 8
			switch kind {
			case unix.IPPROTO_HOPOPTS, unix.IPPROTO_ROUTING, unix.IPPROTO_DSTOPTS:
			case unix.IPPROTO_AH:
				n = (int(b[1]) + 2) * 4
			default:
				return nil, errBadSYN
			}
			if n > len(b) {
				return nil, errBadSYN
			}
			kind, b = b[0], b[n:]
		}
		return b, nil
	}
	return nil, errBadSYN
}

// savedSYN reads the saved SYN into b. (Package unix has no function for an option of arbitrary bytes.)
func savedSYN(fd int, b []byte) (int, error) {
	n := uint32(len(b))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.IPPROTO_TCP, unix.TCP_SAVED_SYN,
		uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&n)), 0)
	switch {
	case errno != 0:
		return 0, wrap("TCP_SAVED_SYN", errno)
	case n == 0:
		return 0, errNoSYN
	}
	return min(int(n), len(b)), nil
}
