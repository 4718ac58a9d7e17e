package tcpid

// Stamp is the timestamp (RFC 7323) in the SYN that began a connection: milliseconds of the dialer's
// clock plus a random number of the dialer's kernel. The acceptor reads it from the SYN, the dialer
// calculates it. Each end shows one half, so that both know that they hold the same TCP connection: the
// dialer sends the low half (Challenge), the acceptor answers with the high half, and the dialer checks
// it (Confirm).
//
// It distinguishes hosts, not the users of a host. The stamp is in the connection's packets, and any
// user who can run programs on the dialer's host can find it out: the kernel shows all users when a
// connection was made (ss -i), and gives the same random number to the same addresses and ports in
// another network namespace, which users may often create. Up to Linux 6.18.16 the random number is
// even the same for all connections between two addresses, so that any user who accepts connections on
// the acceptor's host learns it, too.
//
// Everybody else has to guess: in the dialer's place, one guess in 1,008 is right (2·stampSlack+1 of
// 65,536); in the acceptor's place, one in 65,536. So Proof counts the wrong guesses of each connection. A
// process that both ends connect to in place of each other can pass on what they send.
type Stamp uint32

// stampSlack is by how many milliseconds the dialer's stamp may be wrong. The dialer counts the time
// since the SYN in the kernel's ticks (4 ms at 250 Hz), and the kernel leaves out the clock's lowest
// bit (1 ms): ±4 ms were seen on an idle machine. Where the host has no processor for a while, as on
// busy virtual machines, ticks come late: -5 to 6 ms were seen on an emulated machine.
const stampSlack = 32

// Challenge is the half that the dialer sends.
func (s Stamp) Challenge() uint16 { return uint16(s) }

// answer is the half that the acceptor sends, if the challenge is the dialer's.
func (s Stamp) answer(challenge uint16) (answer uint16, ok bool) {
	off := int16(challenge - uint16(s)) // modulo 2¹⁶
	if off < -stampSlack || off > stampSlack {
		return 0, false
	}
	// The high half of the dialer's own stamp, which may differ from this one's.
	return uint16((s + Stamp(off)) >> 16), true
}

// Confirm reports whether an answer to the dialer's challenge is the acceptor's.
func (s Stamp) Confirm(answer uint16) bool { return answer == uint16(s>>16) }
