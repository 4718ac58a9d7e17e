package tcpid

// Stamp is the timestamp (RFC 7323) in the SYN that began a connection, in milliseconds of
// the dialer's clock plus a random number that the dialer's kernel adds. The acceptor has it
// from the SYN, the dialer works it out. One half each way shows that both hold the same TCP
// connection: the dialer sends its Challenge, the acceptor Answers, the dialer Confirms.
//
// It distinguishes hosts, not the users of a host. The stamp is in the connection's
// packets, and any user who may run programs on the dialer's host can find it out.
// The kernel shows to all users when a connection was made (ss -i), and gives the same random
// number to the same addresses and ports in another network namespace, which users may often
// make. Up to Linux 6.18.16 it is even one number for all connections between two addresses,
// so that any user who accepts connections on the acceptor's host gets it too.
//
// Everybody else has to guess: in the dialer's place, one guess in 1,008 is right
// (2·stampSlack+1 of 65,536); in the acceptor's place, one in 65,536. So callers count
// failures, of a connection and of a host. Whoever both ends are sent to can pass on what
// they send.
type Stamp uint32

// stampSlack is by how many milliseconds the dialer's stamp may be off. It counts the time
// since the SYN in the kernel's ticks (4 ms at 250 Hz), and the kernel leaves out a bit of
// the clock (1 ms): ±4 ms were seen on an idle machine. Ticks come late where the processors are
// another's for a while, as on busy virtual machines: -5 to 6 ms on one that is emulated.
const stampSlack = 32

// Challenge is the half that the dialer sends.
func (s Stamp) Challenge() uint16 { return uint16(s) }

// answer is the half that the acceptor sends, if the challenge is the dialer's.
func (s Stamp) answer(challenge uint16) (answer uint16, ok bool) {
	off := int16(challenge - uint16(s)) // the nearer way around
	if off < -stampSlack || off > stampSlack {
		return 0, false
	}
	// The other half of the dialer's stamp, which may be another than that of this one.
	return uint16((s + Stamp(off)) >> 16), true
}

// Confirm reports whether an answer to the dialer's challenge is the acceptor's.
func (s Stamp) Confirm(answer uint16) bool { return answer == uint16(s>>16) }
