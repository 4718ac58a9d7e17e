// Package hello is what the two ends of a TCP connection tell each other before they move it: the
// proposal and the answer, whose encoding is part of the protocol (docs/PROTOCOL.md).
package hello

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"syscall"

	"github.com/sanconn/san/internal/tcpid"
	"github.com/sanconn/san/session"
)

// Proposal is the dialer's proposal to move a TCP connection: which connection, and the proof that the
// dialer has it.
type Proposal struct {
	Ends tcpid.Ends // as the dialer sees them

	// On one host: the cookies of the dialer's socket and of the acceptor's.
	Cookie, PeerCookie uint64

	// Between hosts or network namespaces: the dialer's half of the connection's stamp.
	Stamped   bool
	Challenge uint16
}

const (
	proposalSize = 2 + 2*18 + 2*8 + 2

	proposalStamped = 1 // flag
)

var le = binary.LittleEndian

// Encode encodes the proposal.
func (p Proposal) Encode() []byte {
	b := make([]byte, 2, proposalSize)
	if p.Stamped {
		b[1] = proposalStamped
	}
	b = appendAddr(b, p.Ends.Local)
	b = appendAddr(b, p.Ends.Remote)
	b = le.AppendUint64(b, p.Cookie)
	b = le.AppendUint64(b, p.PeerCookie)
	return le.AppendUint16(b, p.Challenge)
}

func appendAddr(b []byte, a netip.AddrPort) []byte {
	ip := a.Addr().As16()
	return le.AppendUint16(append(b, ip[:]...), a.Port())
}

var errNotUnderstood = errors.New("san: a proposal that is not understood")

// ParseProposal decodes what Encode returns. Bytes behind it are ignored.
func ParseProposal(b []byte) (p Proposal, err error) {
	if len(b) < proposalSize {
		return p, errNotUnderstood
	}
	p.Stamped = b[1]&proposalStamped != 0
	p.Ends = tcpid.Ends{Local: parseAddr(b[2:]), Remote: parseAddr(b[20:])}
	p.Cookie, p.PeerCookie = le.Uint64(b[38:]), le.Uint64(b[46:])
	p.Challenge = le.Uint16(b[54:])
	return p, nil
}

func parseAddr(b []byte) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom16([16]byte(b[:16])).Unmap(), le.Uint16(b[16:]))
}

// Answer is the acceptor's answer to a proposal: whether the connection moves, and the proof that the
// acceptor has it.
type Answer struct {
	Code  Code
	Stamp uint16 // the acceptor's half of the stamp, if the proposal was stamped

	// Undecided, with Unknown: the process has the connection, but its listener's condition has not
	// decided yet.
	Undecided bool
}

const answerUndecided = 1 // flag

// Code is the result in an answer.
type Code uint8

const (
	Moves   Code = iota
	Unknown      // the process does not have the connection, or not yet
	Other        // the process has the connection, but the dialer is not its other end
	Stays        // the connection does not move now
	Refused      // the listener's condition refuses the move; the proof is in the answer all the same
)

// Encode encodes the answer.
func (a Answer) Encode() []byte {
	b := le.AppendUint16([]byte{byte(a.Code)}, a.Stamp)
	if a.Undecided {
		b = append(b, answerUndecided)
	}
	return b
}

// ParseAnswer decodes what Encode returns. Bytes behind it are ignored.
func ParseAnswer(b []byte) (a Answer, err error) {
	if len(b) < 3 {
		return a, errNotUnderstood
	}
	a = Answer{Code: Code(b[0]), Stamp: le.Uint16(b[1:])}
	a.Undecided = a.Code == Unknown && len(b) > 3 && b[3]&answerUndecided != 0
	return a, nil
}

// Err returns why the connection does not move, or nil if it does.
func (a Answer) Err() error {
	switch a.Code {
	case Moves:
		return nil
	case Unknown:
		if a.Undecided {
			return &session.Unavailable{Reason: session.ReasonTimeout, Err: ErrUndecided}
		}
		return &session.Unavailable{Reason: session.ReasonNoListener, Err: ErrUnknown}
	case Other:
		return &session.Unavailable{Reason: session.ReasonOwner, Err: ErrOther}
	case Refused:
		return &session.Unavailable{Reason: session.ReasonRefused, Err: errRefused}
	case Stays:
		return &session.Unavailable{Reason: session.ReasonStays, Err: ErrStays}
	}
	return &session.Unavailable{Reason: session.ReasonProtocol, Err: errNotUnderstood}
}

// Why a connection does not move, or not yet.
var (
	ErrNotAccepted = errors.New("the other end has not been accepted yet") // so there is no process to propose to
	ErrUnknown     = errors.New("the process that was asked does not have the connection's other end")
	ErrOther       = errors.New("the process that was asked takes this end for another one")
	ErrImpostor    = errors.New("the answer is not from the connection's other end")
	ErrGuessed     = fmt.Errorf("%w, too often", ErrImpostor) // no further answer is accepted
	ErrStays       = errors.New("the peer's end stays on TCP")
	ErrUndecided   = errors.New("the listener's condition has not decided yet")
	errRefused     = fmt.Errorf("the listener's condition: %w", syscall.ECONNREFUSED) // without the condition's own error, which stays at the listener
)
