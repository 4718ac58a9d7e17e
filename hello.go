package san

import (
	"encoding/binary"
	"errors"
	"net/netip"

	"github.com/sanconn/san/internal/tcpid"
)

// hello is the dialer's offer to move a TCP connection: which one, and what shows that the
// dialer has it. Its encoding is part of the protocol (docs/PROTOCOL.md).
type hello struct {
	ends tcpid.Ends // as the dialer sees them

	// On one host: the cookies of the dialer's socket and of the acceptor's.
	cookie, peerCookie uint64

	// Otherwise: half of the connection's stamp.
	stamped   bool
	challenge uint16
}

const (
	helloVersion = 1
	helloSize    = 2 + 2*18 + 2*8 + 2

	helloStamped = 1 // flag
)

var le = binary.LittleEndian

func (h hello) encode() []byte {
	b := make([]byte, 2, helloSize)
	b[0] = helloVersion
	if h.stamped {
		b[1] = helloStamped
	}
	b = appendAddr(b, h.ends.Local)
	b = appendAddr(b, h.ends.Remote)
	b = le.AppendUint64(b, h.cookie)
	b = le.AppendUint64(b, h.peerCookie)
	return le.AppendUint16(b, h.challenge)
}

func appendAddr(b []byte, a netip.AddrPort) []byte {
	ip := a.Addr().As16()
	return le.AppendUint16(append(b, ip[:]...), a.Port())
}

var errHello = errors.New("san: an offer that is not understood")

func parseHello(b []byte) (h hello, err error) {
	if len(b) < helloSize || b[0] != helloVersion {
		return h, errHello
	}
	h.stamped = b[1]&helloStamped != 0
	h.ends = tcpid.Ends{Local: parseAddr(b[2:]), Remote: parseAddr(b[20:])}
	h.cookie, h.peerCookie = le.Uint64(b[38:]), le.Uint64(b[46:])
	h.challenge = le.Uint16(b[54:])
	return h, nil
}

func parseAddr(b []byte) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom16([16]byte(b[:16])).Unmap(), le.Uint16(b[16:]))
}

// answer is the acceptor's: whether it moves, and what shows that it has the connection.
type answer struct {
	code  answerCode
	stamp uint16 // the other half, of a stamped offer

	// undecided, of answerUnknown: the process has the connection, and does not know yet. Older
	// dialers do not look at it, and ask again.
	undecided bool
}

const answerUndecided = 1 // flag

type answerCode uint8

const (
	answerMoves   answerCode = iota
	answerUnknown            // the connection is not this process's, or not yet
	answerOther              // it is, but the dialer is not its other end
	answerStays              // it does not move now
	answerRefused            // the listener's condition refuses it; a stamp is answered
)

func (a answer) encode() []byte {
	b := le.AppendUint16([]byte{byte(a.code)}, a.stamp)
	if a.undecided {
		b = append(b, answerUndecided)
	}
	return b
}

func parseAnswer(b []byte) (a answer, err error) {
	if len(b) < 3 {
		return a, errHello
	}
	a = answer{code: answerCode(b[0]), stamp: le.Uint16(b[1:])}
	a.undecided = a.code == answerUnknown && len(b) > 3 && b[3]&answerUndecided != 0
	return a, nil
}

// err is why the connection does not move; nil: it does.
func (a answer) err() error {
	switch a.code {
	case answerMoves:
		return nil
	case answerUnknown:
		if a.undecided {
			return &Unavailable{Reason: ReasonTimeout, Err: errUndecided}
		}
		return &Unavailable{Reason: ReasonNoListener, Err: errUnknown}
	case answerOther:
		return &Unavailable{Reason: ReasonOwner, Err: errOther}
	case answerRefused:
		return &Unavailable{Reason: ReasonRefused, Err: errRefused}
	case answerStays:
		return &Unavailable{Reason: ReasonStays, Err: errors.New("the peer's end stays on TCP")}
	}
	return &Unavailable{Reason: ReasonProtocol, Err: errHello}
}

var (
	errUnknown  = errors.New("the process that was asked does not have the connection's other end")
	errOther    = errors.New("the process that was asked takes this end for another one")
	errImpostor = errors.New("the answer is not from the connection's other end")
)
